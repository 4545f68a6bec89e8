/* The grouped GEMMs of fp8 compute on wgmma m64nNk32: weights e5m2 from registers, activations e4m3 in shared memory.
 *
 * A block is one producer warpgroup and two consumer warpgroups of one 64-row weight tile each; both share a token tile
 * of up to FP8_MAX_ROWS routed rows of one expert.  Rows and weights lie in memory as the ring wants them, so that bulk
 * copies move them:
 *
 *   producers    warp 0 copies the weights of a stage (a few blocks of 128 k), warp 1 its rows, warps 2 and 3, in down,
 *                the rows' scales
 *   full[s]      arrivals of these, and the bytes of the copies
 *   consumers    decode the next stage while the tensor cores work on this one, then promote its sums
 *   empty[s]     arrivals of all consumers' threads
 *
 * gate/up yields 128 columns of the intermediate an item, which share a scale: consumers leave them in shared memory as
 * bf16, and the producers' warps 2 and 3 quantise them while the next item is under way.
 *
 * Order of sums ("wgmma_fp8_k32"): the tensor core adds up a block of 128 k, four instructions from zero, and the
 * blocks are added in ascending order in fp32, those of the intermediate times their scales by fma.  Nothing else has a
 * say, so tile, T and position change no bit. */
#ifndef MOE4_CUDA_FP8_CUH
#define MOE4_CUDA_FP8_CUH

#include "cuda/activation.cuh"
#include "cuda/fp8_decode.cuh"
#include "cuda/fp8_producers.cuh"
#include "cuda/fp8_ring.cuh"
#include "cuda/wgmma_fp8.cuh"

namespace fp8
{

/* ---- Consumers --------------------------------------------------------------------------------------------------- */

/* Number of the consumer warpgroup, as one value for the whole warp. */
static __device__ __forceinline__ int consumer(void)
{
    return __shfl_sync(~0u, threadIdx.x / WARPGROUP - 1, 0);
}

/* Where the thread's parts of its warpgroup's first step lie in stage 0. */
struct packed_place {
    uint32_t codes, scales;
};

/* Steps `first` to `end` of what a thread decodes of a group of blocks. */
template <int first, int end> struct packed_steps {
    uint4 codes[end - first];
    uint32_t scales[end - first];
};

template <int first, int end>
static __device__ __forceinline__ packed_steps<first, end> load_steps(const packed_place &at, uint32_t offset)
{
    packed_steps<first, end> packed;
#pragma unroll
    for (int s = first; s < end; s++) {
        packed.codes[s - first] = load_shared_16(at.codes + offset + s * CUDA_STEP_BYTES);
        packed.scales[s - first] = load_shared_4(at.scales + offset + s * CUDA_STEP_BYTES);
    }
    return packed;
}

template <int first, int end>
static __device__ __forceinline__ void decode_steps(const packed_steps<first, end> &packed, const fp8_magnitudes &of,
                                                    uint32_t *a)
{
#pragma unroll
    for (int s = first; s < end; s++) fp8_decode_step(packed.codes[s - first], packed.scales[s - first], of, a + s * 8);
}

/* `b`: address of the group's rows, over 16, with wgmma's leading dimension above. */
template <int N>
static __device__ __forceinline__ void multiply_group(float (&d)[width<N>::blocks][N / 2],
                                                      uint32_t (&a)[width<N>::blocks * 16], uint32_t b)
{
#pragma unroll
    for (int i = 0; i < width<N>::blocks * 16; i++) asm volatile("" : "+r"(a[i])); /* decoded by now */
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < width<N>::blocks; i++) {
        const uint32_t block = b + i * (width<N>::x_bytes / 16);
        wgmma_fp8<N, false>::run(d[i], a + i * 16, block);
        wgmma_fp8<N, true>::run(d[i], a + i * 16 + 4, block + 2);
        wgmma_fp8<N, true>::run(d[i], a + i * 16 + 8, block + 4);
        wgmma_fp8<N, true>::run(d[i], a + i * 16 + 12, block + 6);
    }
    wgmma_commit();
}

