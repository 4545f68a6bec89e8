/* moe4 convert: the same codes and scales in another layout. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <jansson.h>

#include "command.h"
#include "dense.h"
#include "expert_output.h"
#include "gguf_output.h"
#include "known_model.h"
#include "memory.h"
#include "message.h"
#include "options.h"
#include "output.h"
#include "report.h"
#include "storage.h"
#include "tensor.h"

enum { UNIT_COPY };
enum { MAX_NAME = 512 };

struct convert {
    const char *source, *target;
    int to, force, json;
    struct integer_list layers; /* empty = all of the checkpoint */

    moe4_context *context;
    moe4_checkpoint *checkpoint;
    moe4_checkpoint_info info;
    const moe4_tensors *tensors;
    const struct known_model *model; /* that gives the names where the source has others; NULL = the source's stay */
    json_t *source_config, *config;
    struct output output;
    struct expert_output experts;
    char contents[64];

    moe4_router_use router;    /* whether the layers that are read come with the values of their routers */
    moe4_layer_reader *reader; /* of the layer last asked for */
    int32_t reader_layer;
    int32_t n_layers;
    int64_t n_left_out;
    const char *left_out; /* one of these tensors */
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

static int layer_open(void *user, int32_t layer, const moe4_layer_config **config)
{
    struct convert *self = user;
    moe4_reader_options options = MOE4_READER_OPTIONS_INIT;
    options.router = self->router;
    if (!self->reader || self->reader_layer != layer) {
        moe4_layer_reader_close(self->reader);
        self->reader = NULL;
        self->reader_layer = layer;
        if (moe4_layer_reader_open(self->context, self->checkpoint, layer, &options, &self->reader) != MOE4_OK)
            return fail_library(self->context);
    }
    *config = moe4_layer_reader_config(self->reader);
    return EXIT_OK;
}

static int expert_read(void *user, int32_t expert, moe4_expert *result)
{
    struct convert *self = user;
    if (moe4_layer_reader_read(self->context, self->reader, expert, result) == MOE4_OK) return EXIT_OK;
    return fail_library(self->context);
}

static int expert_sample(void *user, moe4_expert *result)
{
    return expert_read(user, 0, result);
}

static struct feed convert_feed(struct convert *self)
{
    return (struct feed){self, layer_open, expert_sample, expert_read};
}

static int check_layers(const struct convert *self)
{
    for (int32_t i = 0; i < self->layers.count; ++i)
        if (!layer_is_mxfp4(self, (int32_t)self->layers.values[i]))
            return fail("--layers: %lld is no MXFP4 layer of %s", (long long)self->layers.values[i], self->source);
    return EXIT_OK;
}

/* ---- Names ------------------------------------------------------------------------------------------------------- */

/* Layouts whose names are their own: only the MoE layers of a checkpoint can be carried over. */
static int is_layout_of_own(const char *layout)
{
    return !strcmp(layout, "GGUF") || !strcmp(layout, "gpt-oss original");
}

/* What a layer's expert tensors are called in the source, through "experts.". */
static int find_base(const struct convert *self, int32_t layer, char base[MAX_NAME])
{
    static const char *const marks[] = {".experts.", ".switch_mlp."};
    if (self->model) {
        snprintf(base, MAX_NAME, "%sexperts.", known_model_block(self->model, layer, self->info.n_model_layers).text);
        return EXIT_OK;
    }
    for (int64_t i = 0; i < moe4_tensors_count(self->tensors); ++i) {
        const moe4_tensor *tensor = moe4_tensors_get(self->tensors, i);
        int32_t number = -1;
        for (int m = 0; m < 2; ++m) {
            const char *found = strstr(tensor->name, marks[m]);
            if (!found || moe4_checkpoint_role(self->checkpoint, tensor, &number) != MOE4_ROLE_EXPERT ||
                number != layer)
                continue;
            snprintf(base, MAX_NAME, "%.*s%s", (int)(found - tensor->name), tensor->name, marks[0]);
            return EXIT_OK;
        }
    }
    return fail("%s: layout \"%s\": its names cannot be carried over to %s", self->source, self->info.layout,
                storage_words[self->to]);
}

static int plan_copy(struct convert *self, const moe4_tensor *tensor, const char *name)
{
    struct output_unit *unit = output_add_unit(&self->output, UNIT_COPY);
    if (!unit) return EXIT_FAILED;
    unit->source[0] = tensor;
    return output_add(&self->output, name, tensor->dtype, tensor->rank, tensor->shape);
}

