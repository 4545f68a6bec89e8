/* The grouped GEMM of gemm.cuh for every GPU from sm_80 on, from the same packed weights, with mma.sync m16n8k16: its
 * operand A has the registers of wgmma's.  Simple before fast: a block is four warps, each with 16 of a tile's 64
 * weight rows, and takes up to 64 rows of x at a time; x goes through shared memory, weights straight into registers,
 * both one step ahead.
 *
 * Order of sums ("mma_k16"): every element of out is one chain of m16n8k16 over ascending k, whatever T, tile and
 * position are.  Steps are whole: what K lacks of the last one is zero on both sides. */
#include "cuda/activation.cuh"
#include "cuda/decode.cuh"
#include "cuda/launch.cuh"

namespace
{

enum : int {
    THREADS = 128,
    TOKENS = 64,                            /* of a pass */
    GROUPS = TOKENS / 8,                    /* instructions a k16 */
    ROW_CHUNKS = CUDA_STEP_K / 8,           /* 16-byte pieces of a row of x in a step */
    PIECES = TOKENS * ROW_CHUNKS / THREADS, /* that a thread copies */
    PIECE_ROWS = THREADS / ROW_CHUNKS,      /* from one of a thread's pieces to its next */
    PITCH = CUDA_STEP_K / 2 + 4,            /* words from row to row, so that eight rows are in different banks */
    BLOCKS_A_MULTIPROCESSOR = 4
};

/* d += a * b */
__device__ void multiply(float *d, const uint32_t *a, uint32_t b0, uint32_t b1)
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* Some of a token tile's rows, and the weight tile they meet. */
struct pass {
    int32_t l, tile;
    int32_t first_row, n_rows; /* routed rows */
};

/* A thread's share of a step, on its way to shared memory and operand A. */
struct step_data {
    uint4 x[PIECES], codes;
    uint32_t scales;
};

struct step_source {
    const uint16_t *x[PIECES]; /* NULL past the pass's rows */
    const uint8_t *weights;
};

__device__ step_source source_of(const gemm_call &call, const pass &p)
{
    step_source from;
    for (int i = 0; i < PIECES; i++) {
        const int32_t in_pass = threadIdx.x / ROW_CHUNKS + i * PIECE_ROWS;
        int64_t row = p.first_row + in_pass;
        if (in_pass < p.n_rows && call.row_source) row = call.row_source[row];
        from.x[i] = in_pass < p.n_rows ? call.x + row * call.ldx + threadIdx.x % ROW_CHUNKS * 8 : nullptr;
    }
    from.weights = call.weights + ((int64_t)p.l * call.n_tiles + p.tile) * call.n_steps * CUDA_STEP_BYTES;
    return from;
}

__device__ void load_step(const gemm_call &call, const step_source &from, int32_t step, step_data &data)
{
    const bool is_past_K = step * CUDA_STEP_K + (int32_t)threadIdx.x % ROW_CHUNKS * 8 >= call.K;
    for (int i = 0; i < PIECES; i++)
        data.x[i] = from.x[i] && !is_past_K ? *(const uint4 *)(from.x[i] + step * CUDA_STEP_K) : make_uint4(0, 0, 0, 0);
    const uint8_t *weights = from.weights + (int64_t)step * CUDA_STEP_BYTES;
    data.codes = ((const uint4 *)(weights + CUDA_STEP_SCALES))[threadIdx.x];
    data.scales = ((const uint32_t *)weights)[threadIdx.x / 4];
}

__device__ void multiply_step(const uint32_t (*x)[PITCH], const uint32_t (&a)[16], int32_t n_rows,
                              float (&d)[GROUPS][4])
{
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < CUDA_STEP_K / 16; j++)
#pragma unroll
        for (int n = 0; n < GROUPS; n++) {
            if (8 * n >= n_rows) continue;
            const uint32_t *row = x[8 * n + lane / 4] + 8 * j + lane % 4;
            multiply(d[n], a + 4 * j, row[0], row[4]);
        }
}

