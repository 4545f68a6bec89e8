/* moe4 quantize: the experts of an unquantised checkpoint to MXFP4. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <jansson.h>

#include "command.h"
#include "dense.h"
#include "encode.h"
#include "memory.h"
#include "message.h"
#include "options.h"
#include "output.h"
#include "report.h"
#include "storage.h"
#include "tensor.h"

static const char *const rule_words[] = {"even", "floor", "ceil", "mse", NULL}; /* index = moe4_scale_rule */

enum { UNIT_COPY, UNIT_MATRIX, UNIT_STACK, UNIT_SPLIT, UNIT_SPLIT_BIAS };

struct quantize {
    const char *source, *target;
    int to, rule, check, force, json;

    moe4_context *context;
    moe4_tensors *tensors;
    json_t *source_config, *config;
    struct dense_model model;
    struct output output;
    struct encoder encoder;
    struct slab slab;
    double started;
};

/* ---- The plan ---------------------------------------------------------------------------------------------------- */

struct name {
    char text[512];
};

__attribute__((format(printf, 1, 2))) static struct name name_make(const char *format, ...)
{
    struct name name;
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(name.text, sizeof name.text, format, arguments);
    va_end(arguments);
    return name;
}

/* Codes and scales of a matrix [rows, K] of one expert. */
static int plan_pair(struct quantize *self, const char *base, int64_t rows, int64_t K)
{
    const struct storage *storage = &storages[self->to];
    int code = output_add(&self->output, name_make("%s%s", base, storage->codes).text, storage->codes_dtype, 2,
                          (int64_t[]){rows, K / 2});
    return code ? code
                : output_add(&self->output, name_make("%s%s", base, storage->scales).text, storage->scales_dtype, 2,
                             (int64_t[]){rows, K / 32});
}

static int check_K(const moe4_tensor *tensor, int64_t K)
{
    if (K > 0 && K % 32 == 0) return EXIT_OK;
    return fail("%s: rows of %lld elements, expected a multiple of 32", tensor->name, (long long)K);
}

static int plan_matrix(struct quantize *self, const moe4_tensor *tensor)
{
    if (storages[self->to].is_stacked)
        return fail("%s: one expert's alone, but the layout gpt-oss stacks all experts of a layer: "
                    "--to compressed-tensors keeps them apart",
                    tensor->name);
    if (tensor->rank != 2)
        return fail("%s: shape %s, expected a matrix", tensor->name, shape_show(tensor->rank, tensor->shape).text);
    struct output_unit *unit = output_add_unit(&self->output, UNIT_MATRIX);
    if (!unit) return EXIT_FAILED;
    unit->source[0] = tensor;
    int code = check_K(tensor, tensor->shape[1]);
    int length = (int)(strlen(tensor->name) - strlen("weight"));
    return code ? code
                : plan_pair(self, name_make("%.*s", length, tensor->name).text, tensor->shape[0], tensor->shape[1]);
}

/* Rows and columns of a stacked tensor's matrices; says so if its shape is another. */
static int stack_sizes(const struct quantize *self, const moe4_tensor *tensor, enum dense_kind kind, int64_t *rows,
                       int64_t *K)
{
    const struct dense_model *model = &self->model;
    *rows = kind == DENSE_GATE_UP ? 2 * model->I : model->H;
    *K = kind == DENSE_GATE_UP ? model->H : model->I;
    int64_t second = model->is_transposed ? *K : *rows, third = model->is_transposed ? *rows : *K;
    if (tensor->rank == 3 && tensor->shape[0] == model->E && tensor->shape[1] == second && tensor->shape[2] == third)
        return check_K(tensor, *K);
    return fail("%s: shape %s, expected [%lld, %lld, %lld]", tensor->name, shape_show(tensor->rank, tensor->shape).text,
                (long long)model->E, (long long)second, (long long)third);
}

static int plan_stack(struct quantize *self, const moe4_tensor *tensor, enum dense_kind kind)
{
    int64_t rows, K, E = self->model.E;
    struct output_unit *unit = output_add_unit(&self->output, UNIT_STACK);
    int code = unit ? stack_sizes(self, tensor, kind, &rows, &K) : EXIT_FAILED;
    if (code) return code;
    unit->source[0] = tensor;
    code =
        output_add(&self->output, name_make("%s_blocks", tensor->name).text, "U8", 4, (int64_t[]){E, rows, K / 32, 16});
    return code ? code
                : output_add(&self->output, name_make("%s_scales", tensor->name).text, "U8", 3,
                             (int64_t[]){E, rows, K / 32});
}

