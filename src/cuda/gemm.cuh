/* The grouped GEMMs on wgmma: out[row, :] = act or bias of x[row] . W[expert of row]^T, tiles of 64*G weight rows by up
 * to N routed rows of one expert.
 *
 * The weights are operand A, decoded into registers, the activations operand B in shared memory, so that a token tile
 * may be as narrow as 8.  A block is G consumer warpgroups, one 64-row weight tile each, and one producer warpgroup,
 * whose first thread starts the bulk copies of the packed weights while all its threads gather activation rows 16 bytes
 * at a time.  A ring of stages, each KS steps of 64 k, lies between them:
 *
 *     full[s]    its 128 producers' arrivals and the bulk copies' bytes      empty[s]    the consumers' 4*G warps
 *
 * A consumer decodes step s+1 while the tensor cores work on step s.
 *
 * Order of sums ("wgmma_k16"): every element of out is one chain of m64nNk16 instructions over ascending k, whatever N,
 * G, KS and T are, so none of them changes a bit. */
#ifndef MOE4_CUDA_GEMM_CUH
#define MOE4_CUDA_GEMM_CUH

#include "cuda/activation.cuh"
#include "cuda/decode.cuh"
#include "cuda/gemm.h"
#include "cuda/layout.h"
#include "cuda/ptx.cuh"
#include "cuda/wgmma.cuh"

enum { WARPGROUP = 128, SHARED_LIMIT = 227 * 1024 };

template <int N_, int G_, int KS_> struct gemm_shape {
    static constexpr int N = N_, G = G_, KS = KS_;
    static constexpr int threads = (G + 1) * WARPGROUP;
    static constexpr int step_x_bytes = N * CUDA_STEP_K * 2;
    static constexpr int x_bytes = KS * step_x_bytes;
    static constexpr int tile_bytes = KS * CUDA_STEP_BYTES; /* of one warpgroup's weights in a stage */
    static constexpr int stage_bytes = (x_bytes + G * tile_bytes + 1023) / 1024 * 1024;
    static constexpr int blocks = G == 1 ? 2 : 1; /* on one multiprocessor */
    static constexpr int fit = (SHARED_LIMIT / blocks - 3072) / stage_bytes;
    static constexpr int stages = fit > 12 ? 12 : fit;
    static constexpr int shared_bytes = stages * stage_bytes + 2048; /* alignment and barriers besides */
    static constexpr int producer_registers = 40;
    static constexpr int launch_registers = 65536 / threads / 8 * 8; /* a thread's, before the warpgroups trade */
    static constexpr int consumer_registers = (launch_registers * (G + 1) - producer_registers) / G / 8 * 8;
    static constexpr int lag = stages - 2; /* stages whose gathers are under way */
    static_assert(KS % 2 == 0, "fragments alternate between two buffers");
    static_assert(stages >= 3, "a ring of three at least");
};

struct ring {
    uint32_t stages, full, empty; /* shared addresses: the ring and its barriers */
};

/* Where in the ring, and which lap: parity of the full barrier to wait for. */
template <int stages> struct position {
    int stage = 0;
    uint32_t parity = 0;
    __device__ __forceinline__ void advance()
    {
        if (++stage == stages) stage = 0, parity ^= 1;
    }
};

struct gemm_item {
    token_tile tokens;
    int first_tile;
};

template <class S> static __device__ __forceinline__ gemm_item item_at(const gemm_call &call, int index)
{
    int groups = (call.n_tiles + S::G - 1) / S::G;
    return {call.token_tiles[index / groups], index % groups * S::G};
}

template <class S> static __device__ __forceinline__ int item_count(const gemm_call &call)
{
    return *call.n_token_tiles * ((call.n_tiles + S::G - 1) / S::G);
}

static __device__ __forceinline__ const uint8_t *weight_tile(const gemm_call &call, int l, int tile)
{
    tile = tile < call.n_tiles ? tile : call.n_tiles - 1; /* a warpgroup without a tile repeats the last, unseen */
    return call.weights + ((int64_t)l * call.n_tiles + tile) * call.n_steps * CUDA_STEP_BYTES;
}