/* All of K. */
__device__ void multiply_pass(const gemm_call &call, const pass &p, float (&d)[GROUPS][4])
{
    __shared__ __align__(16) uint32_t x[2][TOKENS][PITCH];
    const step_source from = source_of(call, p);
    step_data data;
    load_step(call, from, 0, data);
    for (int32_t step = 0; step < call.n_steps; step++) {
        for (int i = 0; i < PIECES; i++)
            *(uint4 *)&x[step % 2][threadIdx.x / ROW_CHUNKS + i * PIECE_ROWS][threadIdx.x % ROW_CHUNKS * 4] = data.x[i];
        uint32_t a[16];
        decode_step(data.codes, data.scales, a);
        __syncthreads(); /* the step is there, and everybody has left the one before the last */
        if (step + 1 < call.n_steps) load_step(call, from, step + 1, data);
        multiply_step(x[step % 2], a, p.n_rows, d);
    }
    __syncthreads();
}

/* A thread has columns 8n + 2t and the next of rows g, g+8 of its warp: a gate and its up, or neighbours. */
template <moe4_activation activation>
__device__ void store_pass(const gemm_call &call, const pass &p, const float (&d)[GROUPS][4])
{
    constexpr bool is_gated = activation != MOE4_ACTIVATION_IDENTITY && activation != MOE4_ACTIVATION_RELU2;
    const int32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const float *bias = call.bias + ((int64_t)p.l * call.n_tiles + p.tile) * CUDA_TILE_ROWS + warp * 16 + lane / 4;
    const int32_t column = is_gated ? p.tile * CUDA_GATED_COLUMNS + warp * 8 + lane / 4
                                    : p.tile * CUDA_TILE_ROWS + warp * 16 + lane / 4 * 2;
    const float unit = call.unit[p.l];
    const activation_params params = call.params[p.l];
    if (column >= call.columns) return;
    for (int n = 0; n < GROUPS; n++)
        for (int c = 0; c < 2; c++) {
            const int32_t row = 8 * n + lane % 4 * 2 + c;
            if (row >= p.n_rows) continue;
            uint16_t *out = call.out + (int64_t)(p.first_row + row) * call.ldout + column;
            const float first = d[n][c] * unit + bias[0], second = d[n][2 + c] * unit + bias[8];
            if constexpr (is_gated) {
                *out = bf16_bits(activate<activation>(first, second, params));
            } else {
                const uint32_t low = bf16_bits(activate<activation>(0.0f, first, params));
                const uint32_t high = bf16_bits(activate<activation>(0.0f, second, params));
                *(uint32_t *)out = low | high << 16;
            }
        }
}

template <moe4_activation activation>
__global__ void __launch_bounds__(THREADS) mma_kernel(const __grid_constant__ gemm_call call)
{
    begin_kernel();
    const int32_t n_items = *call.n_token_tiles * call.n_tiles;
    for (int32_t item = blockIdx.x; item < n_items; item += gridDim.x) {
        const token_tile tokens = call.token_tiles[item / call.n_tiles];
        for (int32_t row = 0; row < tokens.n_rows; row += TOKENS) {
            const pass p = {tokens.l, item % call.n_tiles, tokens.first_row + row,
                            min(tokens.n_rows - row, (int)TOKENS)};
            float d[GROUPS][4] = {};
            multiply_pass(call, p, d);
            store_pass<activation>(call, p, d);
        }
    }
}

struct kernels {
    typedef void function(const gemm_call);
    template <moe4_activation activation> static constexpr function *of = mma_kernel<activation>;
};

} // namespace

int gemm_mma(const gemm_call *call, moe4_activation activation, int32_t n_blocks, cuda_stream stream)
{
    return launch(by_activation<kernels>[activation], call, n_blocks * BLOCKS_A_MULTIPROCESSOR, THREADS, 0, stream);
}
