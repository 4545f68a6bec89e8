#include "cuda/fill.h"

#include "base/dims.h"
#include "base/mxfp4.h"
#include "cuda/arena.h"
#include "cuda/prepared.h"
#include "cuda/upload.h"

enum { GATE_UP, DOWN, N_MATRICES };

/* Device memory for one expert as the checkpoint has it. */
struct room {
    uint8_t *codes[N_MATRICES]; /* scales follow */
    void *bias[N_MATRICES];
    cuda_event packed[N_MATRICES]; /* what was in it has been read */
};

/* Two experts are under way, one being copied while the other is packed.  The second room is where the last expert will
 * be packed, which is free until then. */
struct fill {
    struct moe4_context *context;
    const struct cuda_prepared *prepared;
    const struct cuda_matrix *matrices[N_MATRICES];
    const moe4_expert_source *source;
    int32_t L;
    struct upload *upload;
    cuda_stream packing;
    cuda_event copied[N_MATRICES]; /* of the last expert that has been queued */
    struct room rooms[2];
    int32_t n_rooms;
    struct scale_range *ranges; /* of both matrices, then what they begin with */
    void *memory;
};

static size_t code_bytes(const struct cuda_matrix *matrix)
{
    return (size_t)matrix->rows * (size_t)matrix->K / 2;
}

static size_t scale_bytes(const struct cuda_matrix *matrix)
{
    return (size_t)matrix->rows * (size_t)matrix->K / BLOCK_SIZE;
}

/* Where the last expert's tiles will be, if there is another expert and its matrices, without what pads them there but
 * with what pads stored halves, are no larger. */
static int find_second_room(struct fill *fill)
{
    for (int m = 0; m < N_MATRICES; m++) {
        const struct cuda_matrix *matrix = fill->matrices[m];
        if (fill->L < 2 || code_bytes(matrix) + scale_bytes(matrix) > matrix->expert_bytes) return 0;
        fill->rooms[1].codes[m] = matrix->packed + (size_t)(fill->L - 1) * matrix->expert_bytes;
    }
    return 1;
}

static moe4_status reset_ranges(const struct fill *fill)
{
    return device_copy(fill->context, fill->ranges, fill->ranges + N_MATRICES, N_MATRICES * sizeof *fill->ranges,
                       fill->packing);
}

static moe4_status allocate_staging(struct fill *fill)
{
    static const struct scale_range nothing[N_MATRICES] = {{SCALE_NAN, 0, 0}, {SCALE_NAN, 0, 0}};
    struct arena arena = {0};
    size_t codes[N_MATRICES], bias[2][N_MATRICES];
    const size_t ranges = arena_reserve(&arena, 2 * N_MATRICES, sizeof *fill->ranges);
    fill->n_rooms = 1 + find_second_room(fill);
    for (int m = 0; m < N_MATRICES; m++) {
        codes[m] = arena_reserve(&arena, 1, code_bytes(fill->matrices[m]) + scale_bytes(fill->matrices[m]));
        for (int i = 0; i < fill->n_rooms; i++)
            bias[i][m] = arena_reserve(&arena, fill->matrices[m]->rows, sizeof(float));
    }
    char *memory = fill->memory = device_allocate(arena.total);
    if (!memory)
        return context_fail(fill->context, MOE4_ENOMEM, "out of device memory: %zu bytes for an expert", arena.total);
    fill->ranges = (struct scale_range *)(memory + ranges);
    for (int m = 0; m < N_MATRICES; m++) {
        fill->rooms[0].codes[m] = (uint8_t *)(memory + codes[m]);
        for (int i = 0; i < fill->n_rooms; i++) fill->rooms[i].bias[m] = memory + bias[i][m];
    }
    moe4_status status =
        device_upload(fill->context, fill->ranges + N_MATRICES, nothing, sizeof nothing, fill->packing);
    return status ? status : reset_ranges(fill);
}

static moe4_status open_fill(struct fill *fill)
{
    struct moe4_context *context = fill->context;
    moe4_status status = upload_of(context, &fill->upload);
    if (!status) status = device_stream_create(context, &fill->packing);
    for (int m = 0; !status && m < N_MATRICES; m++) {
        status = device_event_create(context, &fill->copied[m]);
        for (int i = 0; !status && i < 2; i++) status = device_event_create(context, &fill->rooms[i].packed[m]);
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
        for (int i = 0; i < 2; i++) device_event_destroy(fill->rooms[i].packed[m]);
    }
    device_stream_destroy(fill->packing);
}

/* The last expert's is the first room. */
static struct room *room_of(struct fill *fill, int32_t l)
{
    return &fill->rooms[fill->n_rooms == 2 && (fill->L - 1 - l) % 2];
}

