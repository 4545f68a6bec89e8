/* The grouped GEMM on wgmma: out[row, :] = activation or bias of x[row] . W[expert of row]^T, in items of a few
 * weight tiles of 64 rows by one token tile, up to MAX_TOKENS routed rows of one expert.
 *
 * The weights are operand A, decoded into registers, the activations operand B in shared memory, so that a token tile
 * may be as narrow as 8 and takes the narrowest instruction that holds it.  A block is one producer warpgroup
 * and three or four consumer warpgroups of one weight tile each.  A ring of stages, each a few steps of 64 k, lies
 * between them:
 *
 *   producers    thread 0 starts the bulk copies of the packed weights; all gather rows of x, 16 bytes at a time
 *   full[s]      arrivals of the 128 producers, each when its copies have landed, and the bytes of the bulk copies
 *   consumers    decode the next group of steps while the tensor cores work on this one
 *   empty[s]     arrivals of all consumers' threads
 *
 * Order of sums ("wgmma_k16"): every element of out is one chain of m64nNk16 instructions over ascending k, whatever
 * the width, the tile and T are, so none of them changes a bit. */
#ifndef MOE4_CUDA_GEMM_CUH
#define MOE4_CUDA_GEMM_CUH

#include <algorithm>
#include <type_traits>

#include "cuda/decode.cuh"
#include "cuda/epilogue.cuh"
#include "cuda/gemm.h"
#include "cuda/layout.h"
#include "cuda/ptx.cuh"
#include "cuda/wgmma.cuh"

enum { WARPGROUP = 128 };

template <int...> struct width_list {
};

/* What a block is made of: consumer warpgroups, registers of both kinds, the most rows of a token tile, steps a stage,
 * stages, and widths of instructions.  What is narrow is bound by decoding and synchronisation and has registers to
 * spare for one more warpgroup. */
struct wide_block {
    static constexpr int consumers = 3, producer_registers = 56, consumer_registers = 152, rows = MAX_TOKENS;
    static constexpr int steps = 2, stages = 4;
    static constexpr bool rest_is_last = true;
    using widths = width_list<16, 32, 48, 64, 80, 88, 96, 104, 112, 120, 128, 136, 144, 152, MAX_TOKENS>;
    using few_widths = width_list<16, 48, NARROW_TOKENS, 112, MAX_TOKENS>;
};

struct narrow_block {
    static constexpr int consumers = 4, producer_registers = 64, consumer_registers = 104, rows = NARROW_TOKENS;
    static constexpr int steps = 4, stages = 3;
    static constexpr bool rest_is_last = false;
    using widths = width_list<8, 16, 24, 32, 40, 48, 56, 64, 72, NARROW_TOKENS>;
    using few_widths = width_list<16, 48, NARROW_TOKENS>;
};

template <class Block> constexpr int gemm_threads = (Block::consumers + 1) * WARPGROUP;

/* A stage: rows of x, 128 bytes a step, then each warpgroup's packed weights. */
template <class Block> struct stage_layout {
    static constexpr int x_bytes = Block::rows * 128;                 /* of a step */
    static constexpr int weights = Block::steps * x_bytes;            /* where they begin */
    static constexpr int tile_bytes = Block::steps * CUDA_STEP_BYTES; /* of a warpgroup */
    static constexpr int bytes = (weights + Block::consumers * tile_bytes + 1023) / 1024 * 1024;
    static_assert(Block::steps % 2 == 0, "steps alternate between two sets of registers");
};

template <class Block>
constexpr int gemm_shared_bytes = Block::stages *stage_layout<Block>::bytes + 1024 + Block::stages * 16;

struct gemm_ring {
    uint32_t stages, full, empty; /* shared addresses: the ring and its barriers */
};

template <class Block> struct ring_position {
    uint32_t stage = 0, parity = 0;
    __device__ __forceinline__ void advance()
    {
        if (++stage == Block::stages) stage = 0, parity ^= 1;
    }
};

/* Weight tiles of one token tile, one a consumer. */
struct gemm_item {
    token_tile tokens;
    int first_tile, n_tiles;
};

/* A call's items in the order in which blocks take them, all blocks a round.  Weight tiles that are too few for all
 * consumers come last where that evens what blocks have to do; narrow blocks wait for memory, and wait less when some
 * are ahead of others.  What is left for the last round and would not occupy half of the blocks is cut into parts. */
struct gemm_items {
    int groups, n_grouped; /* items of a token tile, and of all token tiles, that come together */
    int n_whole, parts, n;
};