/* ---- Producers -------------------------------------------------------------------------------------------------- */

/* Rows of x that a producer thread gathers a 16-byte chunk of; -1 = none. */
template <class S> struct gather {
    static constexpr int passes = S::N / 16 ? S::N / 16 : 1;
    int32_t source[passes];
};

template <class S>
static __device__ __forceinline__ void gather_rows(const gemm_call &call, const token_tile &tokens, gather<S> &g)
{
#pragma unroll
    for (int p = 0; p < gather<S>::passes; p++) {
        int row = (int)threadIdx.x / 8 + 16 * p;
        g.source[p] = -1;
        if (row < tokens.n_rows)
            g.source[p] = call.row_source ? call.row_source[tokens.first_row + row] : tokens.first_row + row;
    }
}

/* Rows of 128 bytes, their 16-byte chunks exchanged by the row's low three bits: wgmma's 128-byte swizzle. */
template <class S>
static __device__ __forceinline__ void gather_stage(const gemm_call &call, const gather<S> &g, int first_step,
                                                    uint32_t stage)
{
    const int chunk = threadIdx.x % 8, first_row = threadIdx.x / 8;
    if (S::N < 16 && first_row >= S::N) return;
#pragma unroll
    for (int s = 0; s < S::KS; s++) {
        int k = (first_step + s) * CUDA_STEP_K + chunk * 8;
#pragma unroll
        for (int p = 0; p < gather<S>::passes; p++) {
            int row = first_row + 16 * p;
            bool valid = g.source[p] >= 0 && k < call.K;
            const uint16_t *from = call.x + (valid ? (int64_t)g.source[p] * call.ldx + k : 0);
            copy16(stage + s * S::step_x_bytes + row * 128 + ((chunk ^ row % 8) << 4), from, valid ? 16 : 0);
        }
    }
}

/* Bulk copies of all warpgroups' weights of a stage; steps past the end are zeros. */
template <class S>
static __device__ __forceinline__ void load_weights(const gemm_call &call, const gemm_item &item, int first_step,
                                                    uint32_t stage, uint32_t full)
{
    int steps = call.n_steps - first_step < S::KS ? call.n_steps - first_step : S::KS;
    barrier_expect(full, S::G * steps * CUDA_STEP_BYTES);
#pragma unroll
    for (int w = 0; w < S::G; w++) {
        const uint8_t *from =
            weight_tile(call, item.tokens.l, item.first_tile + w) + (int64_t)first_step * CUDA_STEP_BYTES;
        bulk_copy(stage + S::x_bytes + w * S::tile_bytes, from, steps * CUDA_STEP_BYTES, full);
    }
}

template <class S> static __device__ __forceinline__ void zero_tail(const gemm_call &call, int first_step, uint32_t stage)
{
    int steps = call.n_steps - first_step;
    if (steps >= S::KS) return;
    for (int w = 0; w < S::G; w++)
        for (int byte = steps * CUDA_STEP_BYTES + (int)threadIdx.x * 16; byte < S::tile_bytes; byte += WARPGROUP * 16)
            asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(stage + S::x_bytes + w * S::tile_bytes + byte),
                         "r"(0)
                         : "memory");
}

template <class S> static __device__ void produce(const gemm_call &call, const ring &ring)
{
    position<S::stages> at, done;
    int under_way = 0;
    const int n_items = item_count<S>(call);
    for (int index = blockIdx.x; index < n_items; index += gridDim.x) {
        gemm_item item = item_at<S>(call, index);
        gather<S> rows;
        gather_rows<S>(call, item.tokens, rows);
        for (int step = 0; step < call.n_steps; step += S::KS, at.advance()) {
            uint32_t stage = ring.stages + at.stage * S::stage_bytes, full = ring.full + at.stage * 8;
            barrier_wait(ring.empty + at.stage * 8, at.parity ^ 1);
            if (threadIdx.x == 0) load_weights<S>(call, item, step, stage, full);
            zero_tail<S>(call, step, stage);
            gather_stage<S>(call, rows, step, stage);
            copy_commit();
            if (under_way++ < S::lag) continue;
            copy_wait<S::lag>();
            async_proxy_fence();
            barrier_arrive(ring.full + done.stage * 8);
            done.advance();
        }
    }
    copy_wait<0>();
    async_proxy_fence();
    for (; done.stage != at.stage || done.parity != at.parity; done.advance())
        barrier_arrive(ring.full + done.stage * 8);
}

