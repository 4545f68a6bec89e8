#include "cuda/fill.h"

#include "base/dims.h"
#include "base/mxfp4.h"
#include "cuda/arena.h"
#include "cuda/prepared.h"
#include "cuda/upload.h"

enum { GATE_UP, DOWN, N_MATRICES };

struct fill {
    struct moe4_context *context;
    const struct cuda_prepared *prepared;
    const struct cuda_matrix *matrices[N_MATRICES];
    struct upload *upload;
    cuda_stream packing;
    cuda_event copied[N_MATRICES], packed[N_MATRICES]; /* of the last expert that has been queued */

    /* device memory for one expert as the checkpoint has it */
    uint8_t *codes[N_MATRICES], *scales[N_MATRICES];
    void *bias[N_MATRICES];
    struct scale_range *ranges; /* of both, then what they begin with */
    void *memory;
};

static moe4_status allocate_staging(struct fill *fill)
{
    static const struct scale_range nothing[N_MATRICES] = {{SCALE_NAN, 0, 0}, {SCALE_NAN, 0, 0}};
    struct arena arena = {0};
    size_t offsets[N_MATRICES][3], ranges = arena_reserve(&arena, 2 * N_MATRICES, sizeof(struct scale_range));
    for (int m = 0; m < N_MATRICES; m++) {
        const int64_t rows = fill->matrices[m]->rows;
        const size_t K = (size_t)fill->matrices[m]->K;
        offsets[m][0] = arena_reserve(&arena, rows, K / 2);
        offsets[m][1] = arena_reserve(&arena, rows, K / BLOCK_SIZE);
        offsets[m][2] = arena_reserve(&arena, rows, sizeof(float));
    }
    char *memory = fill->memory = device_allocate(arena.total);
    if (!memory)
        return context_fail(fill->context, MOE4_ENOMEM, "out of device memory: %zu bytes for an expert", arena.total);
    fill->ranges = (struct scale_range *)(memory + ranges);
    for (int m = 0; m < N_MATRICES; m++) {
        fill->codes[m] = (uint8_t *)(memory + offsets[m][0]);
        fill->scales[m] = (uint8_t *)(memory + offsets[m][1]);
        fill->bias[m] = memory + offsets[m][2];
    }
    return device_upload(fill->context, fill->ranges + N_MATRICES, nothing, sizeof nothing, fill->packing);
}

static moe4_status open_fill(struct fill *fill)
{
    struct moe4_context *context = fill->context;
    moe4_status status = upload_of(context, &fill->upload);
    if (!status) status = device_stream_create(context, &fill->packing);
    for (int m = 0; !status && m < N_MATRICES; m++) {
        status = device_event_create(context, &fill->copied[m]);
        if (!status) status = device_event_create(context, &fill->packed[m]);
    }
    return status ? status : allocate_staging(fill);
}

static void close_fill(struct fill *fill)
{
    if (fill->upload) device_stream_wait(fill->context, fill->upload->stream);
    if (fill->packing) device_stream_wait(fill->context, fill->packing);
    device_release(fill->memory);
    for (int m = 0; m < N_MATRICES; m++) {
        device_event_destroy(fill->copied[m]);
        device_event_destroy(fill->packed[m]);
    }
    device_stream_destroy(fill->packing);
}

/* A matrix into its place, as soon as the last expert's has left it. */
static moe4_status copy_matrix(struct fill *fill, int m, const moe4_matrix *from)
{
    struct upload *upload = fill->upload;
    const size_t rows = (size_t)fill->matrices[m]->rows, code_bytes = (size_t)fill->matrices[m]->K / 2;
    const size_t scale_bytes = (size_t)fill->matrices[m]->K / BLOCK_SIZE;
    const size_t code_pitch = from->codes_row_bytes ? (size_t)from->codes_row_bytes : code_bytes;
    const size_t scale_pitch = from->scales_row_bytes ? (size_t)from->scales_row_bytes : scale_bytes;
    const size_t bias_bytes = from->bias ? rows * (from->bias_dtype == MOE4_DTYPE_F32 ? 4 : 2) : 0;
    moe4_status status = device_stream_follow(fill->context, upload->stream, fill->packed[m]);
    if (!status) status = upload_rows(upload, fill->codes[m], from->codes, code_pitch, code_bytes, rows);
    if (!status) status = upload_rows(upload, fill->scales[m], from->scales, scale_pitch, scale_bytes, rows);
    if (!status && bias_bytes) status = upload_rows(upload, fill->bias[m], from->bias, bias_bytes, bias_bytes, 1);
    return status ? status : device_event_record(fill->context, fill->copied[m], upload->stream);
}

