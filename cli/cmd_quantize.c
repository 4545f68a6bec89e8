/* moe4 quantize: the experts of an unquantised checkpoint to MXFP4. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <jansson.h>

#include "command.h"
#include "dense_layers.h"
#include "expert_output.h"
#include "gguf_output.h"
#include "memory.h"
#include "message.h"
#include "options.h"
#include "output.h"
#include "report.h"
#include "storage.h"

static const char *const rule_words[] = {"even", "floor", "ceil", "mse", NULL}; /* index = moe4_scale_rule */

/* All layouts but gpt-oss's original files, which convert makes of the released ones. */
static const char *const layout_words[] = {"gpt-oss", "compressed-tensors", "deepseek-v4", "quark", "modelopt", "mlx",
                                           "gguf",    "gguf-fused",         NULL};
static const storage_kind layouts[] = {STORAGE_GPT_OSS, STORAGE_COMPRESSED_TENSORS, STORAGE_DEEPSEEK_V4,
                                       STORAGE_QUARK,   STORAGE_MODELOPT,           STORAGE_MLX,
                                       STORAGE_GGUF,    STORAGE_GGUF_FUSED};

enum { UNIT_COPY };
enum { MAX_NAME = 512 };

struct quantize {
    const char *source, *target;
    int word, rule, check, force, json; /* index of layout_words; of rule_words; ... */
    storage_kind to;

    moe4_context *context;
    moe4_tensors *tensors;
    json_t *source_config, *config;
    struct dense_layers layers;
    struct output output;
    struct expert_output experts;
    struct encoder encoder;

    moe4_checkpoint *checkpoint; /* for GGUF, which wants activation and router */
    moe4_checkpoint_info info;
    moe4_layer_reader *reader;
    moe4_layer_config config_at; /* of the layer that the feed is at */
    double started;
};

/* ---- The plan ---------------------------------------------------------------------------------------------------- */

static int plan_copy(struct quantize *self, const moe4_tensor *tensor)
{
    struct output_unit *unit = output_add_unit(&self->output, UNIT_COPY);
    if (!unit) return EXIT_FAILED;
    unit->source[0] = tensor;
    return output_add(&self->output, tensor->name, tensor->dtype, tensor->rank, tensor->shape);
}

static int plan(struct quantize *self)
{
    int code = EXIT_OK;
    for (int32_t i = 0; !code && i < self->layers.n_layers; ++i) {
        const struct dense_layer *layer = &self->layers.layers[i];
        char base[MAX_NAME];
        snprintf(base, sizeof base, "%.*s", layer->base_length, layer->base);
        code = expert_output_plan(&self->experts, layer->number,
                                  storage_base(self->to, self->source_config, layer->number, base, sizeof base));
    }
    for (int64_t i = 0; !code && i < moe4_tensors_count(self->tensors); ++i) {
        const moe4_tensor *tensor = moe4_tensors_get(self->tensors, i);
        if (!dense_layers_have(tensor)) code = plan_copy(self, tensor);
    }
    return code;
}

static int produce(void *user, struct output *output, const struct output_unit *unit)
{
    struct quantize *self = user;
    if (unit->kind == UNIT_EXPERTS) return expert_output_produce(&self->experts, unit);
    return output_copy(output, self->tensors, unit);
}

/* ---- GGUF -------------------------------------------------------------------------------------------------------- */

/* A layer with its activation and router; sizes and order are those that are being written. */
static int layer_open(void *user, int32_t layer, const moe4_layer_config **config)
{
    struct quantize *self = user;
    const moe4_layer_config *sizes;
    moe4_reader_options options = MOE4_READER_OPTIONS_INIT;
    struct feed feed = dense_layers_feed(&self->layers);
    options.experts = MOE4_EXPERTS_SKIP;
    moe4_layer_reader_close(self->reader);
    self->reader = NULL;
    int code = feed.open(feed.user, layer, &sizes);
    if (!code && moe4_layer_reader_open(self->context, self->checkpoint, layer, &options, &self->reader) != MOE4_OK)
        code = fail_library(self->context);
    if (code) return code;
    self->config_at = *moe4_layer_reader_config(self->reader);
    self->config_at.gate_up = sizes->gate_up;
    *config = &self->config_at;
    if (self->config_at.n_experts == sizes->n_experts) return EXIT_OK;
    return fail("layer %d: %d experts, but config.json says %d", layer, sizes->n_experts, self->config_at.n_experts);
}

static int expert_sample(void *user, moe4_expert *expert)
{
    struct quantize *self = user;
    struct feed feed = dense_layers_feed(&self->layers);
    return feed.sample(feed.user, expert);
}

static int expert_read(void *user, int32_t e, moe4_expert *expert)
{
    struct quantize *self = user;
    struct feed feed = dense_layers_feed(&self->layers);
    return feed.read(feed.user, e, expert);
}