/* Blocks' sums to fp32, in ascending k; `scales`: of the thread's columns 0 and 1. */
template <kind k, int N>
static __device__ __forceinline__ void promote(float (&total)[N / 2], const float (&d)[width<N>::blocks][N / 2],
                                               const float2 *scales, int n_blocks)
{
#pragma unroll
    for (int b = 0; b < width<N>::blocks; b++) {
        if (b > 0 && b >= n_blocks) break; /* the group held less, and what came of the rest is of no account */
#pragma unroll
        for (int j = 0; j < N / 8; j++) {
            if (k == GATE_UP) {
#pragma unroll
                for (int i = 4 * j; i < 4 * j + 4; i++) total[i] += d[b][i];
            } else {
                const float2 s = scales[(b * width<N>::rows + 8 * j) / 2];
                total[4 * j] = fmaf(d[b][4 * j], s.x, total[4 * j]);
                total[4 * j + 1] = fmaf(d[b][4 * j + 1], s.y, total[4 * j + 1]);
                total[4 * j + 2] = fmaf(d[b][4 * j + 2], s.x, total[4 * j + 2]);
                total[4 * j + 3] = fmaf(d[b][4 * j + 3], s.y, total[4 * j + 3]);
            }
        }
    }
}

/* Until the stage is full.  What wgmma reads of it came by bulk copies, so that no fence between proxies is needed; one
 * would wait for the epilogue's stores, too. */
template <kind k> static __device__ __forceinline__ void await_stage(const gemm_ring &ring, const ring_position<k> &at)
{
    barrier_wait(ring.full + at.stage * 8, at.parity);
}

/* A value that a warp has in common, in a register of each lane's: the compiler would keep it in a uniform one, and an
 * instruction that adds such a register has no room for a constant factor. */
static __device__ __forceinline__ uint32_t value_of_lane(uint32_t value)
{
    return __shfl_sync(~0u, value, threadIdx.x % 32);
}

/* What a pass's stages have in common. */
struct operands {
    gemm_ring ring;
    packed_place packed;
    fp8_magnitudes magnitudes;
};

/* Multiplies group g of a stage by what is decoded.  Half of the next group is decoded while the tensor cores work, the
 * other half among the additions that promote the sums, since decoding and they take different pipes.  `left`: blocks
 * from this group on. */
template <kind k, int N, int g>
static __device__ __forceinline__ void
multiply_next(const operands &of, ring_position<k> &at, int left, uint32_t (&a)[width<N>::blocks * 16],
              uint32_t (&next)[width<N>::blocks * 16], float (&d)[width<N>::blocks][N / 2], float (&total)[N / 2])
{
    using W = width<N>;
    constexpr bool ends_stage = g == W::groups - 1;
    constexpr int steps = W::blocks * BLOCK_STEPS, early = steps / 2;
    const uint32_t stage = of.ring.stages + at.stage * STAGE_BYTES, empty = of.ring.empty + at.stage * 8;
    const bool is_last = left <= W::blocks;
    ring_position<k> next_stage = at;
    if (ends_stage || is_last) next_stage.advance();
    const uint32_t weights =
        is_last || !ends_stage ? at.stage : next_stage.stage; /* the last group's are decoded in vain */
    const uint32_t offset = weights * STAGE_BYTES + (ends_stage ? 0 : (g + 1) * W::blocks * BLOCK_BYTES_W);
    multiply_group<N>(d, a, (stage + g * W::blocks * W::x_bytes) >> 4 | 1 << 16);
    if (!is_last) {
        if (ends_stage) await_stage(of.ring, next_stage);
        decode_steps(load_steps<0, early>(of.packed, offset), of.magnitudes, next);
    }
    wgmma_wait<0>();
    const packed_steps<early, steps> late = load_steps<early, steps>(of.packed, offset);
    const uint32_t scales = stage + W::scales + g * W::blocks * W::rows * 4;
    promote<k, N>(total, d, shared_pairs(scales + threadIdx.x % 4 * 8), left);
    decode_steps(late, of.magnitudes, next);
    if (ends_stage || is_last) barrier_arrive(empty);
    at = next_stage;
}