static struct pack_call pack_call_of(const struct fill *fill, int m, const moe4_matrix *from, int32_t l)
{
    const struct cuda_matrix *matrix = fill->matrices[m];
    return (struct pack_call){
        .codes = fill->codes[m],
        .scales = fill->scales[m],
        .bias = from->bias ? fill->bias[m] : NULL,
        .bias_dtype = from->bias_dtype,
        .rows = matrix->rows,
        .K = matrix->K,
        .order = matrix->order,
        .n_tiles = matrix->n_tiles,
        .n_steps = matrix->n_steps,
        .ranges = fill->ranges + m,
        .other_range = m == DOWN ? GATE_UP - DOWN : DOWN - GATE_UP,
        .packed = matrix->packed + (size_t)l * matrix->expert_bytes,
        .packed_bias = matrix->bias + (size_t)l * (size_t)matrix->n_tiles * CUDA_TILE_ROWS,
        .unit = matrix->unit + l,
        .tile_base = fill->prepared->is_fp8 ? matrix->tile_base + (size_t)l * (size_t)matrix->n_tiles : NULL,
        .is_exact = fill->prepared->is_exact + l};
}

/* Which kernel an expert takes depends on the scales of both its matrices, so both must be there; the smaller one is
 * packed first, and its room filled again while the larger one is packed. */
static moe4_status fill_expert(struct fill *fill, int32_t l, const moe4_expert *expert)
{
    static const int order[N_MATRICES] = {DOWN, GATE_UP};
    const moe4_matrix *const from[N_MATRICES] = {[GATE_UP] = &expert->gate_up, [DOWN] = &expert->down};
    struct moe4_context *context = fill->context;
    moe4_status status =
        device_copy(context, fill->ranges, fill->ranges + N_MATRICES, N_MATRICES * sizeof *fill->ranges, fill->packing);
    for (int i = 0; !status && i < N_MATRICES; i++) {
        const int m = order[i];
        const struct pack_call call = pack_call_of(fill, m, from[m], l);
        status = copy_matrix(fill, m, from[m]);
        if (!status) status = device_stream_follow(context, fill->packing, fill->copied[m]);
        if (!status) status = device_check(context, pack_range(&call, fill->ranges + m, fill->packing), "scales");
    }
    for (int i = 0; !status && i < N_MATRICES; i++) {
        const int m = order[i];
        const struct pack_call call = pack_call_of(fill, m, from[m], l);
        status = device_check(context, pack_matrix(&call, fill->packing), "packing");
        if (!status) status = device_event_record(context, fill->packed[m], fill->packing);
    }
    return status ? status : upload_settle(fill->upload);
}

moe4_status cuda_fill_experts(struct moe4_context *context, struct moe4_layer *layer, const moe4_expert_source *source)
{
    const struct cuda_prepared *prepared = layer->prepared;
    struct fill fill = {.context = context,
                        .prepared = prepared,
                        .matrices = {[GATE_UP] = &prepared->gate_up, [DOWN] = &prepared->down}};
    moe4_status status = open_fill(&fill);
    for (int32_t l = 0; !status && l < layer->L; l++) {
        moe4_expert expert;
        status = layer_read_expert(context, layer, source, l, &expert);
        if (!status) status = fill_expert(&fill, l, &expert);
    }
    if (!status) status = device_stream_wait(context, fill.packing);
    close_fill(&fill);
    return status;
}