template <class Block> static __device__ __forceinline__ gemm_items items_of(const gemm_call &call)
{
    const int rest_tiles = call.n_tiles % Block::consumers, n_token_tiles = *call.n_token_tiles;
    const int groups = call.n_tiles / Block::consumers + (rest_tiles && !Block::rest_is_last);
    const int n_grouped = n_token_tiles * groups,
              n = n_grouped + (rest_tiles && Block::rest_is_last ? n_token_tiles : 0);
    const int rest = n % gridDim.x, parts = rest ? min(Block::consumers, gridDim.x / rest) : 1;
    return {groups, n_grouped, n - rest, parts, n - rest + rest * parts};
}

template <class Block>
static __device__ __forceinline__ gemm_item item_at(const gemm_call &call, const gemm_items &items, int index)
{
    int first = 0, most = Block::consumers;
    if (index >= items.n_whole) {
        const int part = (index - items.n_whole) % items.parts;
        most = (Block::consumers + items.parts - 1) / items.parts;
        first = part * most;
        most = min(most, Block::consumers - first);
        index = items.n_whole + (index - items.n_whole) / items.parts;
    }
    const bool is_grouped = !Block::rest_is_last || index < items.n_grouped;
    const int token_tile = is_grouped ? index / items.groups : index - items.n_grouped;
    first += (is_grouped ? index - token_tile * items.groups : items.groups) * Block::consumers;
    return {call.token_tiles[token_tile], first, min(most, call.n_tiles - first)};
}

/* ---- Producers -------------------------------------------------------------------------------------------------- */

enum { GATHER_ROWS = WARPGROUP / 8 };

/* Where a producer thread's next stage comes from.  It copies a 16-byte chunk of every 16th row of the tile. */
template <class Block> struct fill_source {
    const uint16_t *x[Block::rows / GATHER_ROWS];
    const uint8_t *weights[Block::consumers];
    int n_tiles, n_passes;
    uint32_t to; /* of the first chunk in a step's rows */
};

/* Stages that take their weights before the kernel's predecessor is over, weights being no work of its. */
struct head_start {
    bool wanted;
    int n_stages; /* whose weights are under way */
};

/* Rows of 128 bytes have their chunks exchanged by the row's low three bits: wgmma's 128-byte swizzle.  What lies in
 * rows past the tile's end only reaches columns that nobody stores. */
template <class Block>
static __device__ __forceinline__ fill_source<Block> source_of(const gemm_call &call, const gemm_item &item)
{
    const token_tile &tokens = item.tokens;
    const int chunk = threadIdx.x % 8, first_row = threadIdx.x / 8;
    fill_source<Block> from = {};
    from.n_passes = (tokens.n_rows - first_row + GATHER_ROWS - 1) / GATHER_ROWS;
    from.to = first_row * 128 + ((chunk ^ first_row % 8) << 4);
#pragma unroll
    for (int p = 0; p < Block::rows / GATHER_ROWS; p++) {
        int row = tokens.first_row + first_row + GATHER_ROWS * p;
        if (p < from.n_passes && call.row_source) row = call.row_source[row];
        from.x[p] = call.x + row * call.ldx + chunk * 8;
    }
#pragma unroll
    for (int w = 0; w < Block::consumers; w++)
        from.weights[w] =
            call.weights + ((int64_t)tokens.l * call.n_tiles + item.first_tile + w) * call.n_steps * CUDA_STEP_BYTES;
    from.n_tiles = item.n_tiles;
    return from;
}

/* The steps of a stage; zeros where K is over. */
template <class Block, int passes>
static __device__ __forceinline__ void fill_x(const gemm_call &call, fill_source<Block> &from, int first_step,
                                              uint32_t stage)
{
    uint32_t valid[Block::steps];
#pragma unroll
    for (int s = 0; s < Block::steps; s++)
        valid[s] = (first_step + s) * CUDA_STEP_K + (int)threadIdx.x % 8 * 8 < call.K ? 16 : 0;
#pragma unroll
    for (int p = 0; p < passes; p++) {
#pragma unroll
        for (int s = 0; s < Block::steps; s++)
            copy16_if(p < from.n_passes, stage + from.to + s * stage_layout<Block>::x_bytes + p * GATHER_ROWS * 128,
                      from.x[p] + s * CUDA_STEP_K, valid[s]);
        from.x[p] += Block::steps * CUDA_STEP_K;
    }
}

/* One thread's bulk copies of all warpgroups' weights of a stage. */
template <class Block>
static __device__ __forceinline__ void fill_weights(const gemm_call &call, const gemm_ring &ring,
                                                    fill_source<Block> &from, int stage, int step)
{
    using layout = stage_layout<Block>;
    const uint32_t full = ring.full + stage * 8, bytes = min(call.n_steps - step, Block::steps) * CUDA_STEP_BYTES;
    barrier_expect(full, from.n_tiles * bytes);
#pragma unroll
    for (int w = 0; w < Block::consumers; w++) {
        if (w < from.n_tiles)
            bulk_copy(ring.stages + stage * layout::bytes + layout::weights + w * layout::tile_bytes, from.weights[w],
                      bytes, full);
        from.weights[w] += layout::tile_bytes;
    }
}

