#include "model.h"

#include <stdio.h>
#include <stdlib.h>

#include "command.h"
#include "memory.h"
#include "message.h"
#include "progress.h"
#include "report.h"

/* The reader's number of an expert. */
static int32_t index_of(const struct model *model, int32_t local_expert)
{
    return model->named_by ? model->named_by[local_expert] : local_expert;
}

static moe4_status model_read(void *user, int32_t local_expert, moe4_expert *expert)
{
    const struct model *self = user;
    moe4_status status = moe4_layer_reader_read(self->context, self->reader, index_of(self, local_expert), expert);
    if (status != MOE4_OK) fail_library(self->context);
    return status;
}

moe4_expert_source model_source(struct model *model)
{
    return (moe4_expert_source){.read = model_read, .user = model};
}

int model_open(moe4_context *context, const char *path, int64_t layer, struct integer_pair experts, struct model *model)
{
    moe4_checkpoint_info info = MOE4_CHECKPOINT_INFO_INIT;
    *model = (struct model){.context = context, .info = info, .experts = experts};
    int code = EXIT_OK;
    if (moe4_checkpoint_open(context, path, &model->checkpoint) != MOE4_OK) return fail_library(context);
    moe4_checkpoint_describe(model->checkpoint, &model->info);
    model->layer = layer == FIRST_LAYER ? moe4_checkpoint_layer_number(model->checkpoint, 0) : (int32_t)layer;
    moe4_reader_options options = MOE4_READER_OPTIONS_INIT;
    options.first_expert = (int32_t)experts.first;
    options.n_experts = (int32_t)experts.second;
    if (model->layer < 0)
        code = model->info.n_other_layers
                   ? fail("%s: %s, none in MXFP4: moe4 quantize makes these of bf16, f16 and f32", path,
                          human_plural(model->info.n_other_layers, "MoE layer").text)
                   : fail("%s: no MoE layer that can be read", path);
    else if (moe4_layer_reader_open(context, model->checkpoint, model->layer, &options, &model->reader) != MOE4_OK)
        code = fail_library(context);
    if (code) {
        model_close(model);
        return code;
    }
    model->changed = *moe4_layer_reader_config(model->reader);
    model->config = &model->changed;
    return EXIT_OK;
}

int model_map(struct model *model, int32_t *map)
{
    const int32_t E = model->config->n_experts;
    int32_t L = 0;
    model->expert_map = map;
    if (model->experts.second) return fail("both --experts and an expert_map say which experts to hold, expected one");
    for (int32_t e = 0; e < E; ++e) {
        if (map[e] < -1 || map[e] >= E) return fail("expert_map[%d] is %d, expected -1 to %d", e, map[e], E - 1);
        if (map[e] >= L) L = map[e] + 1;
    }
    int code = allocate(&model->named_by, L, sizeof *model->named_by, "an expert map");
    if (code) return code;
    for (int32_t l = 0; l < L; ++l) model->named_by[l] = -1;
    for (int32_t e = 0; e < E; ++e) {
        if (map[e] < 0) continue;
        if (model->named_by[map[e]] >= 0)
            return fail("expert_map names local expert %d for both %d and %d", map[e], model->named_by[map[e]], e);
        model->named_by[map[e]] = e;
    }
    for (int32_t l = 0; l < L; ++l)
        if (model->named_by[l] < 0) return fail("expert_map names local experts up to %d, but not %d", L - 1, l);
    model->config->expert_map = map;
    model->config->first_expert = 0;
    model->config->n_local_experts = L;
    return EXIT_OK;
}

/* ---- The prepared layer ------------------------------------------------------------------------------------------ */

/* Reading with a progress bar. */
struct preparation {
    const struct model *model;
    moe4_expert_source source; /* the reader's, which has other numbers where there is a map */
    struct progress bar;
    int64_t n_read;
};

