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

#include "cuda/decode.cuh"
#include "cuda/epilogue.cuh"
#include "cuda/gemm.h"
#include "cuda/layout.h"
#include "cuda/ptx.cuh"
#include "cuda/wgmma.cuh"

enum { WARPGROUP = 128, STAGES = 3 };

/* What a block is made of: consumer warpgroups, registers of both kinds, the most rows of a token tile, steps a stage
 * and steps a group of wgmma by its width.  What is narrow is bound by decoding and synchronisation and has registers
 * to spare: for larger groups, or for one more warpgroup. */
struct wide_block {
    static constexpr int consumers = 3, producer_registers = 56, consumer_registers = 152, rows = MAX_TOKENS;
    static constexpr int steps(int width)
    {
        return width <= NARROW_TOKENS ? 4 : 2;
    }
    static constexpr int group(int width)
    {
        return width <= NARROW_TOKENS ? 2 : 1;
    }
};

struct narrow_block {
    static constexpr int consumers = 4, producer_registers = 64, consumer_registers = 104, rows = NARROW_TOKENS;
    static constexpr int steps(int)
    {
        return 4;
    }
    static constexpr int group(int)
    {
        return 1;
    }
};

template <class Block> constexpr int gemm_threads = (Block::consumers + 1) * WARPGROUP;

/* A stage: rows of x, 128 bytes a step, then each warpgroup's packed weights.  Stages of few steps hold more rows. */
template <class Block, int N> struct width {
    static constexpr int steps = Block::steps(N), group = Block::group(N);
    static constexpr int rows = N <= NARROW_TOKENS ? (int)NARROW_TOKENS : Block::rows; /* that a stage has room for */
    static constexpr int x_bytes = rows * 128;                                         /* of a step */
    static constexpr int weights = steps * x_bytes;                                    /* where they begin */
    static constexpr int bytes = weights + Block::consumers * steps * CUDA_STEP_BYTES;
    static_assert(steps / group % 2 == 0, "groups alternate between two sets of registers");
};

template <class Block>
constexpr int stage_bytes = (std::max(width<Block, 8>::bytes, width<Block, Block::rows>::bytes) + 1023) / 1024 * 1024;
template <class Block> constexpr int gemm_shared_bytes = STAGES *stage_bytes<Block> + 1024 + STAGES * 16;

struct gemm_ring {
    uint32_t stages, full, empty; /* shared addresses: the ring and its barriers */
};

