/* moe4 convert: the same codes and scales in another layout. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <jansson.h>

#include "command.h"
#include "dense.h"
#include "gguf_output.h"
#include "memory.h"
#include "message.h"
#include "options.h"
#include "output.h"
#include "rearrange.h"
#include "report.h"
#include "storage.h"
#include "tensor.h"

enum { UNIT_COPY, UNIT_LAYER, UNIT_EXPERT };
enum { MAX_NAME = 512 };

static const char *const target_words[] = {"gpt-oss", "compressed-tensors", "deepseek-v4", "gguf", NULL};
enum { TO_GGUF = STORAGE_DEEPSEEK_V4 + 1 };

struct convert {
    const char *source, *target;
    int to, force, json;
    struct integer_list layers; /* empty = all of the checkpoint */

    moe4_context *context;
    moe4_checkpoint *checkpoint;
    moe4_checkpoint_info info;
    const moe4_tensors *tensors;
    json_t *source_config, *config;
    struct output output;
    char contents[64];

    moe4_layer_reader *reader; /* of the layer last asked for */
    int32_t reader_layer;
    char *buffer;
    int64_t buffer_room;
    int32_t n_layers;
    double started;
};

/* ---- Layers ------------------------------------------------------------------------------------------------------ */

static int layer_is_wanted(const struct convert *self, int32_t layer)
{
    for (int32_t i = 0; i < self->layers.count; ++i)
        if (self->layers.values[i] == layer) return 1;
    return !self->layers.count;
}

static int layer_is_mxfp4(const struct convert *self, int32_t layer)
{
    for (int32_t i = 0; i < self->info.n_moe_layers; ++i)
        if (moe4_checkpoint_layer_number(self->checkpoint, i) == layer) return 1;
    return 0;
}

/* A GGUF file has no config.json and other names: only the MoE layers of what it holds can be carried over. */
static int is_gguf(const struct convert *self)
{
    return !strcmp(self->info.layout, "GGUF");
}

static int layer_open(struct convert *self, int32_t layer)
{
    if (self->reader && self->reader_layer == layer) return EXIT_OK;
    moe4_reader_options options = MOE4_READER_OPTIONS_INIT;
    options.router = MOE4_ROUTER_SKIP;
    moe4_layer_reader_close(self->reader);
    self->reader = NULL;
    self->reader_layer = layer;
    if (moe4_layer_reader_open(self->context, self->checkpoint, layer, &options, &self->reader) == MOE4_OK)
        return EXIT_OK;
    return fail_library(self->context);
}

/* ---- The plan ---------------------------------------------------------------------------------------------------- */

/* The name of a layer's expert tensors through "experts.", as the source has it. */
static int find_base(const struct convert *self, int32_t layer, char base[MAX_NAME])
{
    static const char mark[] = ".experts.";
    if (is_gguf(self)) {
        snprintf(base, MAX_NAME, "model.layers.%d.mlp.experts.", layer);
        return EXIT_OK;
    }
    for (int64_t i = 0; i < moe4_tensors_count(self->tensors); ++i) {
        const moe4_tensor *tensor = moe4_tensors_get(self->tensors, i);
        const char *found = strstr(tensor->name, mark);
        int32_t number = -1;
        if (!found || moe4_checkpoint_role(self->checkpoint, tensor, &number) != MOE4_ROLE_EXPERT || number != layer)
            continue;
        snprintf(base, MAX_NAME, "%.*s%s", (int)(found - tensor->name), tensor->name, mark);
        return EXIT_OK;
    }
    return fail("%s: layout \"%s\": its names cannot be carried over to %s", self->source, self->info.layout,
                storage_words[self->to]);
}

/* One expert as it is stored, for dtypes of biases. */
static int read_expert(struct convert *self, int32_t layer, int32_t expert, moe4_expert *result)
{
    int code = layer_open(self, layer);
    if (code) return code;
    if (moe4_layer_reader_read(self->context, self->reader, expert, result) == MOE4_OK) return EXIT_OK;
    return fail_library(self->context);
}

static int64_t projection_K(const moe4_layer_config *config, enum projection_role role)
{
    return role == ROLE_DOWN ? config->intermediate_size : config->hidden_size;
}