/* Routers under the names of the target, which are not the source's. */
static int plan_routers(struct convert *self)
{
    int code = EXIT_OK;
    for (int64_t i = 0; !code && i < moe4_tensors_count(self->tensors); ++i) {
        const moe4_tensor *tensor = moe4_tensors_get(self->tensors, i);
        int32_t layer = -1;
        if (moe4_checkpoint_role(self->checkpoint, tensor, &layer) != MOE4_ROLE_ROUTER) continue;
        if (!layer_is_wanted(self, layer) || !layer_is_mxfp4(self, layer)) continue;
        enum router_part part = router_part_of(self->info.family, tensor->name);
        struct block_name name = known_model_router(self->model, layer, self->info.n_model_layers, part);
        if (self->to == STORAGE_ORIGINAL)
            snprintf(name.text, sizeof name.text, "block.%d.mlp.gate.%s", layer,
                     part == ROUTER_WEIGHT ? "weight" : "bias");
        code = plan_copy(self, tensor, name.text);
    }
    return code;
}

/* Experts of a model beside the model, which the reader passes over: under a config.json of another layout, bytes of
 * the source's would be nobody's. */
static int is_foreign_expert(const moe4_tensor *tensor)
{
    const char *found = strstr(tensor->name, "mtp.layers.");
    return found && (strstr(found, ".experts.") || strstr(found, ".switch_mlp.")) && !tensor_is_float(tensor);
}

/* What is not an MXFP4 expert stays as it is; with --layers only what belongs to these.  Scales of activations have no
 * place in another layout. */
static int plan_others(struct convert *self)
{
    int code = EXIT_OK, is_same_layout = storage_has_config((storage_kind)self->to, self->source_config);
    for (int64_t i = 0; !code && i < moe4_tensors_count(self->tensors); ++i) {
        const moe4_tensor *tensor = moe4_tensors_get(self->tensors, i);
        int32_t layer = -1;
        moe4_tensor_role role = moe4_checkpoint_role(self->checkpoint, tensor, &layer);
        if (role == MOE4_ROLE_EXPERT && layer_is_mxfp4(self, layer)) continue;
        if (self->layers.count && (role == MOE4_ROLE_OTHER || !layer_is_wanted(self, layer))) continue;
        if (role == MOE4_ROLE_UNUSED && layer_is_mxfp4(self, layer) && !is_same_layout) {
            ++self->n_left_out;
            self->left_out = tensor->name;
            continue;
        }
        if (!is_same_layout && is_foreign_expert(tensor))
            return fail("%s: an expert of a model beside the model, %s in the source's layout: it cannot be converted; "
                        "--layers leaves it out",
                        tensor->name, tensor->dtype);
        code = plan_copy(self, tensor, tensor->name);
    }
    return code;
}

static int plan(struct convert *self)
{
    int code = EXIT_OK;
    for (int32_t i = 0; !code && i < self->info.n_moe_layers; ++i) {
        int32_t layer = moe4_checkpoint_layer_number(self->checkpoint, i);
        char base[MAX_NAME];
        if (!layer_is_wanted(self, layer)) continue;
        code = find_base(self, layer, base);
        if (!code)
            code =
                expert_output_plan(&self->experts, layer,
                                   storage_base((storage_kind)self->to, self->source_config, layer, base, sizeof base));
        ++self->n_layers;
    }
    if (code) return code;
    return self->model ? plan_routers(self) : plan_others(self);
}

static int produce(void *user, struct output *output, const struct output_unit *unit)
{
    struct convert *self = user;
    if (unit->kind == UNIT_EXPERTS) return expert_output_produce(&self->experts, unit);
    return output_copy(output, self->tensors, unit);
}

/* ---- config.json ------------------------------------------------------------------------------------------------- */

/* Of all layers that are wanted config.json can but say the same. */
static int check_same(struct convert *self, const moe4_layer_config *said, int32_t n_hash_layers)
{
    for (int32_t i = 0; i < self->info.n_moe_layers; ++i) {
        int32_t layer = moe4_checkpoint_layer_number(self->checkpoint, i);
        const moe4_layer_config *config = NULL;
        if (!layer_is_wanted(self, layer)) continue;
        if (layer_open(self, layer, &config)) return EXIT_FAILED;
        moe4_layer_config implied = *said;
        if (layer < n_hash_layers) implied.routing.method = MOE4_ROUTING_HASH;
        const char *what = layer_config_difference(config, &implied);
        if (what) return fail("layer %d: %s would be lost: config.json has one for all layers", layer, what);
    }
    return EXIT_OK;
}