struct ring_position {
    uint32_t stage = 0, parity = 0;
    __device__ __forceinline__ void advance()
    {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
};

/* Weight tiles of one token tile, one a consumer. */
struct gemm_item {
    token_tile tokens;
    int first_tile, n_tiles;
};

/* A call's items in the order in which blocks take them, all blocks a round.  What is left for the last round and would
 * not occupy half of them is cut into parts. */
struct gemm_items {
    int groups, n_whole, parts, n;
};

template <class Block> static __device__ __forceinline__ gemm_items items_of(const gemm_call &call)
{
    const int groups = (call.n_tiles + Block::consumers - 1) / Block::consumers, n = *call.n_token_tiles * groups;
    const int rest = n % gridDim.x, parts = rest ? min(Block::consumers, gridDim.x / rest) : 1;
    return {groups, n - rest, parts, n - rest + rest * parts};
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
    first += index % items.groups * Block::consumers;
    return {call.token_tiles[index / items.groups], first, min(most, call.n_tiles - first)};
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
template <class Block, class W, int passes>
static __device__ __forceinline__ void fill_x(const gemm_call &call, fill_source<Block> &from, int first_step,
                                              uint32_t stage)
{
    constexpr int steps = W::steps;
    uint32_t valid[steps];
#pragma unroll
    for (int s = 0; s < steps; s++)
        valid[s] = (first_step + s) * CUDA_STEP_K + (int)threadIdx.x % 8 * 8 < call.K ? 16 : 0;
#pragma unroll
    for (int p = 0; p < passes; p++) {
#pragma unroll
        for (int s = 0; s < steps; s++)
            copy16_if(p < from.n_passes, stage + from.to + s * W::x_bytes + p * GATHER_ROWS * 128,
                      from.x[p] + s * CUDA_STEP_K, valid[s]);
        from.x[p] += steps * CUDA_STEP_K;
    }
}

/* Zeros for the missing steps of one warpgroup's weights. */
static __device__ __forceinline__ void fill_zeros(const gemm_call &call, uint32_t to, int bytes)
{
#pragma unroll 1
    for (int at = (int)threadIdx.x * 16; at < bytes; at += WARPGROUP * 16) copy16_if(true, to + at, call.weights, 0);
}

/* One thread's bulk copies of all warpgroups' weights of a stage. */
template <class Block, class W>
static __device__ __forceinline__ void fill_weights(const gemm_call &call, const gemm_ring &ring,
                                                    fill_source<Block> &from, int stage, int step)
{
    const int left = call.n_steps - step;
    const uint32_t full = ring.full + stage * 8, bytes = (left < W::steps ? left : W::steps) * CUDA_STEP_BYTES;
    barrier_expect(full, from.n_tiles * bytes);
#pragma unroll
    for (int w = 0; w < Block::consumers; w++) {
        if (w < from.n_tiles)
            bulk_copy(ring.stages + stage * stage_bytes<Block> + W::weights + w * W::steps * CUDA_STEP_BYTES,
                      from.weights[w], bytes, full);
        from.weights[w] += W::steps * CUDA_STEP_BYTES;
    }
}

/* All stages of an item of up to 16 * passes rows. */
template <class Block, class W, int passes>
static __device__ __forceinline__ void fill_item(const gemm_call &call, const gemm_ring &ring, ring_position &at,
                                                 const gemm_item &item, head_start &ahead)
{
    constexpr int tile_bytes = W::steps * CUDA_STEP_BYTES;
    static_assert(passes <= W::rows / GATHER_ROWS);
    fill_source<Block> from = source_of<Block>(call, item);
    if (ahead.wanted) { /* the block's first item: every stage is empty */
        for (int step = 0; step < call.n_steps && ahead.n_stages < STAGES; step += W::steps, ahead.n_stages++)
            if (threadIdx.x == 0) fill_weights<Block, W>(call, ring, from, ahead.n_stages, step);
        wait_for_predecessors();
        ahead.wanted = false;
    }
    for (int step = 0; step < call.n_steps; step += W::steps, at.advance()) {
        const uint32_t stage = ring.stages + at.stage * stage_bytes<Block>, full = ring.full + at.stage * 8;
        const int left = call.n_steps - step, bytes = left < W::steps ? left * CUDA_STEP_BYTES : tile_bytes;
        barrier_wait(ring.empty + at.stage * 8, at.parity ^ 1);
        if (ahead.n_stages > 0)
            ahead.n_stages--;
        else if (threadIdx.x == 0)
            fill_weights<Block, W>(call, ring, from, at.stage, step);
        fill_x<Block, W, passes>(call, from, step, stage);
        if constexpr (W::group > 1) { /* steps that are multiplied together, but are not there */
#pragma unroll
            for (int w = 0; w < Block::consumers; w++)
                fill_zeros(call, stage + W::weights + w * tile_bytes + bytes, tile_bytes - bytes);
        }
        copies_arrive(full);
    }
}

/* With no more passes than it takes: one that copies nothing takes its time all the same. */
template <class Block, int passes, int... more>
static __device__ __forceinline__ void fill_least(const gemm_call &call, const gemm_ring &ring, ring_position &at,
                                                  const gemm_item &item, head_start &ahead)
{
    if constexpr (sizeof...(more) > 0) {
        if (item.tokens.n_rows > passes * GATHER_ROWS) {
            fill_least<Block, more...>(call, ring, at, item, ahead);
            return;
        }
    }
    fill_item<Block, width<Block, passes * GATHER_ROWS>, passes>(call, ring, at, item, ahead);
}

template <class Block> static __device__ void produce(const gemm_call &call, const gemm_ring &ring)
{
    ring_position at;
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

template <class Block, int N>
static __device__ __forceinline__ void decode_group(uint32_t weights, uint32_t (&a)[width<Block, N>::group][16])
{
    const int thread = threadIdx.x % WARPGROUP;
#pragma unroll
    for (int s = 0; s < width<Block, N>::group; s++) {
        uint32_t step = weights + s * CUDA_STEP_BYTES;
        uint4 codes = load_shared_16(step + CUDA_STEP_SCALES + thread * 16);
        uint32_t scales = load_shared_4(step + thread / 4 * 4);
        decode_step(codes, scales, a[s]);
    }
}

template <class Block, int N>
static __device__ __forceinline__ void multiply_group(float (&d)[N / 2], uint32_t (&a)[width<Block, N>::group][16],
                                                      uint64_t b)
{
#pragma unroll
    for (int i = 0; i < width<Block, N>::group * 16; i++)
        asm volatile("" : "+r"(a[i / 16][i % 16])); /* decoded by now */
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < width<Block, N>::group * 4; i++)
        wgmma<N>(d, a[i / 4] + i % 4 * 4, b + i / 4 * (width<Block, N>::x_bytes / 16) + i % 4 * 2);
    wgmma_commit();
}

/* Until the stage is full, by whichever way its bytes came. */
static __device__ __forceinline__ void await_stage(const gemm_ring &ring, const ring_position &at)
{
    barrier_wait(ring.full + at.stage * 8, at.parity);
    async_proxy_fence();
}

/* All of K for one item. */
template <class Block, int N>
static __device__ __forceinline__ void multiply(const gemm_call &call, const gemm_ring &ring, ring_position &at,
                                                float (&d)[N / 2])
{
    using W = width<Block, N>;
    constexpr int groups = W::steps / W::group, group_bytes = W::group * CUDA_STEP_BYTES;
    const int n_stages = (call.n_steps + W::steps - 1) / W::steps;
    const uint32_t own = ring.stages + W::weights + consumer() * W::steps * CUDA_STEP_BYTES;
    uint32_t a[2][W::group][16];
#pragma unroll
    for (int i = 0; i < N / 2; i++) d[i] = 0.0f;
    at.stage = __shfl_sync(~0u, at.stage, 0); /* so that the compiler sees one address for the whole warp */
    await_stage(ring, at);
    decode_group<Block, N>(own + at.stage * stage_bytes<Block>, a[0]);
    for (int n = 0; n < n_stages; n++) {
        const uint32_t weights = own + at.stage * stage_bytes<Block>, empty = ring.empty + at.stage * 8;
        const uint64_t b = wgmma_operand(ring.stages + at.stage * stage_bytes<Block>);
#pragma unroll
        for (int i = 0; i < groups; i++) {
            multiply_group<Block, N>(d, a[i % 2], b + i * W::group * (W::x_bytes / 16));
            if (i + 1 < groups) {
                decode_group<Block, N>(weights + (i + 1) * group_bytes, a[(i + 1) % 2]);
            } else {
                at.advance();
                if (n + 1 < n_stages) {
                    await_stage(ring, at);
                    decode_group<Block, N>(own + at.stage * stage_bytes<Block>, a[0]);
                }
            }
            wgmma_wait<0>();
            if ((n * groups + i + 1) * W::group >= call.n_steps && i + 1 < groups) {
                at.advance();
                break;
            }
        }
        barrier_arrive(empty);
    }
}

/* A consumer without a tile lets all stages of an item pass. */
template <class W>
static __device__ __forceinline__ void pass(const gemm_call &call, const gemm_ring &ring, ring_position &at)
{
    for (int step = 0; step < call.n_steps; step += W::steps, at.advance()) {
        barrier_wait(ring.full + at.stage * 8, at.parity);
        barrier_arrive(ring.empty + at.stage * 8);
    }
}

template <class Block, int N, moe4_activation activation>
static __device__ __forceinline__ void consume_item(const gemm_call &call, const gemm_ring &ring, ring_position &at,
                                                    const gemm_item &item)
{
    if (consumer() >= item.n_tiles) {
        pass<width<Block, N>>(call, ring, at);
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
static __device__ __forceinline__ void consume_narrowest(const gemm_call &call, const gemm_ring &ring,
                                                         ring_position &at, const gemm_item &item)
{
    if constexpr (sizeof...(wider) > 0) {
        if (item.tokens.n_rows > N) {
            consume_narrowest<Block, activation, wider...>(call, ring, at, item);
            return;
        }
    }
    consume_item<Block, N, activation>(call, ring, at, item);
}

template <class Block, moe4_activation activation>
static __device__ void consume(const gemm_call &call, const gemm_ring &ring)
{
    const gemm_items items = items_of<Block>(call);
    ring_position at;
    for (int index = blockIdx.x; index < items.n; index += gridDim.x) {
        const gemm_item item = item_at<Block>(call, items, index);
        if (item.n_tiles <= 0) continue;
        if constexpr (Block::rows > NARROW_TOKENS)
            consume_narrowest<Block, activation, 8, 16, 32, 48, 64, 80, 96, 112, 128, 144, MAX_TOKENS>(call, ring, at,
                                                                                                       item);
        else
            consume_narrowest<Block, activation, 8, 16, 24, 32, 40, 48, 56, 64, 72, NARROW_TOKENS>(call, ring, at,
                                                                                                   item);
    }
}

template <class Block, moe4_activation activation>
__global__ void __launch_bounds__(gemm_threads<Block>, 1) gemm_kernel(const __grid_constant__ gemm_call call)
{
    extern __shared__ uint8_t shared[];
    const uint32_t stages = (shared_address(shared) + 1023) / 1024 * 1024;
    const uint32_t barriers = stages + STAGES * stage_bytes<Block>;
    const gemm_ring ring = {stages, barriers, barriers + STAGES * 8};
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) {
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