/* Codes, scales and, where there are any, biases of one expert's projection. */
static int plan_projection(struct convert *self, const char *base, int32_t expert, enum projection_role role,
                           const moe4_expert *sample)
{
    const struct storage *storage = &storages[self->to];
    const moe4_layer_config *config = moe4_layer_reader_config(self->reader);
    const moe4_matrix *matrix = projection_matrix(sample, role);
    int64_t K = projection_K(config, role), rows = row_place(config, role).count;
    char stem[MAX_NAME + 32], name[MAX_NAME + 64];
    snprintf(stem, sizeof stem, "%s%d.%s.", base, expert, projection_word(base, role));
    snprintf(name, sizeof name, "%s%s", stem, storage->codes);
    int code = output_add(&self->output, name, storage->codes_dtype, 2, (int64_t[]){rows, K / 2});
    snprintf(name, sizeof name, "%s%s", stem, storage->scales);
    if (!code) code = output_add(&self->output, name, storage->scales_dtype, 2, (int64_t[]){rows, K / 32});
    snprintf(name, sizeof name, "%sbias", stem);
    if (!code && matrix->bias) code = output_add(&self->output, name, dtype_word(matrix->bias_dtype), 1, &rows);
    return code;
}

static int plan_apart(struct convert *self, const char *base, int32_t layer, const moe4_expert *sample)
{
    int32_t E = moe4_layer_reader_config(self->reader)->n_experts;
    int code = EXIT_OK;
    for (int32_t e = 0; !code && e < E; ++e) {
        struct output_unit *unit = output_add_unit(&self->output, UNIT_EXPERT);
        if (!unit) return EXIT_FAILED;
        unit->layer = layer;
        unit->expert = e;
        for (int role = ROLE_GATE; !code && role < N_PROJECTIONS; ++role)
            code = plan_projection(self, base, e, (enum projection_role)role, sample);
    }
    return code;
}

static int plan_stacked(struct convert *self, const char *base, int32_t layer, const moe4_expert *sample)
{
    const moe4_layer_config *config = moe4_layer_reader_config(self->reader);
    int64_t E = config->n_experts, H = config->hidden_size, I = config->intermediate_size;
    const struct {
        const char *word;
        const moe4_matrix *matrix;
        int64_t rows, K;
    } parts[] = {{"gate_up_proj", &sample->gate_up, 2 * I, H}, {"down_proj", &sample->down, H, I}};
    struct output_unit *unit = output_add_unit(&self->output, UNIT_LAYER);
    if (!unit) return EXIT_FAILED;
    unit->layer = layer;
    int code = EXIT_OK;
    for (int i = 0; !code && i < 2; ++i) {
        char name[MAX_NAME + 64];
        int64_t shape[] = {E, parts[i].rows, parts[i].K / 32, 16};
        snprintf(name, sizeof name, "%s%s_blocks", base, parts[i].word);
        code = output_add(&self->output, name, "U8", 4, shape);
        snprintf(name, sizeof name, "%s%s_scales", base, parts[i].word);
        if (!code) code = output_add(&self->output, name, "U8", 3, shape);
        snprintf(name, sizeof name, "%s%s_bias", base, parts[i].word);
        if (!code && parts[i].matrix->bias)
            code = output_add(&self->output, name, dtype_word(parts[i].matrix->bias_dtype), 2, shape);
    }
    return code;
}

static int plan_layer(struct convert *self, int32_t layer)
{
    char base[MAX_NAME];
    moe4_expert sample;
    int code = find_base(self, layer, base);
    if (!code) code = read_expert(self, layer, 0, &sample);
    if (code) return code;
    const moe4_layer_config *config = moe4_layer_reader_config(self->reader);
    if (config->gate_up == MOE4_GATE_UP_NONE)
        return fail("layer %d: experts without a gate: no layout that can be written has them", layer);
    if (self->to == STORAGE_DEEPSEEK_V4 && (sample.gate_up.bias || sample.down.bias))
        return fail("layer %d: the biases of its experts would be lost: the layout deepseek-v4 has none", layer);
    ++self->n_layers;
    return storages[self->to].is_stacked ? plan_stacked(self, base, layer, &sample)
                                         : plan_apart(self, base, layer, &sample);
}