/* All stages of an item of up to 16 * passes rows. */
template <class Block, int passes>
static __device__ __forceinline__ void fill_item(const gemm_call &call, const gemm_ring &ring, ring_position<Block> &at,
                                                 const gemm_item &item, head_start &ahead)
{
    static_assert(passes <= Block::rows / GATHER_ROWS);
    fill_source<Block> from = source_of<Block>(call, item);
    if (ahead.wanted) { /* the block's first item: every stage is empty */
        for (int step = 0; step < call.n_steps && ahead.n_stages < Block::stages;
             step += Block::steps, ahead.n_stages++)
            if (threadIdx.x == 0) fill_weights<Block>(call, ring, from, ahead.n_stages, step);
        wait_for_predecessors();
        ahead.wanted = false;
    }
    for (int step = 0; step < call.n_steps; step += Block::steps, at.advance()) {
        barrier_wait(ring.empty + at.stage * 8, at.parity ^ 1);
        if (ahead.n_stages > 0)
            ahead.n_stages--;
        else if (threadIdx.x == 0)
            fill_weights<Block>(call, ring, from, at.stage, step);
        fill_x<Block, passes>(call, from, step, ring.stages + at.stage * stage_layout<Block>::bytes);
        copies_arrive(ring.full + at.stage * 8);
    }
}

/* With no more passes than it takes: one that copies nothing takes its time all the same. */
template <class Block, int passes, int... more>
static __device__ __forceinline__ void fill_least(const gemm_call &call, const gemm_ring &ring,
                                                  ring_position<Block> &at, const gemm_item &item, head_start &ahead)
{
    if constexpr (sizeof...(more) > 0) {
        if (item.tokens.n_rows > passes * GATHER_ROWS) {
            fill_least<Block, more...>(call, ring, at, item, ahead);
            return;
        }
    }
    fill_item<Block, passes>(call, ring, at, item, ahead);
}

template <class Block> static __device__ __forceinline__ void produce(const gemm_call &call, const gemm_ring &ring)
{
    ring_position<Block> at;
    head_start ahead = {call.tiles_are_old != 0, 0};
    const gemm_items items = items_of<Block>(call);
    for (int index = blockIdx.x; index < items.n; index += gridDim.x) {
        const gemm_item item = item_at<Block>(call, items, index);
        if (item.n_tiles <= 0) continue;
        if constexpr (Block::rows > NARROW_TOKENS)
            fill_least<Block, 1, 2, 3, NARROW_TOKENS / GATHER_ROWS, 7, MAX_TOKENS / GATHER_ROWS>(call, ring, at, item,
                                                                                                 ahead);
        else
            fill_least<Block, 1, 2, 3, 4, NARROW_TOKENS / GATHER_ROWS>(call, ring, at, item, ahead);
    }
    if (ahead.wanted) wait_for_predecessors(); /* without an item, too: whoever waits for this kernel waits for them */
    copy_wait_all();                           /* shared memory must outlive the copies */
}

/* ---- Consumers -------------------------------------------------------------------------------------------------- */

static __device__ __forceinline__ int consumer(void)
{
    return __shfl_sync(~0u, threadIdx.x / WARPGROUP, 0) - 1; /* so that the compiler sees that warps branch whole */
}

static __device__ __forceinline__ void decode_at(uint32_t step, uint32_t (&a)[16])
{
    const int thread = threadIdx.x % WARPGROUP;
    uint4 codes = load_shared_16(step + CUDA_STEP_SCALES + thread * 16);
    uint32_t scales = load_shared_4(step + thread / 4 * 4);
    decode_step(codes, scales, a);
}

/* Until the stage is full, by whichever way its bytes came. */
template <class Block>
static __device__ __forceinline__ void await_stage(const gemm_ring &ring, const ring_position<Block> &at)
{
    barrier_wait(ring.full + at.stage * 8, at.parity);
    async_proxy_fence();
}