/* Of a source without one, or with one of other words. */
static json_t *config_make(struct convert *self)
{
    struct model_facts facts = {.model = self->model,
                                .model_hidden_size = self->info.model_hidden_size,
                                .n_layers = self->info.n_model_layers,
                                .n_extra_layers = self->info.n_extra_layers,
                                .n_shared_experts = self->info.n_shared_experts};
    moe4_layer_config said = MOE4_LAYER_CONFIG_INIT; /* numbers alone: the reader of its layer is gone soon */
    for (int32_t i = 0; i < self->info.n_moe_layers; ++i) {
        int32_t layer = moe4_checkpoint_layer_number(self->checkpoint, i);
        const moe4_layer_config *config = NULL;
        if (layer_open(self, layer, &config)) return NULL;
        int is_hash = config->routing.method == MOE4_ROUTING_HASH;
        if (is_hash) {
            facts.n_hash_layers = layer + 1;
            facts.vocab_size = config->routing.vocab_size;
        }
        if (!layer_is_wanted(self, layer)) continue;
        said = *config;
        if (!is_hash) break;
    }
    if (check_same(self, &said, facts.n_hash_layers)) return NULL;
    facts.config = &said;
    for (int64_t i = 0; i < moe4_tensors_count(self->tensors); ++i) {
        const moe4_tensor *tensor = moe4_tensors_get(self->tensors, i);
        if (moe4_checkpoint_role(self->checkpoint, tensor, NULL) == MOE4_ROLE_ROUTER)
            facts.has_selection_bias |= router_part_of(self->info.family, tensor->name) == ROUTER_SELECTION_BIAS;
    }
    return known_model_config(&facts);
}

static int config_read(struct convert *self)
{
    int is_renamed = is_layout_of_own(self->info.layout) || self->to == STORAGE_ORIGINAL;
    if (!self->info.n_moe_layers) return fail("%s: no MoE layer that can be read", self->source);
    if (check_layers(self)) return EXIT_FAILED;
    if (is_renamed) {
        self->model = known_model_find(self->info.family);
        if (!self->model)
            return fail("%s: the names and config.json of %s are not known: they would have to be made up",
                        self->source, self->info.family);
    }
    self->source_config = is_layout_of_own(self->info.layout) ? config_make(self) : storage_config_read(self->source);
    if (self->source_config) self->config = storage_config((storage_kind)self->to, self->source_config);
    return self->config ? EXIT_OK : EXIT_FAILED;
}

/* What was written must be read as the source is: if not, the folder is left unfinished. */
static int verify(struct convert *self)
{
    moe4_checkpoint *written = NULL;
    moe4_reader_options options = MOE4_READER_OPTIONS_INIT;
    char path[4096];
    options.router = MOE4_ROUTER_SKIP;
    int code =
        moe4_checkpoint_open(self->context, self->target, &written) == MOE4_OK ? EXIT_OK : fail_library(self->context);
    for (int32_t i = 0; !code && i < self->info.n_moe_layers; ++i) {
        moe4_layer_reader *reader = NULL;
        const moe4_layer_config *config = NULL;
        int32_t layer = moe4_checkpoint_layer_number(self->checkpoint, i);
        if (!layer_is_wanted(self, layer)) continue;
        code = layer_open(self, layer, &config);
        if (!code && moe4_layer_reader_open(self->context, written, layer, &options, &reader) != MOE4_OK)
            code = fail_library(self->context);
        const char *what = code ? NULL : layer_config_difference(config, moe4_layer_reader_config(reader));
        if (what) code = fail("layer %d: %s would be lost: what was written reads as another", layer, what);
        moe4_layer_reader_close(reader);
    }
    moe4_checkpoint_close(written);
    snprintf(path, sizeof path, "%s/config.json", self->target);
    if (code) unlink(path);
    return code;
}

/* ---- Command ----------------------------------------------------------------------------------------------------- */