static int plan_copy(struct convert *self, const moe4_tensor *tensor, const char *name)
{
    struct output_unit *unit = output_add_unit(&self->output, UNIT_COPY);
    if (!unit) return EXIT_FAILED;
    unit->source[0] = tensor;
    return output_add(&self->output, name, tensor->dtype, tensor->rank, tensor->shape);
}

/* The router of a layer of a GGUF file, by the names of gpt-oss. */
static int plan_router(struct convert *self, int32_t layer)
{
    static const char *const ends[] = {"weight", "bias"};
    int code = EXIT_OK;
    for (int i = 0; !code && i < 2; ++i) {
        char from[64], to[64];
        snprintf(from, sizeof from, "blk.%d.ffn_gate_inp.%s", layer, ends[i]);
        snprintf(to, sizeof to, "model.layers.%d.mlp.router.%s", layer, ends[i]);
        const moe4_tensor *tensor = moe4_tensors_find(self->tensors, from);
        if (tensor) code = plan_copy(self, tensor, to);
    }
    return code;
}

/* What is not an MXFP4 expert stays as it is; with --layers only what belongs to these. */
static int plan_others(struct convert *self)
{
    int code = EXIT_OK;
    for (int64_t i = 0; !code && i < moe4_tensors_count(self->tensors); ++i) {
        const moe4_tensor *tensor = moe4_tensors_get(self->tensors, i);
        int32_t layer = -1;
        moe4_tensor_role role = moe4_checkpoint_role(self->checkpoint, tensor, &layer);
        if (role == MOE4_ROLE_EXPERT && layer_is_mxfp4(self, layer)) continue;
        if (self->layers.count && (role == MOE4_ROLE_OTHER || !layer_is_wanted(self, layer))) continue;
        code = plan_copy(self, tensor, tensor->name);
    }
    return code;
}

static int check_layers(const struct convert *self)
{
    for (int32_t i = 0; i < self->layers.count; ++i)
        if (!layer_is_mxfp4(self, (int32_t)self->layers.values[i]))
            return fail("--layers: %lld is no MXFP4 layer of %s", (long long)self->layers.values[i], self->source);
    return EXIT_OK;
}

static int plan(struct convert *self)
{
    int code = check_layers(self);
    for (int32_t i = 0; !code && i < self->info.n_moe_layers; ++i) {
        int32_t layer = moe4_checkpoint_layer_number(self->checkpoint, i);
        if (layer_is_wanted(self, layer)) code = plan_layer(self, layer);
        if (!code && is_gguf(self) && layer_is_wanted(self, layer)) code = plan_router(self, layer);
    }
    return code || is_gguf(self) ? code : plan_others(self);
}

/* ---- Units ------------------------------------------------------------------------------------------------------- */

/* A part of a projection's rows, in order, at row `to_first` of every `to_step` in the buffer. */
static int gather(struct convert *self, const moe4_expert *expert, enum projection_role role, enum matrix_part part,
                  int64_t to_first, int64_t to_step)
{
    const moe4_layer_config *config = moe4_layer_reader_config(self->reader);
    const moe4_matrix *matrix = projection_matrix(expert, role);
    struct row_place from = row_place(config, role);
    int64_t K = projection_K(config, role), bytes = from.count * to_step * row_bytes(matrix, part, K);
    int code = buffer_reserve(&self->buffer, &self->buffer_room, bytes, "rows of an expert");
    if (!code) rows_gather(matrix, part, K, from, to_first, to_step, self->buffer);
    return code;
}

static int produce_expert(struct convert *self, const struct output_unit *unit)
{
    moe4_expert expert;
    int32_t index = 0;
    int code = read_expert(self, unit->layer, unit->expert, &expert);
    for (int role = ROLE_GATE; !code && role < N_PROJECTIONS; ++role)
        for (int part = PART_CODES; !code && part <= PART_BIAS; ++part) {
            if (part == PART_BIAS && !projection_matrix(&expert, (enum projection_role)role)->bias) continue;
            int64_t n_bytes = self->output.tensors[unit->first + index].n_bytes;
            code = gather(self, &expert, (enum projection_role)role, (enum matrix_part)part, 0, 1);
            if (!code) code = output_put(&self->output, unit, index++, 0, n_bytes, self->buffer);
        }
    return code;
}