/* All of K for one item. */
template <class Block, int N>
static __device__ __forceinline__ void multiply(const gemm_call &call, const gemm_ring &ring, ring_position<Block> &at,
                                                float (&d)[N / 2])
{
    using layout = stage_layout<Block>;
    constexpr int steps = Block::steps;
    const int n_stages = (call.n_steps + steps - 1) / steps;
    const uint32_t own = ring.stages + layout::weights + consumer() * layout::tile_bytes;
    uint32_t a[2][16];
#pragma unroll
    for (int i = 0; i < N / 2; i++) d[i] = 0.0f;
    at.stage = __shfl_sync(~0u, at.stage, 0); /* so that the compiler sees one address for the whole warp */
    await_stage(ring, at);
    decode_at(own + at.stage * layout::bytes, a[0]);
    for (int n = 0; n < n_stages; n++) {
        const uint32_t weights = own + at.stage * layout::bytes, empty = ring.empty + at.stage * 8;
        const uint64_t b = wgmma_operand(ring.stages + at.stage * layout::bytes);
#pragma unroll
        for (int i = 0; i < steps; i++) {
            multiply_step<N>(d, a[i % 2], b + i * (layout::x_bytes / 16));
            if (i + 1 < steps) {
                decode_at(weights + (i + 1) * CUDA_STEP_BYTES, a[(i + 1) % 2]);
            } else {
                at.advance();
                if (n + 1 < n_stages) {
                    await_stage(ring, at);
                    decode_at(own + at.stage * layout::bytes, a[0]);
                }
            }
            wgmma_wait<0>();
            if (n * steps + i + 1 >= call.n_steps && i + 1 < steps) {
                at.advance();
                break;
            }
        }
        barrier_arrive(empty);
    }
}

/* A consumer without a tile lets all stages of an item pass. */
template <class Block>
static __device__ __forceinline__ void pass(const gemm_call &call, const gemm_ring &ring, ring_position<Block> &at)
{
    for (int step = 0; step < call.n_steps; step += Block::steps, at.advance()) {
        barrier_wait(ring.full + at.stage * 8, at.parity);
        barrier_arrive(ring.empty + at.stage * 8);
    }
}

template <class Block, int N, moe4_activation activation>
static __device__ __forceinline__ void consume_item(const gemm_call &call, const gemm_ring &ring,
                                                    ring_position<Block> &at, const gemm_item &item)
{
    if (consumer() >= item.n_tiles) {
        pass(call, ring, at);
        return;
    }
    const strip own = {item.first_tile + consumer(), (int)threadIdx.x / 32 % 4};
    float d[N / 2];
    if constexpr (Block::consumers == 3 &&
                  N <= NARROW_TOKENS) { /* registers to spare: what the epilogue needs is there in time */
        const row_pair rows = rows_of_thread(call, item.tokens.l, own);
        multiply<Block, N>(call, ring, at, d);
        store_sums<N, activation>(call, item.tokens, own, rows, d);
    } else {
        multiply<Block, N>(call, ring, at, d);
        store_sums<N, activation>(call, item.tokens, own, rows_of_thread(call, item.tokens.l, own), d);
    }
}

/* The narrowest width that holds the item's tokens. */
template <class Block, moe4_activation activation, int N, int... wider>
static __device__ __forceinline__ void consume_narrowest(width_list<N, wider...>, const gemm_call &call,
                                                         const gemm_ring &ring, ring_position<Block> &at,
                                                         const gemm_item &item)
{
    if constexpr (sizeof...(wider) > 0) {
        if (item.tokens.n_rows > N) {
            consume_narrowest<Block, activation>(width_list<wider...>(), call, ring, at, item);
            return;
        }
    }
    consume_item<Block, N, activation>(call, ring, at, item);
}

/* IDENTITY is down's. */
template <class Block, moe4_activation activation>
using widths_of = std::conditional_t<is_common<activation> || activation == MOE4_ACTIVATION_IDENTITY,
                                     typename Block::widths, typename Block::few_widths>;

template <class Block, moe4_activation activation>
static __device__ __forceinline__ void consume(const gemm_call &call, const gemm_ring &ring)
{
    const gemm_items items = items_of<Block>(call);
    ring_position<Block> at;
    for (int index = blockIdx.x; index < items.n; index += gridDim.x) {
        const gemm_item item = item_at<Block>(call, items, index);
        if (item.n_tiles > 0)
            consume_narrowest<Block, activation>(widths_of<Block, activation>(), call, ring, at, item);
    }
}

template <class Block, moe4_activation activation>
__global__ void __launch_bounds__(gemm_threads<Block>, 1) gemm_kernel(const __grid_constant__ gemm_call call)
{
    extern __shared__ uint8_t shared[];
    const uint32_t stages = (shared_address(shared) + 1023) / 1024 * 1024;
    const uint32_t barriers = stages + Block::stages * stage_layout<Block>::bytes;
    const gemm_ring ring = {stages, barriers, barriers + Block::stages * 8};
    if (threadIdx.x == 0) {
        for (int s = 0; s < Block::stages; s++) {
            barrier_init(ring.full + s * 8, WARPGROUP);
            barrier_init(ring.empty + s * 8, Block::consumers * WARPGROUP);
        }
        barrier_init_fence();
    }
    if (!call.tiles_are_old) wait_for_predecessors();
    launch_dependents();
    __syncthreads();
    if (threadIdx.x < WARPGROUP) {
        registers_lower<Block::producer_registers>();
        produce<Block>(call, ring);
    } else {
        registers_raise<Block::consumer_registers>();
        consume<Block, activation>(call, ring);
    }
}

#endif
