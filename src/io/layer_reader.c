/* Reads one layer of a checkpoint, one expert at a time, into one expert's memory. */
#include <inttypes.h>
#include <stddef.h>
#include <string.h>

#include "base/checked.h"
#include "base/dims.h"
#include "io/check.h"
#include "io/checkpoint.h"
#include "io/layer_reader.h"
#include "layer.h"
#include "supports.h"

enum { PART_ALIGNMENT = 64 };

static moe4_status check_layer(moe4_context *context, const moe4_checkpoint *checkpoint, int32_t layer_number,
                               moe4_expert_use experts)
{
    if (experts == MOE4_EXPERTS_SKIP && layer_number >= 0 && layer_number < checkpoint->n_all) return MOE4_OK;
    for (int32_t i = 0; i < checkpoint->n_layers; i++)
        if (checkpoint->layers[i] == layer_number) return MOE4_OK;
    if (!checkpoint->n_layers)
        return context_fail(context, MOE4_EINVAL, "layer %" PRId32 ": no MoE layer is here", layer_number);
    return context_fail(context, MOE4_EINVAL,
                        "layer %" PRId32 " is not here: there are %" PRId32 " MoE layers, %" PRId32 " to %" PRId32,
                        layer_number, checkpoint->n_layers, checkpoint->layers[0],
                        checkpoint->layers[checkpoint->n_layers - 1]);
}

/* Resolves the local range of the options. */
static moe4_status check_range(moe4_context *context, int32_t E, moe4_reader_options *options)
{
    if (options->first_expert < 0 || options->first_expert >= E)
        return context_fail(context, MOE4_EINVAL, "first_expert is %" PRId32 ", expected 0 to %" PRId32,
                            options->first_expert, E - 1);
    int32_t most = E - options->first_expert;
    if (!options->n_experts) options->n_experts = most;
    if (options->n_experts < 0 || options->n_experts > most)
        return context_fail(context, MOE4_EINVAL,
                            "n_experts is %" PRId32 ", expected 0 to %" PRId32 " from expert %" PRId32,
                            options->n_experts, most, options->first_expert);
    return MOE4_OK;
}

static moe4_status plan_layer(moe4_context *context, moe4_layer_reader *reader, const moe4_checkpoint *checkpoint,
                              int32_t layer_number)
{
    struct plan *plan = &reader->plan;
    *plan = (struct plan){
        .tensors = checkpoint->tensors,
        .family = checkpoint->family,
        .spelling = &checkpoint->spelling,
        .model = &checkpoint->model,
        .experts = reader->options.experts,
        .layer_number = layer_number,
        .first_expert = reader->options.first_expert,
        .n_local = reader->options.n_experts,
    };
    moe4_status status = plan_fill(context, plan);
    reader->config = plan->config;
    reader->config.first_expert = plan->first_expert;
    reader->config.n_local_experts = plan->n_local;
    return status;
}

/* Memory for one expert, every part aligned. */
static moe4_status allocate_buffer(moe4_context *context, moe4_layer_reader *reader)
{
    if (reader->options.experts == MOE4_EXPERTS_SKIP) return MOE4_OK;
    for (int m = 0; m < N_MATRICES; m++)
        for (int p = 0; p < N_PARTS; p++) {
            reader->part_at[m][p] = reader->buffer_bytes;
            reader->buffer_bytes += round_up(reader->plan.part_bytes[m][p], PART_ALIGNMENT);
            reader->expert_bytes += reader->plan.part_bytes[m][p];
        }
    reader->bytes_total = reader->expert_bytes * reader->plan.n_local;
    reader->buffer = memory_allocate(&reader->allocator, (size_t)reader->buffer_bytes);
    return reader->buffer ? MOE4_OK : context_fail_memory(context, "one expert", (size_t)reader->buffer_bytes);
}

/* Tells the layer's config what was read, at `at`, of which types. */
static void set_sources(moe4_layer_config *config, const struct plan *plan, uint8_t *const *at)
{
    moe4_router *router = &config->router;
    moe4_routing *routing = &config->routing;
    int64_t width = plan->model->router_size;
    router->weight = at[SOURCE_ROUTER_WEIGHT];
    router->weight_dtype = plan->source_dtypes[SOURCE_ROUTER_WEIGHT];
    router->bias = at[SOURCE_ROUTER_BIAS];
    router->bias_dtype = plan->source_dtypes[SOURCE_ROUTER_BIAS];
    router->hidden_size = width == config->hidden_size ? 0 : width;
    routing->correction_bias = at[SOURCE_SELECTION_BIAS];
    routing->correction_bias_dtype = plan->source_dtypes[SOURCE_SELECTION_BIAS];
    routing->hash_table = at[SOURCE_HASH_TABLE];
    routing->hash_table_dtype = plan->source_dtypes[SOURCE_HASH_TABLE];
}