/* One expert of the unit's stacked tensors: gate and up rows interleaved. */
static int produce_stacked(struct convert *self, const struct output_unit *unit, int32_t e, const moe4_expert *expert)
{
    int32_t index = 0, E = moe4_layer_reader_config(self->reader)->n_experts;
    int code = EXIT_OK;
    for (int down = 0; !code && down < 2; ++down)
        for (int part = PART_CODES; !code && part <= PART_BIAS; ++part) {
            enum matrix_part kind = (enum matrix_part)part;
            if (kind == PART_BIAS && !(down ? &expert->down : &expert->gate_up)->bias) continue;
            int64_t n_bytes = self->output.tensors[unit->first + index].n_bytes / E;
            code = down ? gather(self, expert, ROLE_DOWN, kind, 0, 1) : gather(self, expert, ROLE_GATE, kind, 0, 2);
            if (!code && !down) code = gather(self, expert, ROLE_UP, kind, 1, 2);
            if (!code) code = output_put(&self->output, unit, index++, e * n_bytes, n_bytes, self->buffer);
        }
    return code;
}

static int produce_layer(struct convert *self, const struct output_unit *unit)
{
    int code = layer_open(self, unit->layer);
    int32_t E = code ? 0 : moe4_layer_reader_config(self->reader)->n_experts;
    for (int32_t e = 0; !code && e < E; ++e) {
        moe4_expert expert;
        code = read_expert(self, unit->layer, e, &expert);
        if (!code) code = produce_stacked(self, unit, e, &expert);
    }
    return code;
}

static int produce(void *user, struct output *output, const struct output_unit *unit)
{
    struct convert *self = user;
    if (unit->kind == UNIT_EXPERT) return produce_expert(self, unit);
    if (unit->kind == UNIT_LAYER) return produce_layer(self, unit);
    return output_copy(output, self->tensors, unit);
}

/* ---- Command ----------------------------------------------------------------------------------------------------- */

static void report(const struct convert *self)
{
    const struct output *output = &self->output;
    double seconds = seconds_now() - self->started;
    if (self->json) {
        json_t *object = json_object();
        json_put_text(object, "path", self->target);
        json_put_text(object, "from", self->info.layout);
        json_put_text(object, "to", target_words[self->to]);
        json_put_text(object, "contents", self->contents);
        json_put_integer(object, "layers", self->n_layers);
        json_put_integer(object, "bytes", output->bytes_total);
        json_put_integer(object, "shards", output->n_shards);
        json_put_integer(object, "shards_kept", output->n_kept);
        json_put_real(object, "seconds", seconds);
        report_json(object);
        return;
    }
    report_title("%s", self->target);
    report_field("contents", "%s, %s of MXFP4 experts from \"%s\" to %s", self->contents,
                 human_plural(self->n_layers, "layer").text, self->info.layout, target_words[self->to]);
    report_field("files", "%s, %s", human_plural(output->n_shards, "shard").text,
                 human_bytes((double)output->bytes_total).text);
    if (output->n_kept) report_field("kept", "%s that were there", human_plural(output->n_kept, "shard").text);
    report_field("time", "%s", human_milliseconds(1000 * seconds).text);
}

/* What the job is, and what its files say of themselves. */
static int describe(struct convert *self)
{
    char what[640];
    int used = snprintf(what, sizeof what, "convert to %s, layers", storage_words[self->to]);
    for (int32_t i = 0; i < self->layers.count && used < (int)sizeof what - 24; ++i)
        used += snprintf(what + used, sizeof what - (size_t)used, " %lld", (long long)self->layers.values[i]);
    snprintf(self->contents, sizeof self->contents,
             self->layers.count || is_gguf(self) ? "MoE layers only" : "whole checkpoint");
    int code = output_begin(&self->output, what, self->tensors);
    const char *const metadata[] = {"moe4.contents", self->contents, "format", "pt", NULL};
    memcpy(self->output.metadata + 2, metadata, sizeof metadata);
    return code;
}