static int write_gguf(struct quantize *self)
{
    const char *const notes[] = {"moe4.scale_rule", rule_words[self->rule], NULL};
    struct gguf_output output = {.context = self->context,
                                 .info = &self->info,
                                 .feed = {self, layer_open, expert_sample, expert_read},
                                 .n_layers = self->layers.n_layers,
                                 .gate_up = self->to == STORAGE_GGUF ? GGUF_SPLIT : GGUF_FUSED,
                                 .path = self->target,
                                 .force = self->force,
                                 .job = self->output.job,
                                 .file_bytes = self->output.shard_bytes,
                                 .notes = notes};
    int32_t *numbers;
    if (moe4_checkpoint_open(self->context, self->source, &self->checkpoint) != MOE4_OK ||
        moe4_checkpoint_describe(self->checkpoint, &self->info) != MOE4_OK)
        return fail_library(self->context);
    int code = allocate(&numbers, output.n_layers, sizeof *numbers, "layers");
    for (int32_t i = 0; !code && i < output.n_layers; ++i) numbers[i] = self->layers.layers[i].number;
    output.layers = numbers;
    if (!code) code = gguf_output_write(&output);
    self->output.bytes_total = output.bytes_total;
    self->output.n_shards = output.n_files;
    self->output.n_kept = output.n_kept;
    free(numbers);
    return code;
}

/* ---- Command ----------------------------------------------------------------------------------------------------- */

static void report(const struct quantize *self)
{
    double seconds = seconds_now() - self->started;
    if (self->json) {
        json_t *object = json_object();
        json_put_text(object, "path", self->target);
        json_put_text(object, "layout", storage_words[self->to]);
        json_put_text(object, "rule", rule_words[self->rule]);
        output_json(&self->output, seconds, object);
        encoder_json(&self->encoder, object);
        report_json(object);
        return;
    }
    report_title("%s", self->target);
    report_field("contents", "layout %s, rule %s", storage_words[self->to], rule_words[self->rule]);
    output_report(&self->output, seconds);
    encoder_report(&self->encoder);
    if (self->output.n_kept) report_field("errors", "of what was written now; what was kept is not measured again");
}

static int write_folder(struct quantize *self)
{
    self->experts = expert_output_begin(&self->output, storage_find(self->to, self->source_config),
                                        dense_layers_feed(&self->layers));
    output_note(&self->output, "moe4.scale_rule", rule_words[self->rule]);
    output_note(&self->output, "format", "pt");
    int code = plan(self);
    return code ? code : output_write(&self->output, self->config, produce, self);
}

static int quantize_run(struct quantize *self)
{
    int is_folder = self->to < STORAGE_GGUF;
    char what[128];
    if (output_check_apart(self->source, self->target)) return EXIT_FAILED;
    self->source_config = storage_config_read(self->source);
    if (!self->source_config) return EXIT_FAILED;
    if (is_folder) {
        self->config = storage_config(self->to, self->source_config);
        if (!self->config) return EXIT_FAILED;
    }
    if (moe4_tensors_open(self->context, self->source, &self->tensors) != MOE4_OK) return fail_library(self->context);
    int code = dense_layers_find(self->context, self->source_config, self->tensors, &self->encoder, &self->layers);
    snprintf(what, sizeof what, "quantize to %s by %s", storage_words[self->to], rule_words[self->rule]);
    if (!code) code = output_begin(&self->output, what, self->source, self->tensors);
    if (!code) code = is_folder ? write_folder(self) : write_gguf(self);
    if (!code) report(self);
    return code;
}

int cmd_quantize(int argc, char **argv)
{
    struct quantize self = {.word = -1, .info = MOE4_CHECKPOINT_INFO_INIT};
    const struct option options[] = {
        option_operand("SRC", &self.source, "a checkpoint with experts in bf16, f16 or f32"),
        option_operand("DST", &self.target, "folder to write; for gguf a file, of the MoE layers alone"),
        option_required(option_word("--to", layout_words, &self.word, "the layout to write")),
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
    self.to = layouts[self.word];
    code = context_open_simple(0, &self.context, &info);
    self.output.context = self.context;
    self.output.folder = self.target;
    self.output.force = self.force;
    self.encoder = (struct encoder){
        .rule = (moe4_scale_rule)self.rule, .n_threads = info.n_threads, .n_checked_rows = self.check ? 16 : 0};
    if (!code) code = quantize_run(&self);
    output_release(&self.output);
    expert_output_release(&self.experts);
    dense_layers_release(&self.layers);
    encoder_release(&self.encoder);
    moe4_layer_reader_close(self.reader);
    moe4_checkpoint_close(self.checkpoint);
    moe4_tensors_close(self.tensors);
    json_decref(self.source_config);
    json_decref(self.config);
    moe4_context_destroy(self.context);
    return code;
}