/* ---- Consumers -------------------------------------------------------------------------------------------------- */

/* The low half of wgmma's description of operand B (wgmma.cuh): its address in units of 16 bytes. */
static __device__ __forceinline__ uint32_t operand_b(uint32_t address)
{
    return address >> 4 | 1 << 16;
}

static __device__ __forceinline__ void load_and_decode(uint32_t step, uint32_t (&a)[16])
{
    const int thread = threadIdx.x % WARPGROUP;
    uint4 codes = load_shared_16(step + CUDA_STEP_SCALES + thread * 16);
    uint32_t scales = load_shared_4(step + thread / 4 * 4);
    decode_step(codes, scales, a);
}

template <class S>
static __device__ __forceinline__ void multiply_step(float (&d)[S::N / 2], uint32_t (&a)[16], uint32_t b, int accumulate)
{
#pragma unroll
    for (int i = 0; i < 16; i++) asm volatile("" : "+r"(a[i]));
    wgmma_fence();
#pragma unroll
    for (int j = 0; j < 4; j++) wgmma<S::N>(d, a + 4 * j, b + 2 * j, j || accumulate);
    wgmma_commit();
}

/* All of K for one item. */
template <class S>
static __device__ __forceinline__ void multiply(const gemm_call &call, const ring &ring, position<S::stages> &at,
                                                float (&d)[S::N / 2])
{
    const int warpgroup = threadIdx.x / WARPGROUP - 1;
    const int n_stages = (call.n_steps + S::KS - 1) / S::KS;
    uint32_t a[2][16];
    barrier_wait(ring.full + at.stage * 8, at.parity);
    uint32_t stage = ring.stages + at.stage * S::stage_bytes;
    load_and_decode(stage + S::x_bytes + warpgroup * S::tile_bytes, a[0]);
    for (int n = 0; n < n_stages; n++) {
        uint32_t weights = stage + S::x_bytes + warpgroup * S::tile_bytes, empty = ring.empty + at.stage * 8;
        uint32_t b = operand_b(stage);
#pragma unroll
        for (int s = 0; s < S::KS; s++) {
            multiply_step<S>(d, a[s % 2], b + s * (S::step_x_bytes / 16), n || s);
            if (s + 1 < S::KS) {
                load_and_decode(weights + (s + 1) * CUDA_STEP_BYTES, a[(s + 1) % 2]);
            } else {
                at.advance();
                if (n + 1 < n_stages) {
                    barrier_wait(ring.full + at.stage * 8, at.parity);
                    stage = ring.stages + at.stage * S::stage_bytes;
                    load_and_decode(stage + S::x_bytes + warpgroup * S::tile_bytes, a[0]);
                }
            }
            wgmma_wait<0>();
        }
        if (threadIdx.x % 32 == 0) barrier_arrive(empty);
    }
}

