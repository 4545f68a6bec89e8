/* The grouped GEMMs of fp8 compute on wgmma m64nNk32: weights e5m2 from registers, activations e4m3 in shared memory.
 *
 * A block is one producer warpgroup and two consumer warpgroups of one 64-row weight tile each; both share a token tile
 * of up to FP8_MAX_ROWS routed rows of one expert.  Rows and weights lie in memory as the ring wants them, so that bulk
 * copies move them:
 *
 *   producers    warp 0 copies the weights of a stage (a block or two of 128 k), warp 1 its rows
 *                warps 2 and 3 copy, in down, the scales of these
 *   full[s]      arrivals of these, and the bytes of the copies
 *   consumers    decode a block and multiply it by the token tile
 *                in pieces: sums of one are promoted while the tensor cores work on the next
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

#include "cuda/fp8_decode.cuh"
#include "cuda/fp8_epilogue.cuh"
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
    uint32_t codes, scales; /* where the thread's parts of its warpgroup's first step lie in stage 0 */
    fp8_magnitudes magnitudes;

    /* down: of the rows of a block, the thread's first two. */
    template <int N> __device__ __forceinline__ uint32_t scales_of(int stage, int block) const
    {
        using W = width<N>;
        return ring.stages + stage * STAGE_BYTES + W::scales + block * W::rows * 4 + threadIdx.x % 4 * 8;
    }
};

/* Steps `first` to `end` of a block's weights, `offset` behind those, to operand A. */
template <int first, int end>
static __device__ __forceinline__ void decode_steps(const operands &of, uint32_t offset, uint32_t (&a)[16])
{
    uint4 codes[end - first];
    uint32_t scales[end - first];
#pragma unroll
    for (int s = first; s < end; s++) {
        codes[s - first] = load_shared_16(of.codes + offset + s * CUDA_STEP_BYTES);
        scales[s - first] = load_shared_4(of.scales + offset + s * CUDA_STEP_BYTES);
    }
#pragma unroll
    for (int s = first; s < end; s++) fp8_decode_step(codes[s - first], scales[s - first], of.magnitudes, a + s * 8);
}

/* gate/up: the item's scales of x, on their way to shared memory, a copy a warpgroup. */
static __device__ __forceinline__ void fetch_x_scales(const fp8_call &call, const token_tile &tokens, uint32_t to)
{
    for (int row = threadIdx.x % WARPGROUP; row < tokens.n_rows; row += WARPGROUP)
        copy4(to + row * 4, call.x.scales + tokens.first_row + row);
}

/* ---- Products, in pieces ---------------------------------------------------------------------------------------- */

/* Whether registers hold two sets of decoded weights, of this block and of the next. */
template <int N> constexpr bool has_two = N <= 200;

/* Columns whose products are under way while those of the piece before are promoted, so that registers hold two pieces
 * of the tensor core's accumulators beside the sums of all: as many as they have room for.  Pieces are of one width, or
 * ptxas waits for each instruction. */
constexpr int piece_of(int N)
{
    if (N <= 48) return N;
    int n = (N <= 200 ? 176 : 192) - N / 2;
    n = n > 64 ? 64 : n / 8 * 8;
    while (N % n || n == N) n -= 8;
    return n;
}

template <int N> constexpr int piece = piece_of(N);
template <int N> constexpr int n_pieces = N / piece<N>;

/* down: scales of so many eights of rows are loaded before they are wanted, throughout: loads take long while tensor
 * cores read shared memory.  A divisor of all eights, so that each has its place in every block. */
constexpr int eights_ahead_of(int N)
{
    int n = N <= 240 ? 8 : 4;
    while (N / 8 % n) n--;
    return n;
}

template <int N> constexpr int eights_ahead = eights_ahead_of(N);

/* They, for the thread's columns 0 and 1 of each eight; where the block's and the next one's lie. */
template <int N> struct scale_window {
    uint2 eights[eights_ahead<N>];
    uint32_t block, next;

    template <int i> __device__ __forceinline__ void load()
    {
        eights[i % eights_ahead<N>] = load_shared_8(i < N / 8 ? block + i * 32 : next + (i - N / 8) * 32);
    }
};