/* What a source has of an array: its rows where they lie, or its word for it. */
static struct upload_span span_of(const struct fill *fill, const void *from, int64_t pitch, size_t width, int64_t rows,
                                  moe4_part part)
{
    return (struct upload_span){.n_bytes = width * (size_t)rows,
                                .from = fill->source->copy ? NULL : from,
                                .pitch = pitch ? (size_t)pitch : width,
                                .width = width,
                                .part = part};
}

static moe4_status copy_spans(struct fill *fill, void *to, const struct upload_span *spans, int32_t n, int32_t l)
{
    const struct upload_run run = {.to = to, .spans = spans, .n_spans = n, .source = fill->source, .l = l};
    return upload_run(fill->upload, &run);
}

/* A matrix into its place, as soon as what was there has left it. */
static moe4_status copy_matrix(struct fill *fill, const struct room *room, int m, const moe4_matrix *from, int32_t l)
{
    static const moe4_part first_part[N_MATRICES] = {MOE4_PART_GATE_UP_CODES, MOE4_PART_DOWN_CODES};
    const struct cuda_matrix *matrix = fill->matrices[m];
    const moe4_part codes = first_part[m], scales = codes + 1, bias = codes + 2;
    const size_t K = (size_t)matrix->K, bias_bytes = from->bias_dtype == MOE4_DTYPE_F32 ? 4 : 2;
    const cuda_stream stream = fill->upload->stream;
    const struct upload_span spans[] = {
        span_of(fill, from->codes, from->codes_row_bytes, K / 2, matrix->rows, codes),
        span_of(fill, from->scales, from->scales_row_bytes, K / BLOCK_SIZE, matrix->rows, scales),
        span_of(fill, from->bias, 0, bias_bytes * (size_t)matrix->rows, 1, bias),
    };
    moe4_status status = device_stream_follow(fill->context, stream, room->packed[m]);
    if (!status) status = copy_spans(fill, room->codes[m], spans, 2, l);
    if (!status && from->bias) status = copy_spans(fill, room->bias[m], spans + 2, 1, l);
    return status ? status : device_event_record(fill->context, fill->copied[m], stream);
}

static struct pack_call pack_call_of(const struct fill *fill, const struct room *room, int m, const moe4_matrix *from,
                                     int32_t l)
{
    const struct cuda_matrix *matrix = fill->matrices[m];
    return (struct pack_call){
        .codes = room->codes[m],
        .scales = room->codes[m] + code_bytes(matrix),
        .bias = from->bias ? room->bias[m] : NULL,
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

/* Which kernel an expert takes depends on the scales of both its matrices, so both must be there before either is
 * packed; the smaller one goes first, so that less is left to do when the larger one has come. */
static moe4_status fill_expert(struct fill *fill, int32_t l, const moe4_expert *expert)
{
    static const int order[N_MATRICES] = {DOWN, GATE_UP};
    const moe4_matrix *const from[N_MATRICES] = {[GATE_UP] = &expert->gate_up, [DOWN] = &expert->down};
    struct moe4_context *context = fill->context;
    const struct room *room = room_of(fill, l);
    moe4_status status = MOE4_OK;
    for (int i = 0; !status && i < N_MATRICES; i++) {
        const int m = order[i];
        const struct pack_call call = pack_call_of(fill, room, m, from[m], l);
        status = copy_matrix(fill, room, m, from[m], l);
        if (!status) status = device_stream_follow(context, fill->packing, fill->copied[m]);
        if (!status) status = device_check(context, pack_range(&call, fill->ranges + m, fill->packing), "scales");
    }
    for (int i = 0; !status && i < N_MATRICES; i++) {
        const int m = order[i];
        const struct pack_call call = pack_call_of(fill, room, m, from[m], l);
        status = device_check(context, pack_matrix(&call, fill->packing), "packing");
        if (!status) status = device_event_record(context, room->packed[m], fill->packing);
    }
    if (!status) status = reset_ranges(fill);
    return status ? status : upload_settle(fill->upload);
}

moe4_status cuda_fill_experts(struct moe4_context *context, struct moe4_layer *layer, const moe4_expert_source *source)
{
    const struct cuda_prepared *prepared = layer->prepared;
    struct fill fill = {.context = context,
                        .prepared = prepared,
                        .source = source,
                        .L = layer->L,
                        .matrices = {[GATE_UP] = &prepared->gate_up, [DOWN] = &prepared->down}};
    moe4_status status = open_fill(&fill);
    for (int32_t l = 0; !status && l < layer->L; l++) {
        moe4_expert expert;
        status = source->copy ? layer_describe_expert(context, layer, source, l, &expert)
                              : layer_read_expert(context, layer, source, l, &expert);
        if (!status) status = fill_expert(&fill, l, &expert);
    }
    if (!status) status = device_stream_wait(context, fill.packing);
    close_fill(&fill);
    return status;
}