/* A stacked tensor's experts apart, and gate from up. */
static int plan_split(struct quantize *self, const moe4_tensor *tensor, const struct dense_name *name)
{
    int64_t rows, K;
    int is_gate_up = name->kind == DENSE_GATE_UP;
    int code = stack_sizes(self, tensor, name->kind, &rows, &K);
    for (int32_t e = 0; !code && e < self->model.E; ++e) {
        struct output_unit *unit = output_add_unit(&self->output, UNIT_SPLIT);
        if (!unit) return EXIT_FAILED;
        unit->source[0] = tensor;
        unit->expert = e;
        for (int role = is_gate_up ? ROLE_GATE : ROLE_DOWN; !code && role <= (is_gate_up ? ROLE_UP : ROLE_DOWN); ++role)
            code = plan_pair(self,
                             name_make("%.*s%d.%s.", name->base_length, tensor->name, e,
                                       projection_word(tensor->name, (enum projection_role)role))
                                 .text,
                             is_gate_up ? rows / 2 : rows, K);
    }
    return code;
}

static int plan_split_bias(struct quantize *self, const moe4_tensor *tensor, const struct dense_name *name)
{
    int is_gate_up = name->kind == DENSE_GATE_UP_BIAS, code = EXIT_OK;
    int64_t rows = is_gate_up ? 2 * self->model.I : self->model.H, half = is_gate_up ? rows / 2 : rows;
    if (tensor->rank != 2 || tensor->shape[0] != self->model.E || tensor->shape[1] != rows)
        return fail("%s: shape %s, expected [%lld, %lld]", tensor->name, shape_show(tensor->rank, tensor->shape).text,
                    (long long)self->model.E, (long long)rows);
    for (int32_t e = 0; !code && e < self->model.E; ++e) {
        struct output_unit *unit = output_add_unit(&self->output, UNIT_SPLIT_BIAS);
        if (!unit) return EXIT_FAILED;
        unit->source[0] = tensor;
        unit->expert = e;
        for (int role = is_gate_up ? ROLE_GATE : ROLE_DOWN; !code && role <= (is_gate_up ? ROLE_UP : ROLE_DOWN); ++role)
            code = output_add(&self->output,
                              name_make("%.*s%d.%s.bias", name->base_length, tensor->name, e,
                                        projection_word(tensor->name, (enum projection_role)role))
                                  .text,
                              tensor->dtype, 1, &half);
    }
    return code;
}

static int plan_copy(struct quantize *self, const moe4_tensor *tensor)
{
    struct output_unit *unit = output_add_unit(&self->output, UNIT_COPY);
    if (!unit) return EXIT_FAILED;
    unit->source[0] = tensor;
    return output_add(&self->output, tensor->name, tensor->dtype, tensor->rank, tensor->shape);
}

static int is_float(const moe4_tensor *tensor)
{
    return !strcmp(tensor->dtype, "BF16") || !strcmp(tensor->dtype, "F16") || !strcmp(tensor->dtype, "F32");
}

static int plan_tensor(struct quantize *self, const moe4_tensor *tensor)
{
    struct dense_name name = dense_parse(tensor->name);
    int is_stacked = storages[self->to].is_stacked;
    if (name.kind != DENSE_NONE && !is_float(tensor))
        return fail("%s: dtype %s, expected BF16, F16 or F32: it is quantised already", tensor->name, tensor->dtype);
    switch (name.kind) {
    case DENSE_EXPERT: return plan_matrix(self, tensor);
    case DENSE_GATE_UP:
    case DENSE_DOWN: return is_stacked ? plan_stack(self, tensor, name.kind) : plan_split(self, tensor, &name);
    case DENSE_GATE_UP_BIAS:
    case DENSE_DOWN_BIAS: return is_stacked ? plan_copy(self, tensor) : plan_split_bias(self, tensor, &name);
    default: return plan_copy(self, tensor);
    }
}

static int plan(struct quantize *self)
{
    const moe4_tensor *gate_up = NULL;
    int64_t n = moe4_tensors_count(self->tensors), n_experts = 0;
    for (int64_t i = 0; i < n; ++i) {
        enum dense_kind kind = dense_parse(moe4_tensors_get(self->tensors, i)->name).kind;
        n_experts += kind == DENSE_EXPERT || kind == DENSE_GATE_UP || kind == DENSE_DOWN;
        if (kind == DENSE_GATE_UP && !gate_up) gate_up = moe4_tensors_get(self->tensors, i);
    }
    if (!n_experts)
        return fail("%s: no expert weights of bf16, f16 or f32 (...experts.N.gate_proj.weight, ...experts.gate_up_proj "
                    "and their like)",
                    self->source);
    int code = dense_model_read(self->source_config, gate_up, &self->model);
    for (int64_t i = 0; !code && i < n; ++i) code = plan_tensor(self, moe4_tensors_get(self->tensors, i));
    return code;
}