/* gate/up: the item's scales of x, on their way to shared memory, a copy a warpgroup. */
static __device__ __forceinline__ void fetch_x_scales(const fp8_call &call, const token_tile &tokens, uint32_t to)
{
    for (int row = threadIdx.x % WARPGROUP; row < tokens.n_rows; row += WARPGROUP)
        copy4(to + row * 4, call.x.scales + tokens.first_row + row);
}

/* All of K for one pass; `on_first`: what can be done once x is there. */
template <kind k, int N, class Action>
static __device__ __forceinline__ void multiply(const fp8_call &call, const operands &of, ring_position<k> &at,
                                                float (&total)[N / 2], const Action &on_first)
{
    using W = width<N>;
    uint32_t a[2][W::blocks * 16];
    float d[W::blocks][N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; i++) {
        total[i] = 0.0f;
#pragma unroll
        for (int b = 0; b < W::blocks; b++) d[b][i] = 0.0f;
    }
    at.stage = __shfl_sync(~0u, at.stage, 0); /* so that the compiler sees one address for the whole warp */
    await_stage(of.ring, at);
    on_first();
    decode_steps(load_steps<0, W::blocks * BLOCK_STEPS>(of.packed, at.stage * STAGE_BYTES), of.magnitudes, a[0]);
    int left = block_count(call);
    for (;;) {
        multiply_next<k, N, 0>(of, at, left, a[0], a[1], d, total);
        if ((left -= W::blocks) <= 0) break;
        multiply_next<k, N, 1 % W::groups>(of, at, left, a[1], a[0], d, total);
        if ((left -= W::blocks) <= 0) break;
    }
}

/* What an epilogue needs of a thread's two rows, g and g+8 of its warp's 16. */
struct row_pair {
    float bias[2], unit;
    activation_params params;
};

static __device__ __forceinline__ row_pair rows_of_thread(const fp8_call &call, int l, int tile)
{
    const int64_t index = (int64_t)l * call.n_tiles + tile;
    const float *bias = call.bias + index * CUDA_TILE_ROWS + threadIdx.x % WARPGROUP / 32 * 16 + threadIdx.x % 32 / 4;
    return {{bias[0], bias[8]}, call.unit[l] * fp8_tile_unit(call.tile_base[index]), call.params[l]};
}

