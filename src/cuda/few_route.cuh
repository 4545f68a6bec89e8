/* Routing and grouping of a few tokens, in every block of the GEMM that needs it: a warp a token. */
#ifndef MOE4_CUDA_FEW_ROUTE_CUH
#define MOE4_CUDA_FEW_ROUTE_CUH

#include "cuda/candidates.cuh"
#include "cuda/few_tiles.cuh"
#include "cuda/route.cuh"
#include "cuda/stream.cuh"

/* Barriers of a block besides its teams', which have 1 to 4, and 0. */
enum : int { X_ROWS = 5, TILES, TILES_AND_X, CHOSEN, PLACED };

enum : int {
    CHOOSERS = FEW_TOKENS * 32, /* threads */
    MANY_KEYS = 1024            /* where scores take so long that candidates are sought first */
};

/* How many token tiles down has at most: an expert's rows are taken eight at a time. */
static __device__ __forceinline__ int32_t most_tiles(const route_logits_call &call)
{
    const int32_t n_slots = call.router.top_k * call.T.n_tokens;
    return min(n_slots, call.group.L + n_slots / STREAM_ROWS);
}

/* What a token adds to all: lanes whose slots are the first of a tile of gate/up or of down, and its rows. */
struct token_part {
    uint32_t leaders, down_leaders;
    int32_t n_rows;
};

/* Shared memory for routing. */
struct few_choice {
    double scores[ONE_TOP_K];
    int32_t ids[FEW_SLOTS];
    alignas(16) int32_t slots[FEW_SLOTS]; /* local experts, INT32_MAX for none; then rows, -1 for none */
    token_part parts[FEW_TOKENS];
    int32_t *keys, *locals; /* by token and expert, by expert */
    uint32_t *counts;       /* by local expert: as in few_tiles */
    int64_t *groups;
};

/* Keys lie where the rings will be. */
static __device__ void place_choice(const few_call &call, few_choice &choice, uint8_t *rings, uint8_t *to)
{
    const device_router &router = call.route.router;
    choice.groups = (int64_t *)to;
    choice.locals = (int32_t *)(choice.groups + router.n_group * FEW_TOKENS);
    choice.keys = (int32_t *)rings;
    choice.counts = (uint32_t *)choice.locals + router.n_experts;
}

/* What needs no logits.  They and x, which may still be written, come as far as the second-level cache. */
static __device__ void await_logits(const few_call &call, few_choice &choice)
{
    const route_logits_call &route = call.route;
    for (int32_t e = threadIdx.x; e < route.router.n_experts; e += blockDim.x) {
        choice.locals[e] = route.out.local_of[e];
        if (route.router.bias && !call.topk.ids) prefetch(&route.router.bias[e]);
    }
    for (int32_t l = threadIdx.x; l < route.group.L; l += blockDim.x) choice.counts[l] = 0;
    if (threadIdx.x < FEW_SLOTS) choice.slots[threadIdx.x] = INT32_MAX;
    const int32_t at = blockIdx.x * 128, t = threadIdx.x / 64;
    const int32_t logit_bytes = call.topk.ids ? 0 : route.dtype == MOE4_DTYPE_F32 ? 4 : 2;
    if (t < route.T.n_tokens) {
        if (threadIdx.x % 64 == 0 && at < route.router.n_experts * logit_bytes)
            prefetch_far((const char *)route.logits + t * route.ld * logit_bytes + at);
        if (threadIdx.x % 64 == 32 && at < call.stream.gemm.K * 2)
            prefetch_far((const char *)(call.stream.gemm.x + t * call.stream.gemm.ldx) + at);
    }
    wait_for_predecessors();
}

/* ---- The choice -------------------------------------------------------------------------------------------------- */

/* Whether a token's warp finds candidates before it makes keys of anything. */
static __device__ __forceinline__ bool seeks_candidates(const few_call &call)
{
    const device_router &router = call.route.router;
    return has_candidates(router) && call.route.T.n_tokens * router.n_experts > MANY_KEYS;
}

/* Keys of the first T tokens, by all threads. */
static __device__ void make_keys(const few_call &call, few_choice &choice, int32_t T)
{
    const int32_t E = call.route.router.n_experts;
    if (call.topk.ids || seeks_candidates(call)) return;
    for (int32_t i = threadIdx.x; i < T * E; i += blockDim.x) {
        const int32_t t = i / E, e = i - t * E;
        choice.keys[i] = key_of_expert(call.route.router, logits_of_token(call.route, t), e);
    }
}

/* Of a token's ids, the lane's local expert, -1 if it has none here. */
static __device__ __forceinline__ int32_t choose_locals(const few_call &call, few_choice &choice, int32_t t)
{
    const device_router &router = call.route.router;
    const int32_t A = router.top_k, E = router.n_experts, lane = threadIdx.x % 32;
    int32_t *const ids = choice.ids + t * A, *const keys = choice.keys + t * E;
    const token_logits logits = logits_of_token(call.route, t);
    if (call.topk.ids) {
        if (lane < A) ids[lane] = id_of_slot(call.topk, t * A + lane);
    } else if (!seeks_candidates(call)) {
        choose_experts(router, keys, choice.groups + t * router.n_group, ids);
    } else if (!choose_candidates(router, logits, keys, ids)) {
        for (int32_t e = lane; e < E; e += 32) keys[e] = key_of_expert(router, logits, e);
        __syncwarp();
        choose_experts(router, keys, choice.groups + t * router.n_group, ids);
    }
    __syncwarp();
    const int32_t id = lane < A ? ids[lane] : -1;
    return id >= 0 && id < E ? choice.locals[id] : -1;
}

