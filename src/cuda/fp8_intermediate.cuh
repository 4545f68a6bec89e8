/* The intermediate on its way through shared memory: gate/up's consumers leave 128 columns of a token tile as bf16, and
 * two warps of producers quantise them while the next item is under way. */
#ifndef MOE4_CUDA_FP8_INTERMEDIATE_CUH
#define MOE4_CUDA_FP8_INTERMEDIATE_CUH

#include "cuda/fp8.h"
#include "cuda/fp8_quantize.cuh"
#include "cuda/ptx.cuh"

namespace fp8
{

enum : int {
    ROLE_THREADS = 64, /* of a producers' role that takes two warps */
    /* Rows are an odd number of 16-byte units apart, for the banks, and a row's scale and its reciprocal are kept in
       the last of them. */
    V_PITCH = FP8_BLOCK * 2 + 16
};

/* Rows' scales, a thread a row. */
static __device__ __forceinline__ void find_divisors(float *scales, uint32_t v, int n_rows, int n_chunks)
{
    for (int row = threadIdx.x % ROLE_THREADS; row < n_rows; row += ROLE_THREADS) {
        const uint32_t from = v + row * V_PITCH;
        uint32_t largest = 0;
        if (n_chunks == FP8_BLOCK / 16)
#pragma unroll 4
            for (int i = 0; i < FP8_BLOCK / 8; i++) largest = fp8_larger(largest, load_shared_16(from + i * 16));
        else
            for (int i = 0; i < 2 * n_chunks; i++) largest = fp8_larger(largest, load_shared_16(from + i * 16));
        const fp8_divisor by = fp8_divisor_of(fp8_largest(largest));
        scales[row] = by.scale;
        store_shared_8(from + FP8_BLOCK * 2, __float_as_uint(by.scale), __float_as_uint(by.reciprocal));
    }
}

/* Codes, eight threads a row, sixteen columns each. */
static __device__ __forceinline__ void store_codes(uint8_t *codes, uint32_t v, int n_rows, int n_chunks)
{
    const int thread = threadIdx.x % ROLE_THREADS, chunk = thread % 8;
    for (int row = thread / 8; row < n_rows; row += ROLE_THREADS / 8) {
        const uint32_t in_row = v + row * V_PITCH, from = in_row + chunk * 32;
        const uint2 divisor = load_shared_8(in_row + FP8_BLOCK * 2);
        const fp8_divisor by = {__uint_as_float(divisor.x), __uint_as_float(divisor.y)};
        uint4 out = fp8_chunk(load_shared_16(from), load_shared_16(from + 16), by);
        if (chunk >= n_chunks) out = make_uint4(0, 0, 0, 0);
        *(uint4 *)(codes + row * FP8_BLOCK + fp8_chunk_offset(row, chunk)) = out;
    }
}

/* A group of 128 columns of the token tile, of which some may not exist, by ROLE_THREADS threads. */
static __device__ __forceinline__ void quantise_group(const fp8_rows &to, int columns, uint32_t v,
                                                      const token_tile &tokens, int group)
{
    const int n_chunks = min((columns - group * FP8_BLOCK) / 16, FP8_BLOCK / 16);
    if (n_chunks <= 0) return;
    const int64_t first = group * to.rows + tokens.first_row;
    find_divisors(to.scales + first, v, tokens.n_rows, n_chunks);
    barrier_sync<ROLE_THREADS>(1);
    store_codes(to.codes + first * FP8_BLOCK, v, tokens.n_rows, n_chunks);
}

} // namespace fp8

#endif