static __device__ __forceinline__ uint32_t bf16_pair(float low, float high)
{
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

/* gate/up: v' to shared memory, [row][128 columns] bf16.  `slot`: which of the item's tiles this is.  Rows that are not
 * there are computed like the others, since branches would keep the compiler from doing several at a time. */
template <int N, moe4_activation activation>
static __device__ __forceinline__ void store_v(const fp8_call &call, uint32_t v, uint32_t x_scales,
                                               const token_tile &tokens, int tile, int slot,
                                               const float (&total)[N / 2])
{
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    const row_pair rows = rows_of_thread(call, tokens.l, tile);
    const int column = is_gated<activation> ? slot * CUDA_GATED_COLUMNS + warp * 8 + lane / 4
                                            : slot * CUDA_TILE_ROWS + warp * 16 + lane / 4 * 2;
    const uint32_t to = v + lane % 4 * 2 * V_PITCH + column * 2;
    const int n_rows = tokens.n_rows - lane % 4 * 2; /* from the thread's first on */
    constexpr int at_once = N % 16 ? 1 : 2;
#pragma unroll
    for (int j = 0; j < N / 8; j += at_once) {
        uint32_t values[at_once][2];
#pragma unroll
        for (int i = 0; i < at_once; i++) {
            const uint2 scales = load_shared_8(x_scales + (8 * (j + i) + lane % 4 * 2) * 4);
#pragma unroll
            for (int c = 0; c < 2; c++) {
                const float scale = __uint_as_float(c ? scales.y : scales.x);
                const float low = total[4 * (j + i) + c] * rows.unit * scale + rows.bias[0];
                const float high = total[4 * (j + i) + 2 + c] * rows.unit * scale + rows.bias[1];
                values[i][c] = is_gated<activation> ? bf16_pair(activate<activation>(low, high, rows.params), 0.0f)
                                                    : bf16_pair(activate<activation>(0.0f, low, rows.params),
                                                                activate<activation>(0.0f, high, rows.params));
            }
        }
#pragma unroll
        for (int i = 0; i < at_once; i++)
#pragma unroll
            for (int c = 0; c < 2; c++) {
                const int row = 8 * (j + i) + c;
                if (is_gated<activation>)
                    store_shared_2_if(row < n_rows, to + row * V_PITCH, (uint16_t)values[i][c]);
                else
                    store_shared_4_if(row < n_rows, to + row * V_PITCH, values[i][c]);
            }
    }
}

/* down: z' to memory. */
template <int N>
static __device__ __forceinline__ void store_z(const fp8_call &call, const token_tile &tokens, int tile,
                                               const float (&total)[N / 2])
{
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    const row_pair rows = rows_of_thread(call, tokens.l, tile);
    const int column = tile * CUDA_TILE_ROWS + warp * 16 + lane / 4 * 2;
    if (column >= call.columns) return;
    uint16_t *out = call.out + (int64_t)(tokens.first_row + lane % 4 * 2) * call.ldout + column;
#pragma unroll
    for (int j = 0; j < N / 8; j++, out += 8 * call.ldout)
#pragma unroll
        for (int c = 0; c < 2; c++)
            if (8 * j + lane % 4 * 2 + c < tokens.n_rows)
                *(uint32_t *)(out + c * call.ldout) = bf16_pair(total[4 * j + c] * rows.unit + rows.bias[0],
                                                                total[4 * j + 2 + c] * rows.unit + rows.bias[1]);
}

/* What the epilogue and the next item's start will read, while there is time.  Not x's scales: the kernel that writes
 * them may still run. */
template <kind k>
static __device__ __forceinline__ void prefetch_pass(const fp8_call &call, const token_tile &tokens, int tile)
{
    const int thread = threadIdx.x % WARPGROUP;
    const int64_t index = (int64_t)tokens.l * call.n_tiles + tile;
    if (thread < 2) prefetch(call.bias + index * CUDA_TILE_ROWS + thread * 32);
    if (thread == 2) prefetch(call.unit + tokens.l);
    if (thread == 3) prefetch(call.params + tokens.l);
}

template <kind k, moe4_activation activation, int N>
static __device__ __forceinline__ void consume_item(const fp8_call &call, const gemm_ring &ring, ring_position<k> &at,
                                                    const gemm_item &item, uint32_t v_parity)
{
    constexpr int n_passes = passes<k, activation>;
    const int warpgroup = consumer(), thread = threadIdx.x % WARPGROUP;
    const uint32_t x_scales = ring.x_scales + (warpgroup * 2 + v_parity) * X_SCALE_BYTES;
    for (int pass = 0; pass < n_passes; pass++) {
        if (!has_pass<n_passes>(call, item, pass)) break;
        const int slot = pass * G + warpgroup, tile = item.group * n_passes * G + slot,
                  seen = tile < call.n_tiles ? tile : call.n_tiles - 1;
        const uint32_t weights = ring.stages + width<N>::weights + warpgroup * width<N>::tile_bytes;
        const operands of = {
            ring,
            {weights + CUDA_STEP_SCALES + thread * 16, weights + thread / 4 * 4},
            fp8_magnitudes_of(value_of_lane(call.tile_base[(int64_t)item.tokens.l * call.n_tiles + seen]))};
        float total[N / 2];
        prefetch_pass<k>(call, item.tokens, seen);
        multiply<k, N>(call, of, at, total, [&] {
            if (k == GATE_UP && pass == 0) fetch_x_scales(call, item.tokens, x_scales);
        });
        if (k == GATE_UP && pass == 0) {
            copy_wait_all();
            barrier_sync<WARPGROUP>(2 + warpgroup);
            barrier_wait(ring.v_empty, v_parity ^ 1);
        }
        if (tile == seen) {
            if constexpr (k == GATE_UP)
                store_v<N, activation>(call, ring.v, x_scales, item.tokens, tile, slot, total);
            else
                store_z<N>(call, item.tokens, tile, total);
        }
    }
    if (k == GATE_UP) barrier_arrive(ring.v_full);
}

/* The narrowest width that holds the item's tokens. */
template <kind k, moe4_activation activation, int N, int... wider>
static __device__ __forceinline__ void consume_narrowest(const fp8_call &call, const gemm_ring &ring,
                                                         ring_position<k> &at, const gemm_item &item, uint32_t v_parity)
{
    if constexpr (sizeof...(wider) > 0) {
        if (item.tokens.n_rows > N) {
            consume_narrowest<k, activation, wider...>(call, ring, at, item, v_parity);
            return;
        }
    }
    consume_item<k, activation, N>(call, ring, at, item, v_parity);
}

template <kind k, moe4_activation activation>
static __device__ __forceinline__ void consume(const fp8_call &call, const gemm_ring &ring)
{
    constexpr int n_passes = passes<k, activation>;
    item_list<n_passes> items(call);
    gemm_item next = items.load(call);
    ring_position<k> at;
    for (uint32_t v_parity = 0; !items.is_over(); v_parity ^= 1) {
        const gemm_item item = next;
        items.advance();
        next = items.load(call);
        if constexpr (activation == MOE4_ACTIVATION_SWIGLU_OAI || activation == MOE4_ACTIVATION_SITU || k == DOWN)
            consume_narrowest<k, activation, 8, 16, 32, 48, 64, 80, 96, 112, 128, FP8_MAX_ROWS>(call, ring, at, item,
                                                                                                v_parity);
        else /* rare: fewer kernels to compile */
            consume_narrowest<k, activation, 16, NARROW, MIDDLE, FP8_MAX_ROWS>(call, ring, at, item, v_parity);
        const int tile = min(next.group * n_passes * G, call.n_tiles - 1);
        prefetch(call.tile_base + (int64_t)next.tokens.l * call.n_tiles + tile);
    }
}

template <kind k, moe4_activation activation>
__global__ void __launch_bounds__(THREADS, 1) kernel(const __grid_constant__ fp8_call call)
{
    using size = ring_size<k>;
    extern __shared__ uint8_t shared[];
    const uint32_t stages = (shared_address(shared) + 1023) / 1024 * 1024, barriers = stages + size::barriers;
    const gemm_ring ring = {stages,
                            barriers,
                            barriers + size::stages * 8,
                            stages + size::v,
                            stages + size::x_scales,
                            barriers + 2 * size::stages * 8,
                            barriers + (2 * size::stages + 1) * 8};
    if (threadIdx.x == 0) {
        for (int s = 0; s < size::stages; s++) {
            barrier_init(ring.full + s * 8, k == DOWN ? 2 + ROLE_THREADS : 2);
            barrier_init(ring.empty + s * 8, G * WARPGROUP);
        }
        barrier_init(ring.v_full, G * WARPGROUP);
        barrier_init(ring.v_empty, ROLE_THREADS);
        barrier_init_fence();
    }
    if (!call.tiles_are_old) wait_for_predecessors();
    launch_dependents();
    __syncthreads();
    if (threadIdx.x < WARPGROUP) {
        registers_lower<PRODUCER_REGISTERS>();
        constexpr int n_passes = passes<k, activation>;
        if (threadIdx.x == 0) produce<k, WEIGHTS, n_passes>(call, ring); /* which are no work of the predecessor's */
        if (threadIdx.x == 32) {
            wait_for_predecessors();
            produce<k, ROWS, n_passes>(call, ring);
        }
        if (threadIdx.x >= WARPGROUP - ROLE_THREADS) {
            if (k == GATE_UP) {
                quantise<n_passes>(call, ring);
            } else {
                wait_for_predecessors();
                produce<k, SCALES, n_passes>(call, ring);
                copy_wait_all(); /* shared memory must outlive the copies */
            }
        }
    } else {
        registers_raise<CONSUMER_REGISTERS>();
        consume<k, activation>(call, ring);
    }
}

} // namespace fp8

#endif