/* `b`: address of the block's rows, over 16, with wgmma's leading dimension above. */
template <int n> static __device__ __forceinline__ void multiply_piece(float (&d)[n / 2], uint32_t (&a)[16], uint32_t b)
{
    wgmma_fence();
    wgmma_fp8<n, false>::run(d, a, b);
    wgmma_fp8<n, true>::run(d, a + 4, b + 2);
    wgmma_fp8<n, true>::run(d, a + 8, b + 4);
    wgmma_fp8<n, true>::run(d, a + 12, b + 6);
    wgmma_commit();
}

/* A piece's sums to fp32. */
template <kind k, int N, int p, int j = 0>
static __device__ __forceinline__ void promote_piece(float (&total)[N / 2], float (&d)[piece<N> / 2],
                                                     scale_window<N> &scales)
{
    constexpr int n = piece<N>, eight = p * n / 8 + j;
    const uint2 own = scales.eights[eight % eights_ahead<N>];
#pragma unroll
    for (int c = 0; c < 4; c++) {
        float &sum = total[4 * eight + c];
        asm volatile("" : "+f"(d[4 * j + c])); /* waited for by now */
        sum = k == GATE_UP ? sum + d[4 * j + c] : fmaf(d[4 * j + c], __uint_as_float(c % 2 ? own.y : own.x), sum);
    }
    if constexpr (k == DOWN) scales.template load<eight + eights_ahead<N>>();
    if constexpr (j + 1 < n / 8) promote_piece<k, N, p, j + 1>(total, d, scales);
}

/* Pieces p on of a block, of which two are under way.  Where there are two sets of registers the next block is decoded
 * meanwhile. */
template <kind k, int N, int p = 0>
static __device__ __forceinline__ void promote_pieces(const operands &of, uint32_t offset, float (&total)[N / 2],
                                                      float (&d)[2][piece<N> / 2], uint32_t (&a)[16],
                                                      uint32_t (&next)[16], uint32_t b, scale_window<N> &scales)
{
    constexpr int n = piece<N>, last = n_pieces<N> - 1, pending = p < last;
    constexpr int end = p == last ? (int)BLOCK_STEPS : p + 1; /* of the steps decoded now */
    if constexpr (has_two<N> && p < BLOCK_STEPS) decode_steps<p, end>(of, offset, next);
    wgmma_wait<pending>();
    promote_piece<k, N, p>(total, d[p % 2], scales);
    if constexpr (p + 2 <= last) multiply_piece<n>(d[p % 2], a, b + (p + 2) * (n * FP8_BLOCK / 16));
    if constexpr (p < last) promote_pieces<k, N, p + 1>(of, offset, total, d, a, next, b, scales);
}

/* Multiplies block g of a stage, and decodes the next; where there is one set of registers, when products are over,
 * while those of the other warpgroup run.  `left`: blocks from this one on. */
template <kind k, int N, int g>
static __device__ __forceinline__ void
multiply_block(const operands &of, ring_position<k> &at, int left, uint32_t (&a)[16], uint32_t (&next)[16],
               float (&d)[2][piece<N> / 2], float (&total)[N / 2], scale_window<N> &scales)
{
    using W = width<N>;
    constexpr int n = piece<N>;
    constexpr bool ends_stage = g == W::stage_blocks - 1;
    const uint32_t stage = of.ring.stages + at.stage * STAGE_BYTES, empty = of.ring.empty + at.stage * 8;
    const uint32_t x = (stage + g * W::x_bytes) >> 4 | 1 << 16;
    const bool is_last = left <= 1;
    ring_position<k> next_stage = at;
    if (ends_stage || is_last) next_stage.advance();
    const uint32_t weights =
        is_last || !ends_stage ? at.stage : next_stage.stage; /* the last block's are decoded in vain */
    const uint32_t offset = weights * STAGE_BYTES + (ends_stage ? 0 : (g + 1) * BLOCK_BYTES_W);
#pragma unroll
    for (int i = 0; i < 16; i++) asm volatile("" : "+r"(a[i])); /* decoded by now */
    multiply_piece<n>(d[0], a, x);
    if constexpr (n < N) multiply_piece<n>(d[1], a, x + n * FP8_BLOCK / 16);
    if (ends_stage && !is_last) await_stage(of.ring, next_stage);
    scales.block = scales.next;
    scales.next = of.scales_of<N>(weights, ends_stage ? 0 : g + 1);
    promote_pieces<k, N>(of, offset, total, d, a, next, x, scales);
    if constexpr (!has_two<N>) decode_steps<0, BLOCK_STEPS>(of, offset, next);
    if (ends_stage || is_last) barrier_arrive(empty);
    at = next_stage;
}

