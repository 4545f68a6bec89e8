/* A layer reader as a source of moe4_layer_create_from.  What backends ask for in pieces is read straight from the
 * files, by any number of threads. */
#include "io/layer_reader.h"
#include "io/tensors.h"

static moe4_status read_expert(void *user, int32_t local_expert, moe4_expert *expert)
{
    moe4_layer_reader *reader = user;
    return moe4_layer_reader_read(reader->context, reader, local_expert, expert);
}

static moe4_status describe_expert(void *user, int32_t local_expert, moe4_expert *expert)
{
    moe4_layer_reader *reader = user;
    moe4_status status = reader_check_expert(reader->context, reader, local_expert);
    if (status == MOE4_OK) status = reader_report(reader->context, reader);
    if (status != MOE4_OK) return status;
    atomic_flag_clear(&reader->has_failed);
    *expert = reader_expert(reader);
    return MOE4_OK;
}

/* The first thread that fails tries again with the context, which says why; the others keep away from it. */
static moe4_status copy_bytes(moe4_layer_reader *reader, const moe4_tensor *tensor, int64_t first, int64_t n_bytes,
                              char *to)
{
    const moe4_tensors *tensors = reader->plan.tensors;
    if (tensors_copy(tensors, tensor, first, n_bytes, to)) return MOE4_OK;
    if (atomic_flag_test_and_set(&reader->has_failed)) return MOE4_EIO;
    return moe4_tensors_read(reader->context, tensors, tensor, first, n_bytes, to);
}

static moe4_status copy_part(void *user, int32_t local_expert, moe4_part part, int64_t first, int64_t n_bytes, void *to)
{
    moe4_layer_reader *reader = user;
    const struct plan *plan = &reader->plan;
    const struct slice *slices = plan->slices + (int64_t)local_expert * MAX_SLICES;
    const int64_t end = first + n_bytes;
    moe4_status status = MOE4_OK;
    for (int32_t i = 0; i < plan->n_slices && status == MOE4_OK; i++) {
        const struct slice *slice = &slices[i];
        if (slice->matrix != (int)part / N_PARTS || slice->part != (int)part % N_PARTS) continue;
        const int64_t slice_end = slice->part_at + slice->n_bytes;
        const int64_t from = first > slice->part_at ? first : slice->part_at,
                      to_end = end < slice_end ? end : slice_end;
        if (from >= to_end) continue;
        status = copy_bytes(reader, slice->tensor, slice->first + (from - slice->part_at), to_end - from,
                            (char *)to + (from - first));
    }
    return status;
}

/* GGUF's blocks are taken apart as they are read. */
static int has_pieces(const struct plan *plan)
{
    for (int64_t i = 0; i < (int64_t)plan->n_local * MAX_SLICES; i++)
        if (i % MAX_SLICES < plan->n_slices && plan->slices[i].form != SLICE_PLAIN) return 0;
    return 1;
}

moe4_expert_source moe4_layer_reader_source(moe4_context *context, moe4_layer_reader *reader)
{
    _Static_assert(MOE4_PART_GATE_UP_SCALES == MATRIX_GATE_UP * N_PARTS + PART_SCALES, "parts in the reader's order");
    _Static_assert(MOE4_PART_DOWN_BIAS == MATRIX_DOWN * N_PARTS + PART_BIAS, "parts in the reader's order");
    if (!context || !reader) return (moe4_expert_source){0};
    moe4_expert_source source = {.read = read_expert, .user = reader};
    reader->context = context;
    if (reader->options.experts == MOE4_EXPERTS_READ && has_pieces(&reader->plan)) {
        source.describe = describe_expert;
        source.copy = copy_part;
    }
    return source;
}
