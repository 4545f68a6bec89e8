/* The fp8 GEMMs for some 18 to 64 rows an expert: fp8_stream.cuh's products and epilogues with rows that come through
 * the ring, as in fp8.cuh, but for four consumer warpgroups, whose four tiles are the 128 columns of the intermediate
 * that share a scale.  The producers' warps 2 and 3 quantise them, as there.
 *
 *   producers    warp 0 copies the weights of a stage, two blocks of 128 k, warp 1 its rows, warps 2 and 3, in down,
 *                the rows' scales
 *   full[s]      arrivals of these, and the bytes of the copies
 *   consumers    decode a block while the tensor cores work on the one before, then promote its sums
 *   empty[s]     arrivals of all consumers' threads
 *
 * Sums are those of fp8.cuh to the bit. */
#ifndef MOE4_CUDA_FP8_NARROW_CUH
#define MOE4_CUDA_FP8_NARROW_CUH

#include "cuda/fp8_epilogue.cuh"
#include "cuda/fp8_intermediate.cuh"
#include "cuda/fp8_stream.cuh"

namespace fp8_narrow
{

using fp8_stream::decode_block;
using fp8_stream::load_block;
using fp8_stream::multiply_block;
using fp8_stream::promote_block;

enum : int {
    G = STREAM_TEAMS, /* consumer warpgroups, a tile each */
    CONSUMERS = G * TEAM,
    THREADS = CONSUMERS + 128,
    CONSUMER_REGISTERS = 112, /* of what 96 a thread leave when producers give some back */
    PRODUCER_REGISTERS = 32,
    STAGE_STEPS = 4,
    STAGE_BLOCKS = STAGE_STEPS / 2,
    TILE_BYTES = STAGE_STEPS * CUDA_STEP_BYTES, /* of a stage */
    X_BYTES = STAGE_BLOCKS * FP8_NARROW_ROWS * FP8_BLOCK,
    STAGE_BYTES = (X_BYTES + G * TILE_BYTES + STAGE_BLOCKS * FP8_NARROW_ROWS * 4 + 1023) / 1024 * 1024,
    STAGES = 3,
    V_BYTES = FP8_NARROW_ROWS * fp8::V_PITCH, /* of 128 columns: two of these where no gates halve them */
    SHARED_BYTES = STAGES * STAGE_BYTES + 2 * V_BYTES + 1024,
    TWO_SETS = 40 /* rows up to which there are registers for the weights of two blocks without moving them about */
};

/* Widths of token tiles are whole ones of these. */
template <moe4_activation activation, bool is_down>
constexpr int width_step = is_down || is_common<activation> ? 8 : 40;

/* ---- The ring --------------------------------------------------------------------------------------------------- */

/* A stage: [blocks][width][128 bytes] of rows, each warpgroup's packed weights, [blocks][width] scales. */
struct ring {
    uint32_t stages, barriers; /* shared addresses; full and empty of each stage */
    int stage, parity;

    __device__ __forceinline__ void advance()
    {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
    __device__ __forceinline__ uint32_t full() const
    {
        return barriers + stage * 16;
    }
    __device__ __forceinline__ uint32_t empty() const
    {
        return barriers + stage * 16 + 8;
    }
    __device__ __forceinline__ uint32_t x() const
    {
        return stages + stage * STAGE_BYTES;
    }
    __device__ __forceinline__ uint32_t weights() const
    {
        return x() + X_BYTES;
    }
    __device__ __forceinline__ uint32_t scales() const
    {
        return weights() + G * TILE_BYTES;
    }
    __device__ __forceinline__ uint32_t v() const
    {
        return stages + STAGES * STAGE_BYTES;
    }
    __device__ __forceinline__ uint32_t v_full() const
    {
        return barriers + STAGES * 16;
    }
    __device__ __forceinline__ uint32_t v_empty() const
    {
        return v_full() + 8;
    }
};

/* Weight tiles of one token tile, one a consumer. */
struct item_list {
    int groups, n, index;