template <int N, int i = 0> static __device__ __forceinline__ void load_first(scale_window<N> &scales)
{
    scales.template load<i>();
    if constexpr (i + 1 < eights_ahead<N>) load_first<N, i + 1>(scales);
}

/* All of K for one pass; `on_first`: what can be done once x is there. */
template <kind k, int N, class Action>
static __device__ __forceinline__ void multiply(const fp8_call &call, const operands &of, ring_position<k> &at,
                                                float (&total)[N / 2], const Action &on_first)
{
    constexpr int other = has_two<N>;
    uint32_t a[1 + other][16];
    float d[2][piece<N> / 2];
#pragma unroll
    for (int i = 0; i < N / 2; i++) total[i] = 0.0f;
#pragma unroll
    for (int i = 0; i < piece<N> / 2; i++) d[0][i] = d[1][i] = 0.0f;
#pragma unroll
    for (uint32_t &each : a[other]) each = 0;
    at.stage = __shfl_sync(~0u, at.stage, 0); /* so that the compiler sees one address for the whole warp */
    await_stage(of.ring, at);
    on_first();
    scale_window<N> scales = {{}, 0, of.scales_of<N>(at.stage, 0)};
    scales.block = scales.next;
    if constexpr (k == DOWN) load_first<N>(scales);
    decode_steps<0, BLOCK_STEPS>(of, at.stage * STAGE_BYTES, a[0]);
    for (int left = block_count(call);;) {
        multiply_block<k, N, 0>(of, at, left, a[0], a[other], d, total, scales);
        if (--left <= 0) break;
        if constexpr (other || width<N>::stage_blocks == 2) {
            multiply_block<k, N, width<N>::stage_blocks - 1>(of, at, left, a[other], a[0], d, total, scales);
            if (--left <= 0) break;
        }
    }
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
            ring, weights + CUDA_STEP_SCALES + thread * 16, weights + thread / 4 * 4,
            fp8_magnitudes_of(value_of_lane(call.tile_base[(int64_t)item.tokens.l * call.n_tiles + seen]))};
        float total[N / 2];
        prefetch_pass<k>(call, item.tokens, seen);
        const auto on_first = [&] {
            if (k == GATE_UP && pass == 0) fetch_x_scales(call, item.tokens, x_scales);
        };
        multiply<k, N>(call, of, at, total, on_first);
        if (k == GATE_UP && pass == 0) {
            copy_wait_all();
            barrier_sync<WARPGROUP>(2 + warpgroup);
            barrier_wait(ring.v_empty, v_parity ^ 1);
        }
        if (tile == seen) {
            if constexpr (k == GATE_UP)
                store_v<N, activation>(rows_of_thread(call, item.tokens.l, tile), ring.v, x_scales, slot, total);
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
        items.advance(ring);
        items.index = __shfl_sync(~0u, items.index, 0); /* one for the whole warp, as at.stage */
        next = items.load(call);
        if constexpr (k == DOWN || is_common<activation>)
            consume_narrowest<k, activation, 8, 16, 32, 48, 64, 80, 96, 112, 128, 144, 160, 192, 200, 224, 240, 256,
                              FP8_MAX_ROWS>(call, ring, at, item, v_parity);
        else
            consume_narrowest<k, activation, 16, 80, NARROW, 144, 192, FP8_MAX_ROWS>(call, ring, at, item, v_parity);
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
                            barriers + (2 * size::stages + 1) * 8,
                            barriers + (2 * size::stages + 2) * 8,
                            barriers + (2 * size::stages + 2 + CLAIMS) * 8};
    if (threadIdx.x == 0) {
        for (int s = 0; s < size::stages; s++) {
            barrier_init(ring.full + s * 8, k == DOWN ? 2 + ROLE_THREADS : 2);
            barrier_init(ring.empty + s * 8, G * WARPGROUP);
        }
        barrier_init(ring.v_full, G * WARPGROUP);
        barrier_init(ring.v_empty, ROLE_THREADS);
        for (int i = 0; i < CLAIMS; i++) barrier_init(ring.claimed + i * 8, 1);
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