/* Another container: one file of the MoE layers alone. */
static int convert_to_gguf(struct convert *self)
{
    struct gguf_output output = {
        .context = self->context, .checkpoint = self->checkpoint, .info = &self->info, .path = self->target};
    const char *end = strrchr(self->target, '.');
    int32_t *layers = NULL;
    if (!end || strcmp(end, ".gguf")) return fail("%s: a file whose name ends in .gguf is wanted", self->target);
    if (!self->force && !access(self->target, F_OK)) return fail("%s: is there; --force replaces it", self->target);
    int code = check_layers(self);
    if (!code) code = allocate(&layers, self->info.n_moe_layers, sizeof *layers, "layers");
    for (int32_t i = 0; !code && i < self->info.n_moe_layers; ++i) {
        int32_t layer = moe4_checkpoint_layer_number(self->checkpoint, i);
        if (layer_is_wanted(self, layer)) layers[output.n_layers++] = layer;
    }
    output.layers = layers;
    if (!code) code = gguf_output_write(&output);
    free(layers);
    snprintf(self->contents, sizeof self->contents, "MoE layers only");
    self->n_layers = output.n_layers;
    self->output.bytes_total = output.bytes_total;
    self->output.n_shards = 1;
    if (!code) report(self);
    return code;
}

static json_t *config_of_gguf(struct convert *self)
{
    if (strcmp(self->info.family, "gpt-oss")) {
        fail("%s: of GGUF files only those of gpt-oss can be converted: router and activation of %s would be lost",
             self->source, self->info.family);
        return NULL;
    }
    if (layer_open(self, moe4_checkpoint_layer_number(self->checkpoint, 0))) return NULL;
    const moe4_layer_config *config = moe4_layer_reader_config(self->reader);
    struct moe_sizes sizes = {config->hidden_size,   config->intermediate_size, config->n_experts,
                              config->routing.top_k, self->info.n_model_layers, (double)config->limit.value};
    return storage_config_of_gpt_oss(&sizes);
}

static int convert_run(struct convert *self)
{
    if (moe4_checkpoint_open(self->context, self->source, &self->checkpoint) != MOE4_OK ||
        moe4_checkpoint_describe(self->checkpoint, &self->info) != MOE4_OK)
        return fail_library(self->context);
    self->tensors = moe4_checkpoint_tensors(self->checkpoint);
    if (self->to == TO_GGUF) return convert_to_gguf(self);
    self->source_config = is_gguf(self) ? config_of_gguf(self) : storage_config_read(self->source);
    if (!self->source_config) return EXIT_FAILED;
    self->config = storage_config((storage_kind)self->to, self->source_config);
    if (!self->config) return EXIT_FAILED;
    int code = describe(self);
    if (!code) code = plan(self);
    if (!code) code = output_write(&self->output, self->config, produce, self);
    if (!code) report(self);
    return code;
}

int cmd_convert(int argc, char **argv)
{
    struct convert self = {.to = -1, .info = MOE4_CHECKPOINT_INFO_INIT};
    const struct option options[] = {
        option_operand("SRC", &self.source, "a checkpoint with MXFP4 experts"),
        option_operand("DST", &self.target, "folder to write; for gguf a file"),
        option_required(option_word("--to", target_words, &self.to, "the layout to write")),
        option_integers("--layers", "LIST", &self.layers, 0, 100000, "only these MoE layers, and nothing else (1,2,3)"),
        option_integer("--shard-bytes", "N", &self.output.shard_bytes, 1, INT64_MAX, "bytes a file, about (5 GB)"),
        option_flag("--force", &self.force, "replace what DST holds"),
        option_flag("--json", &self.json, "report as one JSON object"),
    };
    const struct usage usage = {"convert", "Writes the same codes and scales in another layout.", options,
                                sizeof options / sizeof *options};
    int code;
    self.output.shard_bytes = 5000000000;
    if (!options_parse(&usage, argc, argv, &code)) return code;
    moe4_context_info info = MOE4_CONTEXT_INFO_INIT;
    self.started = seconds_now();
    code = context_open(MOE4_ISA_AUTO, 1, NULL, &self.context, &info);
    self.output.context = self.context;
    self.output.folder = self.target;
    self.output.force = self.force;
    if (!code) code = convert_run(&self);
    output_release(&self.output);
    free(self.buffer);
    moe4_layer_reader_close(self.reader);
    moe4_checkpoint_close(self.checkpoint);
    json_decref(self.source_config);
    json_decref(self.config);
    moe4_context_destroy(self.context);
    return code;
}