static __device__ __forceinline__ uint32_t pair_of(float low, float high)
{
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

/* Gated gate/up: this thread's rows are a gate and its up.  Stores v' [row, I]. */
template <class S, moe4_activation activation>
static __device__ __forceinline__ void store_gated(const gemm_call &call, const token_tile &tokens, int tile,
                                                   const float (&d)[S::N / 2])
{
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    const float *bias = call.bias + ((int64_t)tokens.l * call.n_tiles + tile) * CUDA_TILE_ROWS + warp * 16 + lane / 4;
    const float gate_bias = bias[0], up_bias = bias[8], unit = call.unit[tokens.l];
    const activation_params params = call.params[tokens.l];
    const int i = tile * CUDA_GATED_COLUMNS + warp * 8 + lane % 4 * 2;
#pragma unroll
    for (int j = 0; j < S::N / 8; j++) {
        if (8 * j >= tokens.n_rows) break;
        float v[2];
#pragma unroll
        for (int c = 0; c < 2; c++)
            v[c] = activate<activation>(d[4 * j + c] * unit + gate_bias, d[4 * j + 2 + c] * unit + up_bias, params);
        uint32_t pair = transpose_8x8(pair_of(v[0], v[1])); /* now i and i+1 of row 8j + lane/4 */
        int row = 8 * j + lane / 4;
        if (row < tokens.n_rows) *(uint32_t *)(call.out + (int64_t)(tokens.first_row + row) * call.ldout + i) = pair;
    }
}

/* This thread's rows are neighbours.  Stores out [row, columns]. */
template <class S, moe4_activation activation>
static __device__ __forceinline__ void store_plain(const gemm_call &call, const token_tile &tokens, int tile,
                                                   const float (&d)[S::N / 2])
{
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    const float *bias = call.bias + ((int64_t)tokens.l * call.n_tiles + tile) * CUDA_TILE_ROWS + warp * 16 + lane / 4;
    const float low_bias = bias[0], high_bias = bias[8], unit = call.unit[tokens.l];
    const activation_params params = call.params[tokens.l];
    const int column = tile * CUDA_TILE_ROWS + warp * 16 + lane / 4 * 2;
    if (column >= call.columns) return;
#pragma unroll
    for (int j = 0; j < S::N / 8; j++) {
#pragma unroll
        for (int c = 0; c < 2; c++) {
            int row = 8 * j + lane % 4 * 2 + c;
            if (row >= tokens.n_rows) continue;
            uint32_t pair = pair_of(activate<activation>(0.0f, d[4 * j + c] * unit + low_bias, params),
                                    activate<activation>(0.0f, d[4 * j + 2 + c] * unit + high_bias, params));
            *(uint32_t *)(call.out + (int64_t)(tokens.first_row + row) * call.ldout + column) = pair;
        }
    }
}

template <class S, moe4_activation activation>
static __device__ void consume(const gemm_call &call, const ring &ring)
{
    const int warpgroup = threadIdx.x / WARPGROUP - 1;
    const int n_items = item_count<S>(call);
    position<S::stages> at;
    for (int index = blockIdx.x; index < n_items; index += gridDim.x) {
        gemm_item item = item_at<S>(call, index);
        float d[S::N / 2];
        multiply<S>(call, ring, at, d);
        int tile = item.first_tile + warpgroup;
        if (tile >= call.n_tiles) continue;
        if constexpr (activation == MOE4_ACTIVATION_IDENTITY || activation == MOE4_ACTIVATION_RELU2)
            store_plain<S, activation>(call, item.tokens, tile, d);
        else
            store_gated<S, activation>(call, item.tokens, tile, d);
    }
}

template <class S, moe4_activation activation>
__global__ void __launch_bounds__(S::threads, S::blocks) gemm_kernel(const __grid_constant__ gemm_call call)
{
    extern __shared__ uint8_t shared[];
    uint32_t base = (shared_address(shared) + 1023) / 1024 * 1024;
    ring ring = {base, base + S::stages * S::stage_bytes, base + S::stages * S::stage_bytes + S::stages * 8};
    if (threadIdx.x == 0) {
        for (int s = 0; s < S::stages; s++) {
            barrier_init(ring.full + s * 8, WARPGROUP);
            barrier_init(ring.empty + s * 8, 4 * S::G);
        }
        barrier_init_fence();
    }
    __syncthreads();
    if (threadIdx.x < WARPGROUP) {
        if constexpr (S::G > 1) registers_lower<S::producer_registers>();
        produce<S>(call, ring);
    } else {
        if constexpr (S::G > 1) registers_raise<S::consumer_registers>();
        consume<S, activation>(call, ring);
    }
}

#endif
