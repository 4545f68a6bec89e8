/* moe4 combine: the weighted sum that run --deferred has left undone. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <jansson.h>

#include "command.h"
#include "machine.h"
#include "memory.h"
#include "message.h"
#include "mirror.h"
#include "options.h"
#include "progress.h"
#include "ref.h"
#include "report.h"
#include "tensor.h"
#include "words.h"

struct combine {
    const char *input_file, *output_file;
    struct machine_choice where;
    double scale;
    int backend, output, check, json;

    struct machine machine;
    int64_t n_tokens, top_k, n_rows, columns;
    struct tensor_data rows, map, given_weights, addend; /* [R, columns], [T, A], [T, A], [T, columns] or none */
    float *weights;                                      /* [T, A] */
    void *y;                                             /* [T, columns] */
    moe4_dtype y_dtype;
    struct mirror mirror;
    double ms;
};

/* ---- Files ------------------------------------------------------------------------------------------------------- */

static int combine_read(struct combine *self, const moe4_tensors *tensors)
{
    moe4_context *context = self->machine.context;
    const struct tensor_want rows = {"gemm2_rows", 2, {ANY_SIZE, ANY_SIZE}, {MOE4_DTYPE_BF16}};
    const struct tensor_want map = {"row_map", 2, {ANY_SIZE, ANY_SIZE}, {MOE4_DTYPE_I32}};
    int code = tensor_load(context, tensors, &rows, &self->rows);
    if (!code) code = tensor_load(context, tensors, &map, &self->map);
    if (code) return code;
    self->n_rows = self->rows.shape[0];
    self->columns = self->rows.shape[1];
    self->n_tokens = self->map.shape[0];
    self->top_k = self->map.shape[1];
    const struct tensor_want weights = {
        "expert_weights", 2, {self->n_tokens, self->top_k}, {MOE4_DTYPE_F32, MOE4_DTYPE_BF16}};
    const struct tensor_want addend = {
        "addend", 2, {self->n_tokens, self->columns}, {MOE4_DTYPE_F32, MOE4_DTYPE_BF16, MOE4_DTYPE_F16}};
    code = tensor_load(context, tensors, &weights, &self->given_weights);
    if (!code && moe4_tensors_find(tensors, addend.name)) code = tensor_load(context, tensors, &addend, &self->addend);
    return code;
}

static int combine_open(struct combine *self)
{
    moe4_tensors *tensors = NULL;
    int code = machine_open(&self->where, &self->machine);
    if (!code && moe4_tensors_open(self->machine.context, self->input_file, &tensors) != MOE4_OK)
        code = fail_library(self->machine.context);
    if (!code) code = combine_read(self, tensors);
    moe4_tensors_close(tensors);
    if (code) return code;
    if (self->top_k > INT32_MAX) return fail("row_map: %lld slots a token", (long long)self->top_k);
    const int64_t n_slots = self->n_tokens * self->top_k;
    code = allocate(&self->weights, n_slots, sizeof *self->weights, "expert weights");
    for (int64_t p = 0; !code && p < n_slots; ++p)
        self->weights[p] = (float)ref_load(self->given_weights.data, self->given_weights.dtype, p);
    if (!code) code = allocate(&self->y, self->n_tokens * self->columns, dtype_bytes(self->y_dtype), "the output");
    return code;
}

static int combine_save(const struct combine *self)
{
    const struct tensor_output output = {"output", self->y_dtype, 2, {self->n_tokens, self->columns}, self->y};
    return tensors_save(self->machine.context, self->output_file, &output, 1);
}

/* ---- The sum ----------------------------------------------------------------------------------------------------- */

/* Gives every block a copy where the sum is made. */
static int combine_mirror(struct combine *self)
{
    const int64_t T = self->n_tokens, A = self->top_k, O = self->columns;
    const struct {
        void *host;
        int64_t count;
        size_t bytes;
    } blocks[] = {{self->rows.data, self->n_rows * O, sizeof(uint16_t)},
                  {self->map.data, T * A, sizeof(int32_t)},
                  {self->weights, T * A, sizeof *self->weights},
                  {self->addend.data, T * O, dtype_bytes(self->addend.dtype)},
                  {self->y, T * O, dtype_bytes(self->y_dtype)}};
    int code = EXIT_OK;
    self->mirror.gpu = self->machine.gpu;
    for (size_t i = 0; !code && i < sizeof blocks / sizeof *blocks; ++i) {
        code = mirror_add(&self->mirror, blocks[i].host, (size_t)blocks[i].count * blocks[i].bytes, "rows");
        if (!code && blocks[i].host != self->y) code = mirror_upload(&self->mirror, blocks[i].host);
    }
    return code;
}

static int combine_run(struct combine *self)
{
    moe4_deferred deferred = MOE4_DEFERRED_INIT;
    moe4_result result = MOE4_RESULT_INIT;
    int code = combine_mirror(self);
    if (code) return code;
    deferred.n_tokens = self->n_tokens;
    deferred.top_k = (int32_t)self->top_k;
    deferred.output_size = self->columns;
    deferred.gemm2_rows = mirror_of(&self->mirror, self->rows.data);
    deferred.n_rows = self->n_rows;
    deferred.row_map = mirror_of(&self->mirror, self->map.data);
    deferred.weights = mirror_of(&self->mirror, self->weights);
    deferred.scale = self->scale == 1 ? 0 : (float)self->scale; /* 0: none */
    deferred.addend = mirror_of(&self->mirror, self->addend.data);
    deferred.addend_dtype = self->addend.data ? self->addend.dtype : MOE4_DTYPE_BF16;
    deferred.stream = self->machine.gpu ? self->machine.gpu->stream : NULL;
    result.y = mirror_of(&self->mirror, self->y);
    result.y_dtype = self->y_dtype;
    const double started = seconds_now();
    if (moe4_combine(self->machine.context, &deferred, &result) != MOE4_OK) return fail_library(self->machine.context);
    code = mirror_download(&self->mirror, self->y);
    self->ms = 1000 * (seconds_now() - started);
    return code || moe4_context_check(self->machine.context) == MOE4_OK ? code : fail_library(self->machine.context);
}