static void report(const struct convert *self)
{
    double seconds = seconds_now() - self->started;
    if (self->json) {
        json_t *object = json_object();
        json_put_text(object, "path", self->target);
        json_put_text(object, "from", self->info.layout);
        json_put_text(object, "to", storage_words[self->to]);
        json_put_text(object, "contents", self->contents);
        json_put_integer(object, "layers", self->n_layers);
        json_put_integer(object, "tensors_left_out", self->n_left_out);
        output_json(&self->output, seconds, object);
        report_json(object);
        return;
    }
    report_title("%s", self->target);
    report_field("contents", "%s, %s of MXFP4 experts from \"%s\" to %s", self->contents,
                 human_plural(self->n_layers, "layer").text, self->info.layout, storage_words[self->to]);
    if (self->n_left_out)
        report_field("left out", "%s that the layout has no place for, such as %s",
                     human_plural(self->n_left_out, "tensor").text, self->left_out);
    output_report(&self->output, seconds);
}

/* What the job is, and what its files say of themselves. */
static int describe(struct convert *self)
{
    char what[640];
    int used = snprintf(what, sizeof what, "convert to %s, layers", storage_words[self->to]);
    for (int32_t i = 0; i < self->layers.count && used < (int)sizeof what - 24; ++i)
        used += snprintf(what + used, sizeof what - (size_t)used, " %lld", (long long)self->layers.values[i]);
    snprintf(self->contents, sizeof self->contents,
             self->layers.count || self->model || self->to >= STORAGE_GGUF ? "MoE layers only" : "whole checkpoint");
    int code = output_begin(&self->output, what, self->source, self->tensors);
    output_note(&self->output, "moe4.contents", self->contents);
    output_note(&self->output, "format", "pt");
    return code;
}

/* Another container: files of the MoE layers alone. */
static int convert_to_gguf(struct convert *self)
{
    struct gguf_output output = {.context = self->context,
                                 .info = &self->info,
                                 .feed = convert_feed(self),
                                 .gate_up = self->to == STORAGE_GGUF ? GGUF_SPLIT : GGUF_FUSED,
                                 .path = self->target,
                                 .force = self->force,
                                 .job = self->output.job,
                                 .file_bytes = self->output.shard_bytes};
    int32_t *layers = NULL;
    self->router = MOE4_ROUTER_READ;
    int code = check_layers(self);
    if (!code) code = describe(self);
    if (!code) code = allocate(&layers, self->info.n_moe_layers, sizeof *layers, "layers");
    for (int32_t i = 0; !code && i < self->info.n_moe_layers; ++i) {
        int32_t layer = moe4_checkpoint_layer_number(self->checkpoint, i);
        if (layer_is_wanted(self, layer)) layers[output.n_layers++] = layer;
    }
    output.layers = layers;
    if (!code) code = gguf_output_write(&output);
    free(layers);
    self->n_layers = output.n_layers;
    self->output.bytes_total = output.bytes_total;
    self->output.n_shards = output.n_files;
    self->output.n_kept = output.n_kept;
    if (!code) report(self);
    return code;
}

static int convert_run(struct convert *self)
{
    if (moe4_checkpoint_open(self->context, self->source, &self->checkpoint) != MOE4_OK ||
        moe4_checkpoint_describe(self->checkpoint, &self->info) != MOE4_OK)
        return fail_library(self->context);
    self->tensors = moe4_checkpoint_tensors(self->checkpoint);
    if (self->to >= STORAGE_GGUF) return convert_to_gguf(self);
    int code = output_check_apart(self->source, self->target);
    if (!code) code = config_read(self);
    if (code) return code;
    self->experts = expert_output_begin(&self->output, storage_find((storage_kind)self->to, self->source_config),
                                        convert_feed(self));
    code = describe(self);
    if (!code) code = plan(self);
    if (!code) code = output_write(&self->output, self->config, produce, self);
    if (!code) code = verify(self);
    if (!code) report(self);
    return code;
}

int cmd_convert(int argc, char **argv)
{
    struct convert self = {.to = -1, .info = MOE4_CHECKPOINT_INFO_INIT, .router = MOE4_ROUTER_SKIP};
    const struct option options[] = {
        option_operand("SRC", &self.source, "a checkpoint with MXFP4 experts: a folder or a .gguf file"),
        option_operand("DST", &self.target, "folder to write; for gguf a file"),
        option_required(option_word("--to", storage_words, &self.to, "the layout to write")),
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
    code = context_open_simple(1, &self.context, &info);
    self.output.context = self.context;
    self.output.folder = self.target;
    self.output.force = self.force;
    if (!code) code = convert_run(&self);
    output_release(&self.output);
    expert_output_release(&self.experts);
    moe4_layer_reader_close(self.reader);
    moe4_checkpoint_close(self.checkpoint);
    json_decref(self.source_config);
    json_decref(self.config);
    moe4_context_destroy(self.context);
    return code;
}