    __device__ __forceinline__ explicit item_list(const gemm_call &call)
        : groups((call.n_tiles + G - 1) / G), n(*call.n_token_tiles * groups), index((int)blockIdx.x)
    {
    }
    __device__ __forceinline__ bool is_over() const
    {
        return index >= n;
    }
    __device__ __forceinline__ void advance()
    {
        index += (int)gridDim.x;
    }
    __device__ __forceinline__ token_tile tokens(const gemm_call &call) const
    {
        return call.token_tiles[index / groups];
    }
    __device__ __forceinline__ int first_tile() const
    {
        return index % groups * G;
    }
};

/* ---- Producers -------------------------------------------------------------------------------------------------- */

static __device__ __forceinline__ void fill_weights(const gemm_call &call, ring at)
{
    for (item_list items(call); !items.is_over(); items.advance()) {
        const int64_t tile = (int64_t)items.tokens(call).l * call.n_tiles + items.first_tile();
        const int n_tiles = min(call.n_tiles - items.first_tile(), (int)G), pitch = call.n_steps * CUDA_STEP_BYTES;
        const uint8_t *from = call.weights + tile * pitch;
        for (int left = pitch; left > 0; left -= TILE_BYTES, from += TILE_BYTES, at.advance()) {
            const int bytes = min(left, (int)TILE_BYTES);
            barrier_wait(at.empty(), at.parity ^ 1);
            barrier_arrive_expect(at.full(), n_tiles * bytes);
#pragma unroll
            for (int w = 0; w < G; w++)
                if (w < n_tiles) bulk_copy(at.weights() + w * TILE_BYTES, from + w * pitch, bytes, at.full());
        }
    }
}

template <int step> static __device__ __forceinline__ void fill_rows(const fp8_stream_call &call, ring at)
{
    const gemm_call &gemm = call.stream.gemm;
    const int64_t block_bytes = call.x.rows * FP8_BLOCK;
    for (item_list items(gemm); !items.is_over(); items.advance()) {
        const token_tile tokens = items.tokens(gemm);
        const int bytes = tokens.n_rows * FP8_BLOCK, width = (tokens.n_rows + step - 1) / step * step;
        const uint8_t *from = call.x.codes + (int64_t)tokens.first_row * FP8_BLOCK;
        for (int left = (gemm.n_steps + 1) / 2; left > 0; left -= STAGE_BLOCKS, at.advance()) {
            barrier_wait(at.empty(), at.parity ^ 1);
            barrier_arrive_expect(at.full(), min(left, (int)STAGE_BLOCKS) * bytes);
#pragma unroll
            for (int b = 0; b < STAGE_BLOCKS; b++, from += block_bytes)
                if (b < left) bulk_copy(at.x() + b * width * FP8_BLOCK, from, bytes, at.full());
        }
    }
}

static __device__ __forceinline__ void fill_scales(const fp8_stream_call &call, ring at)
{
    const gemm_call &gemm = call.stream.gemm;
    const int thread = threadIdx.x % fp8::ROLE_THREADS;
    for (item_list items(gemm); !items.is_over(); items.advance()) {
        const token_tile tokens = items.tokens(gemm);
        const int width = fp8_stream::width_of(tokens);
        const float *from = call.x.scales + tokens.first_row;
        for (int left = (gemm.n_steps + 1) / 2; left > 0; left -= STAGE_BLOCKS, at.advance()) {
            barrier_wait(at.empty(), at.parity ^ 1);
#pragma unroll
            for (int b = 0; b < STAGE_BLOCKS; b++, from += call.x.rows)
                for (int row = thread; b < left && row < tokens.n_rows; row += fp8::ROLE_THREADS)
                    copy4(at.scales() + (b * width + row) * 4, from + row);
            copies_arrive(at.full());
        }
    }
    copy_wait_all(); /* shared memory must outlive the copies */
}

/* ---- Quantisers ------------------------------------------------------------------------------------------------- */

template <moe4_activation activation>
static __device__ __forceinline__ void quantise(const fp8_stream_call &call, const ring &at)
{
    constexpr int n_groups = fp8::is_gated<activation> ? 1 : 2;
    int parity = 0;
    for (item_list items(call.stream.gemm); !items.is_over(); items.advance(), parity ^= 1) {
        const token_tile tokens = items.tokens(call.stream.gemm);
        const int first = items.first_tile() / G * n_groups;
        barrier_wait(at.v_full(), parity);
        for (int i = 0; i < n_groups; i++)
            fp8::quantise_group(call.v, call.stream.gemm.columns, at.v() + i * V_BYTES, tokens, first + i);
        barrier_arrive(at.v_empty());
    }
}

/* ---- Consumers -------------------------------------------------------------------------------------------------- */

/* All of K for one tile.  `on_first`: what can be done once x is there. */
template <int N, bool is_down, class Action>
static __device__ __forceinline__ void multiply(const gemm_call &call, ring &at, const fp8_magnitudes &of, int consumer,
                                                float (&total)[N / 2], const Action &on_first)
{
    static_assert(STAGE_BLOCKS == 2, "two sets of registers");
    constexpr uint32_t second = N * FP8_BLOCK / 16;
    const uint32_t own = consumer * TILE_BYTES, columns = threadIdx.x % 4 * 8;
    uint32_t a[2][16];
    float d[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; i++) d[i] = total[i] = 0.0f;
#pragma unroll
    for (uint32_t &each : a[1]) each = 0;
    at.stage = __shfl_sync(~0u, at.stage, 0); /* so that the compiler sees one address for the whole warp */
    barrier_wait(at.full(), at.parity);
    on_first();
    decode_block(at.weights() + own, call.n_steps, of, a[0]);
    for (int left = call.n_steps;;) {
        const uint32_t x = at.x() >> 4 | 1 << 16, scales = at.scales() + columns, empty = at.empty();
        multiply_block<N>(d, a[0], x);
        if (left > 2) decode_block(at.weights() + own + 2 * CUDA_STEP_BYTES, left - 2, of, a[1]);
        promote_block<N, is_down>(total, d, scales);
        at.advance();
        if ((left -= 2) <= 0) {
            barrier_arrive(empty);
            return;
        }
        multiply_block<N>(d, a[1], x + second);
        if (left > 2) {
            barrier_wait(at.full(), at.parity);
            decode_block(at.weights() + own, left - 2, of, a[0]);
        }
        promote_block<N, is_down>(total, d, scales + N * 4);
        barrier_arrive(empty);
        if ((left -= 2) <= 0) return;
    }
}

/* The same where registers hold but one block's weights: the next ones are loaded ahead and decoded when products are
 * over, while those of other warps run. */
template <int N, bool is_down, class Action>
static __device__ __forceinline__ void multiply_alone(const gemm_call &call, ring &at, const fp8_magnitudes &of,
                                                      int consumer, float (&total)[N / 2], const Action &on_first)
{
    const uint32_t own = consumer * TILE_BYTES, columns = threadIdx.x % 4 * 8;
    uint32_t a[16];
    float d[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; i++) d[i] = total[i] = 0.0f;
    at.stage = __shfl_sync(~0u, at.stage, 0);
    barrier_wait(at.full(), at.parity);
    on_first();
    decode_block(at.weights() + own, call.n_steps, of, a);
    for (int left = call.n_steps;;) {
        const uint32_t x = at.x() >> 4 | 1 << 16, scales = at.scales() + columns, empty = at.empty();
        fp8_stream::packed_block packed = {};
        multiply_block<N>(d, a, x);
        if (left > 2) packed = load_block(at.weights() + own + 2 * CUDA_STEP_BYTES, left - 2);
        promote_block<N, is_down>(total, d, scales);
        at.advance();
        if ((left -= 2) <= 0) {
            barrier_arrive(empty);
            return;
        }
        decode_block(packed, of, a);
        multiply_block<N>(d, a, x + N * FP8_BLOCK / 16);
        if (left > 2) {
            barrier_wait(at.full(), at.parity);
            packed = load_block(at.weights() + own, left - 2);
        }
        promote_block<N, is_down>(total, d, scales + N * 4);
        barrier_arrive(empty);
        if ((left -= 2) <= 0) return;
        decode_block(packed, of, a);
    }
}

/* A consumer without a tile lets all stages of an item pass. */
static __device__ __forceinline__ void pass(const gemm_call &call, ring &at)
{
    for (int left = call.n_steps; left > 0; left -= STAGE_STEPS, at.advance()) {
        barrier_wait(at.full(), at.parity);
        barrier_arrive(at.empty());
    }
}

/* x's scales, a copy a consumer: one half while the other is still read. */
typedef float x_scale_store[2][G][FP8_NARROW_ROWS];

template <int N, moe4_activation activation, bool is_down>
static __device__ __forceinline__ void consume_item(const fp8_stream_call &call, ring &at, const token_tile &tokens,
                                                    int first_tile, x_scale_store &store, int half)
{
    const gemm_call &gemm = call.stream.gemm;
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), consumer = warp / 4, thread = threadIdx.x % TEAM;
    const int tile = first_tile + consumer, seen = min(tile, gemm.n_tiles - 1);
    const int base = call.tile_base[(int64_t)tokens.l * gemm.n_tiles + seen];
    float *x_scales = store[half][consumer];
    float total[N / 2] = {};
    const auto on_first = [&] {
        if (!is_down && thread < tokens.n_rows)
            copy4(shared_address(x_scales + thread), call.x.scales + tokens.first_row + thread);
    };
    if (tile != seen)
        pass(gemm, at);
    else if constexpr (N <= TWO_SETS)
        multiply<N, is_down>(gemm, at, fp8_magnitudes_of(base), consumer, total, on_first);
    else
        multiply_alone<N, is_down>(gemm, at, fp8_magnitudes_of(base), consumer, total, on_first);
    row_pair rows = rows_of_thread(gemm, tokens.l, {seen, warp % 4});
    rows.unit *= fp8_tile_unit(base);
    if (is_down) {
        if (tile == seen) store_sums<N, activation>(gemm, tokens, {tile, warp % 4}, rows, total);
    } else {
        constexpr int tiles = fp8::is_gated<activation> ? 4 : 2; /* of 128 columns */
        copy_wait_all();
        barrier_sync<TEAM>(3 + consumer);
        barrier_wait(at.v_empty(), half ^ 1);
        if (tile == seen)
            fp8::store_v<N, activation>(rows, at.v() + consumer / tiles * V_BYTES, shared_address(x_scales),
                                        consumer % tiles, total);
        barrier_arrive(at.v_full());
    }
}

/* The width of the item's tokens. */
template <int N, moe4_activation activation, bool is_down>
static __device__ __forceinline__ void consume_width(const fp8_stream_call &call, ring &at, const token_tile &tokens,
                                                     int first_tile, x_scale_store &store, int half)
{
    if constexpr (N < FP8_NARROW_ROWS) {
        if (tokens.n_rows > N) {
            consume_width<N + width_step<activation, is_down>, activation, is_down>(call, at, tokens, first_tile, store,
                                                                                    half);
            return;
        }
    }
    consume_item<N, activation, is_down>(call, at, tokens, first_tile, store, half);
}

template <moe4_activation activation, bool is_down>
__global__ void __launch_bounds__(THREADS, 1) kernel(const __grid_constant__ fp8_stream_call call)
{
    extern __shared__ uint8_t shared[];
    __shared__ uint64_t barriers[2 * STAGES + 2];
    __shared__ __align__(16) x_scale_store store;
    const gemm_call &gemm = call.stream.gemm;
    const ring at = {(shared_address(shared) + 1023) / 1024 * 1024, shared_address(barriers), 0, 0};
    if (threadIdx.x < STAGES) {
        barrier_init(at.barriers + threadIdx.x * 16, is_down ? 2 + fp8::ROLE_THREADS : 2);
        barrier_init(at.barriers + threadIdx.x * 16 + 8, CONSUMERS);
        if (threadIdx.x == 0) {
            barrier_init(at.v_full(), CONSUMERS);
            barrier_init(at.v_empty(), fp8::ROLE_THREADS);
        }
        barrier_init_fence();
    }
    if (!gemm.tiles_are_old) wait_for_predecessors();
    launch_dependents();
    __syncthreads();
    if (threadIdx.x >= CONSUMERS) {
        const int thread = threadIdx.x - CONSUMERS;
        registers_lower<PRODUCER_REGISTERS>();
        if (thread == 0) fill_weights(gemm, at); /* which are no work of the predecessor's */
        if (thread == 32) {
            wait_for_predecessors();
            fill_rows<width_step<activation, is_down>>(call, at);
        }
        if (thread >= 128 - fp8::ROLE_THREADS) {
            if (!is_down) {
                quantise<activation>(call, at);
            } else {
                wait_for_predecessors();
                fill_scales(call, at);
            }
        }
    } else {
        registers_raise<CONSUMER_REGISTERS>();
        ring own = at;
        int half = 0;
        for (item_list items(gemm); !items.is_over(); items.advance(), half ^= 1)
            consume_width<width_step<activation, is_down>, activation, is_down>(call, own, items.tokens(gemm),
                                                                                items.first_tile(), store, half);
    }
}

} // namespace fp8_narrow

#endif