/* Every element against the oracle's, bit for bit. */
static int combine_check(const struct combine *self)
{
    const int64_t O = self->columns;
    const uint16_t **rows;
    float *sum = NULL;
    int64_t n_wrong = 0;
    int code = allocate(&rows, self->top_k, sizeof *rows, "a token's rows");
    if (!code) code = allocate(&sum, O, sizeof *sum, "a token's sum");
    for (int64_t t = 0; !code && t < self->n_tokens; ++t) {
        const int32_t *map = (const int32_t *)self->map.data + t * self->top_k;
        for (int64_t a = 0; a < self->top_k; ++a)
            rows[a] = map[a] < 0 ? NULL : (const uint16_t *)self->rows.data + map[a] * O;
        ref_combine(O, (int32_t)self->top_k, rows, self->weights + t * self->top_k, sum);
        for (int64_t o = 0; o < O; ++o) {
            const float scaled = self->scale == 1 ? sum[o] : (float)ref_round_f32((double)(float)self->scale * sum[o]);
            const moe4_write write = self->addend.data ? MOE4_WRITE_ADD : MOE4_WRITE_OVERWRITE;
            const double before = self->addend.data ? ref_load(self->addend.data, self->addend.dtype, t * O + o) : 0;
            const double expected = ref_output(scaled, write, before, self->y_dtype);
            const double got = ref_load(self->y, self->y_dtype, t * O + o);
            n_wrong += !(got == expected || (isnan(got) && isnan(expected)));
        }
    }
    free(rows);
    free(sum);
    if (!code && n_wrong)
        code = fail("%lld of %lld elements are not the oracle's", (long long)n_wrong, (long long)(self->n_tokens * O));
    return code;
}

/* ---- Command ----------------------------------------------------------------------------------------------------- */

static void combine_report(const struct combine *self)
{
    if (self->json) {
        json_t *object = json_object();
        json_put_text(object, "backend", machine_word(&self->machine));
        json_put_integer(object, "tokens", self->n_tokens);
        json_put_integer(object, "top_k", self->top_k);
        json_put_integer(object, "rows", self->n_rows);
        json_put_integer(object, "columns", self->columns);
        json_put_real(object, "scale", self->scale);
        json_put_truth(object, "addend", self->addend.data != NULL);
        json_put_text(object, "output_dtype", output_words[self->output]);
        json_put_real(object, "ms", self->ms);
        json_put_text(object, "output", self->output_file);
        if (self->check) json_put_truth(object, "ok", 1);
        report_json(object);
        return;
    }
    report_title("%lld rows of %lld for %lld tokens, %lld slots each", (long long)self->n_rows,
                 (long long)self->columns, (long long)self->n_tokens, (long long)self->top_k);
    report_field("machine", "%s", machine_show(&self->machine).text);
    report_field("time", "%s", human_milliseconds(self->ms).text);
    report_field("output", "%s%s", self->output_file, self->addend.data ? ", added to the input's addend" : "");
    if (self->check) report_field("check", "%s  every element is the oracle's", human_outcome(1).text);
}

int cmd_combine(int argc, char **argv)
{
    struct combine self = {.scale = 1};
    const struct option options[] = {
        option_required(option_text("--input", "FILE", &self.input_file,
                                    "safetensors file with gemm2_rows [R, H], row_map [T, A] and expert_weights "
                                    "[T, A], as run --deferred writes it, optionally addend [T, H]")),
        option_required(option_text("--output", "FILE", &self.output_file, "safetensors file to write output to")),
        option_number("--scale", "S", &self.scale, "multiplies the sum before the addend (1)"),
        option_word("--output-dtype", output_words, &self.output, "the output's format (bf16)"),
        option_word("--backend", backend_words, &self.backend, "where it runs; cuda is GPU 0 (cpu)"),
        option_flag("--check", &self.check, "compare every element with the oracle, bit for bit"),
        option_flag("--json", &self.json, "report as one JSON object"),
    };
    const struct usage usage = {"combine", "Adds up the rows that run --deferred has left: the weighted sum.", options,
                                sizeof options / sizeof *options};
    int code;
    if (!options_parse(&usage, argc, argv, &code)) return code;
    if (self.scale == 0) return fail_usage("--scale: 0 would leave nothing of the sum");
    self.where.device = (moe4_device)self.backend;
    self.y_dtype = output_dtype(self.output);
    code = combine_open(&self);
    if (!code) code = combine_run(&self);
    if (!code && self.check) code = combine_check(&self);
    if (!code) code = combine_save(&self);
    if (!code) combine_report(&self);
    mirror_close(&self.mirror);
    void *const blocks[] = {self.rows.data,   self.map.data, self.given_weights.data,
                            self.addend.data, self.weights,  self.y};
    for (size_t i = 0; i < sizeof blocks / sizeof *blocks; ++i) free(blocks[i]);
    machine_close(&self.machine);
    return code;
}