static moe4_status preparation_count(struct preparation *self, moe4_status status)
{
    const moe4_layer_config *config = self->model->config;
    const int64_t matrices = config->gate_up == MOE4_GATE_UP_NONE ? 2 : 3;
    const int64_t expert_bytes = matrices * config->hidden_size * config->intermediate_size / 32 * 17;
    if (status == MOE4_OK)
        progress_update(&self->bar, ++self->n_read * expert_bytes, config->n_local_experts * expert_bytes);
    return status;
}

static moe4_status preparation_read(void *user, int32_t local_expert, moe4_expert *expert)
{
    struct preparation *self = user;
    const int32_t index = index_of(self->model, local_expert);
    return preparation_count(self, self->source.read(self->source.user, index, expert));
}

static moe4_status preparation_describe(void *user, int32_t local_expert, moe4_expert *expert)
{
    struct preparation *self = user;
    const int32_t index = index_of(self->model, local_expert);
    return preparation_count(self, self->source.describe(self->source.user, index, expert));
}

static moe4_status preparation_copy(void *user, int32_t local_expert, moe4_part part, int64_t first, int64_t n_bytes,
                                    void *to)
{
    const struct preparation *self = user;
    return self->source.copy(self->source.user, index_of(self->model, local_expert), part, first, n_bytes, to);
}

int model_prepare(struct model *model, moe4_context *context, moe4_layer **layer)
{
    struct preparation preparation = {
        .model = model, .source = moe4_layer_reader_source(context, model->reader), .bar = progress_begin("reading")};
    moe4_expert_source source = {.read = preparation_read, .user = &preparation};
    if (preparation.source.copy) source.describe = preparation_describe, source.copy = preparation_copy;
    moe4_status status = moe4_layer_create_from(context, model->config, &source, layer);
    progress_end(&preparation.bar);
    return status == MOE4_OK ? EXIT_OK : fail_library(context);
}

/* What the prepared layer is made of: the reader's key, and how this layer differs from the checkpoint's. */
static int source_name(const struct model *model, char *name, size_t bytes)
{
    char key[33];
    uint64_t hash = 0xcbf29ce484222325; /* FNV-1a of the map */
    if (moe4_layer_reader_key(model->reader, key) != MOE4_OK) return fail("the layer has no key");
    for (int32_t e = 0; model->expert_map && e < model->config->n_experts; ++e)
        hash = (hash ^ (uint32_t)model->expert_map[e]) * 0x100000001b3;
    snprintf(name, bytes, "%s, output %lld, map %016llx", key, (long long)model->config->output_size,
             model->expert_map ? (unsigned long long)hash : 0);
    return EXIT_OK;
}

int model_load(struct model *model, moe4_context *context, const char *file, moe4_layer **layer)
{
    char source[128];
    int code = source_name(model, source, sizeof source);
    if (code) return code;
    if (moe4_layer_load(context, file, source, MOE4_MAPPING_NONE, layer) == MOE4_OK) return EXIT_OK;
    note("%s", moe4_context_message(context));
    code = model_prepare(model, context, layer);
    if (!code && moe4_layer_save(context, *layer, source, file) != MOE4_OK) code = fail_library(context);
    if (!code) note("%s: written, for the next time", file);
    return code;
}

void model_close(struct model *model)
{
    moe4_layer_reader_close(model->reader);
    moe4_checkpoint_close(model->checkpoint);
    free(model->expert_map);
    free(model->named_by);
    model->expert_map = model->named_by = NULL;
    model->reader = NULL;
    model->checkpoint = NULL;
}

int layer_describe(moe4_context *context, const moe4_layer *layer, moe4_compute compute, moe4_layer_info *info)
{
    if (moe4_layer_describe(layer, info) != MOE4_OK) return fail_library(context);
    if (compute == MOE4_COMPUTE_INT8) {
        info->kernel = info->kernel_int8;
        info->order = info->order_int8;
    }
    return EXIT_OK;
}