/* ---- Units ------------------------------------------------------------------------------------------------------- */

/* Encodes rows first, first + step, ... of the slab into the unit's tensors `index` and `index` + 1, at expert `at`. */
static int write_rows(struct quantize *self, const struct output_unit *unit, int32_t index, int64_t at,
                      struct row_range rows)
{
    const moe4_tensor *target = &self->output.tensors[unit->first + index];
    int code = encode_rows(&self->encoder, &self->slab, rows, target->name);
    int64_t codes_bytes = rows.count * (self->slab.K / 2), scales_bytes = rows.count * (self->slab.K / 32);
    if (!code) code = output_put(&self->output, unit, index, at * codes_bytes, codes_bytes, self->encoder.codes);
    if (!code) code = output_put(&self->output, unit, index + 1, at * scales_bytes, scales_bytes, self->encoder.scales);
    return code;
}

static int slab_load(struct quantize *self, const moe4_tensor *tensor, int64_t expert, int is_transposed)
{
    return slab_read(self->context, self->tensors, tensor, expert * self->slab.rows * self->slab.K, is_transposed,
                     &self->slab);
}

static int produce_matrix(struct quantize *self, const struct output_unit *unit)
{
    const moe4_tensor *tensor = unit->source[0];
    self->slab.rows = tensor->shape[0];
    self->slab.K = tensor->shape[1];
    int code = slab_load(self, tensor, 0, 0);
    return code ? code : write_rows(self, unit, 0, 0, (struct row_range){0, 1, tensor->shape[0]});
}

static void slab_size(struct quantize *self, const moe4_tensor *tensor)
{
    int transposed = self->model.is_transposed;
    self->slab.rows = tensor->shape[transposed ? 2 : 1];
    self->slab.K = tensor->shape[transposed ? 1 : 2];
}

static int produce_stack(struct quantize *self, const struct output_unit *unit)
{
    int code = EXIT_OK;
    slab_size(self, unit->source[0]);
    for (int64_t e = 0; !code && e < self->model.E; ++e) {
        code = slab_load(self, unit->source[0], e, self->model.is_transposed);
        if (!code) code = write_rows(self, unit, 0, e, (struct row_range){0, 1, self->slab.rows});
    }
    return code;
}

/* Which rows of gate and up a half is. */
static struct row_range half_rows(const struct quantize *self, int64_t rows, int half, int n_halves)
{
    if (n_halves == 1) return (struct row_range){0, 1, rows};
    if (self->model.is_interleaved) return (struct row_range){half, 2, rows / 2};
    return (struct row_range){half * (rows / 2), 1, rows / 2};
}

static int produce_split(struct quantize *self, const struct output_unit *unit)
{
    slab_size(self, unit->source[0]);
    int n_halves = unit->n_tensors / 2,
        code = slab_load(self, unit->source[0], unit->expert, self->model.is_transposed);
    for (int half = 0; !code && half < n_halves; ++half)
        code = write_rows(self, unit, 2 * half, 0, half_rows(self, self->slab.rows, half, n_halves));
    return code;
}

static int produce_split_bias(struct quantize *self, const struct output_unit *unit)
{
    const moe4_tensor *tensor = unit->source[0];
    int64_t rows = tensor->shape[1], element = (int64_t)dtype_bytes(dtype_named(tensor->dtype));
    char *bias = NULL, *half_bias = NULL;
    int code = allocate(&bias, rows, (size_t)element, "biases");
    if (!code) code = allocate(&half_bias, rows, (size_t)element, "biases");
    if (!code && moe4_tensors_read(self->context, self->tensors, tensor, unit->expert * rows * element, rows * element,
                                   bias) != MOE4_OK)
        code = fail_library(self->context);
    for (int half = 0; !code && half < unit->n_tensors; ++half) {
        struct row_range range = half_rows(self, rows, half, unit->n_tensors);
        for (int64_t i = 0; i < range.count; ++i)
            memcpy(half_bias + i * element, bias + (range.first + i * range.step) * element, (size_t)element);
        code = output_put(&self->output, unit, half, 0, range.count * element, half_bias);
    }
    free(bias);
    free(half_bias);
    return code;
}