/* What no backend would take is refused before anything is read: pointers are only looked at for being there. */
static moe4_status check_config(moe4_context *context, const moe4_layer_reader *reader)
{
    uint8_t somewhere = 0, *at[N_SOURCES] = {NULL};
    moe4_layer_config config = reader->config;
    for (int i = 0; i < N_SOURCES; i++)
        if (reader->plan.sources[i]) at[i] = &somewhere;
    set_sources(&config, &reader->plan, at);
    moe4_status status = layer_validate(context, &config);
    return status == MOE4_EINVAL ? MOE4_EFORMAT : status; /* the file's fault, not the caller's */
}

static moe4_status read_router(moe4_context *context, moe4_layer_reader *reader)
{
    const struct plan *plan = &reader->plan;
    uint8_t *at[N_SOURCES] = {NULL};
    set_sources(&reader->config, plan, at);
    if (reader->options.router == MOE4_ROUTER_SKIP) return MOE4_OK;
    for (int i = 0; i < N_SOURCES; i++)
        if (plan->sources[i]) reader->router_bytes += round_up(plan->sources[i]->n_bytes, PART_ALIGNMENT);
    reader->router = memory_allocate(&reader->allocator, (size_t)reader->router_bytes);
    if (!reader->router) return context_fail_memory(context, "a router", (size_t)reader->router_bytes);
    uint8_t *next = reader->router;
    moe4_status status = MOE4_OK;
    for (int i = 0; i < N_SOURCES && status == MOE4_OK; i++) {
        const moe4_tensor *source = plan->sources[i];
        if (!source) continue;
        at[i] = next;
        next += round_up(source->n_bytes, PART_ALIGNMENT);
        status = moe4_tensors_read(context, plan->tensors, source, 0, source->n_bytes, at[i]);
    }
    set_sources(&reader->config, plan, at);
    return status;
}

moe4_status moe4_layer_reader_open(moe4_context *context, const moe4_checkpoint *checkpoint, int32_t layer_number,
                                   const moe4_reader_options *given, moe4_layer_reader **result)
{
    static const moe4_reader_options defaults = MOE4_READER_OPTIONS_INIT;
    moe4_status status = check_argument(context, "reader", result);
    if (status != MOE4_OK) return status;
    *result = NULL;
    status = check_argument(context, "checkpoint", checkpoint);
    if (status != MOE4_OK) return status;
    moe4_layer_reader *reader = memory_allocate_zeroed(&context->allocator, sizeof *reader);
    if (!reader) return context_fail_memory(context, "a layer reader", sizeof *reader);
    reader->allocator = context->allocator;
    status = adopt_struct(context, "options", given ? given : &defaults, &reader->options, sizeof reader->options);
    if (status == MOE4_OK) status = check_layer(context, checkpoint, layer_number, reader->options.experts);
    if (status == MOE4_OK) status = check_range(context, checkpoint->model.layer.n_experts, &reader->options);
    if (status == MOE4_OK) status = plan_layer(context, reader, checkpoint, layer_number);
    if (status == MOE4_OK) status = check_config(context, reader);
    if (status == MOE4_OK) status = allocate_buffer(context, reader);
    if (status == MOE4_OK) status = read_router(context, reader);
    if (status != MOE4_OK) {
        moe4_layer_reader_close(reader);
        return status;
    }
    *result = reader;
    return MOE4_OK;
}

void moe4_layer_reader_close(moe4_layer_reader *reader)
{
    if (!reader) return;
    moe4_allocator allocator = reader->allocator;
    const struct plan *plan = &reader->plan;
    memory_release(&allocator, plan->slices, plan_slices_bytes(plan));
    memory_release(&allocator, reader->buffer, (size_t)reader->buffer_bytes);
    memory_release(&allocator, reader->router, (size_t)reader->router_bytes);
    memory_release(&allocator, reader, sizeof *reader);
}

const moe4_layer_config *moe4_layer_reader_config(const moe4_layer_reader *reader)
{
    return reader ? &reader->config : NULL;
}

/* One matrix of the expert in the buffer. */
static moe4_matrix matrix_of(const moe4_layer_reader *reader, int matrix)
{
    const int64_t *at = reader->part_at[matrix];
    int has_bias = reader->plan.part_bytes[matrix][PART_BIAS] > 0;
    return (moe4_matrix){
        .codes = reader->buffer + at[PART_CODES],
        .scales = reader->buffer + at[PART_SCALES],
        .bias = has_bias ? reader->buffer + at[PART_BIAS] : NULL,
        .bias_dtype = reader->plan.bias_dtypes[matrix],
    };
}

moe4_expert reader_expert(const moe4_layer_reader *reader)
{
    return (moe4_expert){matrix_of(reader, MATRIX_GATE_UP), matrix_of(reader, MATRIX_DOWN)};
}