/* ---- Tiles and rows ---------------------------------------------------------------------------------------------- */

/* How many slots have experts before this one. */
static __device__ __forceinline__ int32_t slots_before(const few_choice &choice, int32_t n, int32_t l)
{
    int32_t before = 0;
#pragma unroll 4
    for (int32_t i = 0; i < n; i += 4) {
        const int4 four = *(const int4 *)&choice.slots[i];
        before += (four.x < l) + (four.y < l) + (four.z < l) + (four.w < l);
    }
    return before;
}

/* Of a token, or of one that is not there, by its warp, which meets the others': a slot that no other
 * of its tile comes before writes the tile, the one of down, too, in the block that is to. */
static __device__ void place_token(const few_call &call, few_choice &choice, few_tiles &tiles, int32_t t, int32_t l)
{
    const int32_t A = call.route.router.top_k, lane = threadIdx.x % 32, slot = t * A + lane;
    const int32_t repeats = __popc(__match_any_sync(~0u, l) & ((1u << lane) - 1));
    if (l >= 0) {
        choice.slots[slot] = l;
        atomicAdd(&choice.counts[l], 1u << 4 * t);
    }
    barrier_sync<CHOOSERS>(CHOSEN);
    const uint32_t counts = l >= 0 ? choice.counts[l] : 0, columns = digits_above(counts, repeats);
    const int32_t first = slots_before(choice, call.route.T.n_tokens * A, l);
    const int32_t rank = sum_of_digits(digits_before(counts, t)) + repeats;
    const bool leads = l >= 0 && !digits_before(columns, t), leads_down = l >= 0 && rank % STREAM_ROWS == 0;
    const token_part own = {__ballot_sync(~0u, leads), __ballot_sync(~0u, leads_down),
                            __popc(__ballot_sync(~0u, l >= 0))};
    if (lane == 0) choice.parts[t] = own;
    barrier_sync<CHOOSERS>(PLACED);
    int32_t tile = __popc(own.leaders & ((1u << lane) - 1)), down = __popc(own.down_leaders & ((1u << lane) - 1));
    for (int32_t before = 0; before < t; before++) {
        tile += __popc(choice.parts[before].leaders);
        down += __popc(choice.parts[before].down_leaders);
    }
    if (leads) {
        tiles.of[tile] = {l, first + repeats, __popc(columns)};
        tiles.columns[tile] = columns;
        tiles.counts[tile] = counts;
    }
    if (leads_down && blockIdx.x == 0)
        call.route.group.tiles[down] = {l, first + rank, min(sum_of_digits(counts) - rank, (int32_t)STREAM_ROWS)};
    if (lane < A && slot < FEW_SLOTS) choice.slots[slot] = l >= 0 ? first + rank : -1;
    if (t == FEW_TOKENS - 1 && lane == 0) tiles.n = tile + __popc(own.leaders);
}

/* ---- What routing and grouping leave in memory ------------------------------------------------------------------- */

/* How many rows and tiles of down there are, and zeros behind those. */
static __device__ void store_counts(const few_call &call, int32_t n_rows, int32_t n_tiles)
{
    const route_logits_call &route = call.route;
    const int32_t lane = threadIdx.x % 32;
    if (lane == 0) {
        check_token_count(route.T, route.out.faults);
        *route.group.n_tiles = n_tiles;
        *route.group.n_rows = n_rows;
        if (route.group.n_rows_copy) *route.group.n_rows_copy = n_rows;
    }
    for (int32_t i = n_tiles + lane; i < most_tiles(route); i += 32) route.group.tiles[i] = {};
}

static __device__ void store_token(const few_call &call, few_choice &choice, int32_t t)
{
    const route_logits_call &route = call.route;
    const int32_t A = route.router.top_k, lane = threadIdx.x % 32;
    if (!call.topk.ids)
        finish_token(route, t, logits_of_token(route, t), choice.ids + t * A, choice.scores, true);
    else if (lane < A)
        route_slot(call.topk, route.out, t * A + lane);
    if (lane < A) route.group.row_map[t * A + lane] = choice.slots[t * A + lane];
}

/* By one warp of every block: each has its tokens. */
static __device__ void store_routing(const few_call &call, few_choice &choice)
{
    int32_t n_rows = 0, n_tiles = 0;
    for (int32_t t = 0; t < FEW_TOKENS; t++) {
        n_rows += choice.parts[t].n_rows;
        n_tiles += __popc(choice.parts[t].down_leaders);
    }
    if (blockIdx.x == 0) store_counts(call, n_rows, n_tiles);
#pragma unroll 1
    for (int32_t t = blockIdx.x; t < token_count_of(call.route.T); t += gridDim.x) store_token(call, choice, t);
}

#endif