static int produce(void *user, struct output *output, const struct output_unit *unit)
{
    struct quantize *self = user;
    switch (unit->kind) {
    case UNIT_MATRIX: return produce_matrix(self, unit);
    case UNIT_STACK: return produce_stack(self, unit);
    case UNIT_SPLIT: return produce_split(self, unit);
    case UNIT_SPLIT_BIAS: return produce_split_bias(self, unit);
    default: return output_copy(output, self->tensors, unit);
    }
}

/* ---- Command ----------------------------------------------------------------------------------------------------- */

static void report(const struct quantize *self)
{
    const struct output *output = &self->output;
    double seconds = seconds_now() - self->started;
    if (self->json) {
        json_t *object = json_object();
        json_put_text(object, "path", self->target);
        json_put_text(object, "layout", storage_words[self->to]);
        json_put_text(object, "rule", rule_words[self->rule]);
        json_put_integer(object, "bytes", output->bytes_total);
        json_put_integer(object, "shards", output->n_shards);
        json_put_integer(object, "shards_kept", output->n_kept);
        json_put_real(object, "seconds", seconds);
        encoder_json(&self->encoder, object);
        report_json(object);
        return;
    }
    report_title("%s", self->target);
    report_field("contents", "layout %s, rule %s, %s in %s", storage_words[self->to], rule_words[self->rule],
                 human_bytes((double)output->bytes_total).text, human_plural(output->n_shards, "shard").text);
    if (output->n_kept) report_field("kept", "%s that were there", human_plural(output->n_kept, "shard").text);
    report_field("time", "%s", human_milliseconds(1000 * seconds).text);
    encoder_report(&self->encoder);
}

static int quantize_run(struct quantize *self)
{
    char what[128];
    self->source_config = storage_config_read(self->source);
    if (!self->source_config) return EXIT_FAILED;
    self->config = storage_config((storage_kind)self->to, self->source_config);
    if (!self->config) return EXIT_FAILED;
    if (moe4_tensors_open(self->context, self->source, &self->tensors) != MOE4_OK) return fail_library(self->context);
    snprintf(what, sizeof what, "quantize to %s by %s", storage_words[self->to], rule_words[self->rule]);
    int code = output_begin(&self->output, what, self->tensors);
    const char *const metadata[] = {"moe4.scale_rule", rule_words[self->rule], "format", "pt", NULL};
    memcpy(self->output.metadata + 2, metadata, sizeof metadata);
    if (!code) code = plan(self);
    if (!code) code = output_write(&self->output, self->config, produce, self);
    if (!code) report(self);
    return code;
}

int cmd_quantize(int argc, char **argv)
{
    struct quantize self = {.to = -1};
    const struct option options[] = {
        option_operand("SRC", &self.source, "a checkpoint with experts in bf16, f16 or f32"),
        option_operand("DST", &self.target, "folder to write"),
        option_required(option_word("--to", storage_words, &self.to, "the layout to write")),
        option_word("--rule", rule_words, &self.rule, "how a block's scale is chosen (even)"),
        option_integer("--shard-bytes", "N", &self.output.shard_bytes, 1, INT64_MAX, "bytes a file, about (5 GB)"),
        option_flag("--check", &self.check, "compare rows of every matrix with the oracle"),
        option_flag("--force", &self.force, "replace what DST holds"),
        option_flag("--json", &self.json, "report as one JSON object"),
    };
    const struct usage usage = {"quantize", "Quantises the experts of a checkpoint to MXFP4.", options,
                                sizeof options / sizeof *options};
    int code;
    self.output.shard_bytes = 5000000000;
    if (!options_parse(&usage, argc, argv, &code)) return code;
    moe4_context_info info = MOE4_CONTEXT_INFO_INIT;
    self.started = seconds_now();
    code = context_open(MOE4_ISA_AUTO, 0, NULL, &self.context, &info);
    self.output.context = self.context;
    self.output.folder = self.target;
    self.output.force = self.force;
    self.encoder = (struct encoder){
        .rule = (moe4_scale_rule)self.rule, .n_threads = info.n_threads, .n_checked_rows = self.check ? 16 : 0};
    if (!code) code = quantize_run(&self);
    output_release(&self.output);
    encoder_release(&self.encoder);
    slab_release(&self.slab);
    moe4_tensors_close(self.tensors);
    json_decref(self.source_config);
    json_decref(self.config);
    moe4_context_destroy(self.context);
    return code;
}