/* Never past the total, however often experts are read. */
moe4_status reader_report(moe4_context *context, moe4_layer_reader *reader)
{
    const moe4_reader_options *options = &reader->options;
    if (reader->bytes_done < reader->bytes_total) reader->bytes_done += reader->expert_bytes;
    if (!options->progress || !options->progress(options->user, reader->bytes_done, reader->bytes_total))
        return MOE4_OK;
    return context_fail(context, MOE4_EIO, "cancelled after %" PRId64 " of %" PRId64 " bytes", reader->bytes_done,
                        reader->bytes_total);
}

/* Blocks of 17 bytes - the scale, then byte j with element j in its low and j + 16 in its high nibble - become 16 bytes
 * of codes, byte j with elements 2j and 2j + 1, and a scale. */
static void unpack_blocks(const uint8_t *blocks, int64_t n_blocks, uint8_t *codes, uint8_t *scales)
{
    enum { HALF = BLOCK_BYTES / 2 };
    for (int64_t b = 0; b < n_blocks; b++, blocks += 1 + BLOCK_BYTES, codes += BLOCK_BYTES) {
        const uint8_t *packed = blocks + 1;
        scales[b] = blocks[0];
        for (int j = 0; j < HALF; j++) {
            codes[j] = (uint8_t)((packed[2 * j] & 0x0F) | packed[2 * j + 1] << 4);
            codes[HALF + j] = (uint8_t)(packed[2 * j] >> 4 | (packed[2 * j + 1] & 0xF0));
        }
    }
}

static moe4_status read_blocks(moe4_context *context, moe4_layer_reader *reader, const struct slice *slice)
{
    enum { BLOCKS_AT_ONCE = 960, FILE_BYTES = 1 + BLOCK_BYTES };
    uint8_t blocks[BLOCKS_AT_ONCE * FILE_BYTES];
    const int64_t *at = reader->part_at[slice->matrix];
    uint8_t *codes = reader->buffer + at[PART_CODES] + slice->part_at;
    uint8_t *scales = reader->buffer + at[PART_SCALES] + slice->part_at / BLOCK_BYTES;
    int64_t n_blocks = slice->n_bytes / FILE_BYTES;
    for (int64_t done = 0; done < n_blocks;) {
        int64_t n = n_blocks - done < BLOCKS_AT_ONCE ? n_blocks - done : BLOCKS_AT_ONCE;
        moe4_status status = moe4_tensors_read(context, reader->plan.tensors, slice->tensor,
                                               slice->first + done * FILE_BYTES, n * FILE_BYTES, blocks);
        if (status != MOE4_OK) return status;
        unpack_blocks(blocks, n, codes + done * BLOCK_BYTES, scales + done);
        done += n;
    }
    return MOE4_OK;
}

static moe4_status read_slice(moe4_context *context, moe4_layer_reader *reader, const struct slice *slice)
{
    if (slice->form == SLICE_GGUF_BLOCKS) return read_blocks(context, reader, slice);
    uint8_t *to = reader->buffer + reader->part_at[slice->matrix][slice->part] + slice->part_at;
    return moe4_tensors_read(context, reader->plan.tensors, slice->tensor, slice->first, slice->n_bytes, to);
}

moe4_status reader_check_expert(moe4_context *context, const moe4_layer_reader *reader, int32_t local_expert)
{
    const struct plan *plan = &reader->plan;
    if (reader->options.experts == MOE4_EXPERTS_SKIP)
        return context_fail(context, MOE4_EINVAL, "local expert %" PRId32 ": the reader was told to skip experts",
                            local_expert);
    if (local_expert < 0 || local_expert >= plan->n_local)
        return context_fail(context, MOE4_EINVAL, "local expert %" PRId32 ", expected 0 to %" PRId32, local_expert,
                            plan->n_local - 1);
    return MOE4_OK;
}

moe4_status moe4_layer_reader_read(moe4_context *context, moe4_layer_reader *reader, int32_t local_expert,
                                   moe4_expert *expert)
{
    moe4_status status = check_argument(context, "reader", reader);
    if (status == MOE4_OK) status = check_argument(context, "expert", expert);
    if (status == MOE4_OK) status = reader_check_expert(context, reader, local_expert);
    if (status != MOE4_OK) return status;
    const struct plan *plan = &reader->plan;
    const struct slice *slices = plan->slices + (int64_t)local_expert * MAX_SLICES;
    for (int32_t i = 0; i < plan->n_slices && status == MOE4_OK; i++) status = read_slice(context, reader, &slices[i]);
    if (status == MOE4_OK) status = reader_report(context, reader);
    if (status != MOE4_OK) return status;
    *expert = reader_expert(reader);
    return MOE4_OK;
}
