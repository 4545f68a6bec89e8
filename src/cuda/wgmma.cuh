/* wgmma m64nNk16: D[64, N] += A[64, 16] * B[16, N], bf16 operands, fp32 sums.  A in registers, B in shared memory.
 * B is [N, 64] in rows of 128 bytes, swizzled; groups of 8 rows are 1024 bytes apart. */
#ifndef MOE4_CUDA_WGMMA_CUH
#define MOE4_CUDA_WGMMA_CUH

#include <stdint.h>

#include "cuda/ptx.cuh"
#include "cuda/wgmma_sums.cuh"

/* What wgmma takes for operand B: its shared address in units of 16 bytes, a field unused with this swizzle, and a
 * constant upper half.  As one number of 64 bits, it moves on by one instruction (UIADD3.64); from two halves it would
 * take three. */
static __device__ __forceinline__ uint64_t wgmma_operand(uint32_t address)
{
    return (uint64_t)0x40000040 << 32 | 1 << 16 | address >> 4;
}

/* d += a * b */
template <int N> __device__ __forceinline__ void wgmma(float (&d)[N / 2], const uint32_t *a, uint64_t b);

/* A width and the numbers of its operands behind the sums. */
#define WGMMA(N, a0, a1, a2, a3, operand_b)                                                                            \
    template <> __device__ __forceinline__ void wgmma<N>(float(&d)[N / 2], const uint32_t *a, uint64_t b)              \
    {                                                                                                                  \
        asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" WGMMA_SUMS_##N                       \
                     "}, "                                                                                             \
                     "{%" #a0 ", %" #a1 ", %" #a2 ", %" #a3 "}, %" #operand_b ", 1, 1, 1, 0;"                          \
                     : WGMMA_BIND_##N(d)                                                                               \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                            \
    }
WGMMA(8, 4, 5, 6, 7, 8)
WGMMA(16, 8, 9, 10, 11, 12)
WGMMA(24, 12, 13, 14, 15, 16)
WGMMA(32, 16, 17, 18, 19, 20)
WGMMA(40, 20, 21, 22, 23, 24)
WGMMA(48, 24, 25, 26, 27, 28)
WGMMA(56, 28, 29, 30, 31, 32)
WGMMA(64, 32, 33, 34, 35, 36)
WGMMA(72, 36, 37, 38, 39, 40)
WGMMA(80, 40, 41, 42, 43, 44)
WGMMA(88, 44, 45, 46, 47, 48)
WGMMA(96, 48, 49, 50, 51, 52)
WGMMA(104, 52, 53, 54, 55, 56)
WGMMA(112, 56, 57, 58, 59, 60)
WGMMA(120, 60, 61, 62, 63, 64)
WGMMA(128, 64, 65, 66, 67, 68)
WGMMA(136, 68, 69, 70, 71, 72)
WGMMA(144, 72, 73, 74, 75, 76)
WGMMA(152, 76, 77, 78, 79, 80)
WGMMA(160, 80, 81, 82, 83, 84)
#undef WGMMA

/* A step of 64 k, under way until wgmma_wait. */
template <int N> static __device__ __forceinline__ void multiply_step(float (&d)[N / 2], uint32_t (&a)[16], uint64_t b)
{
#pragma unroll
    for (uint32_t &each : a) asm volatile("" : "+r"(each)); /* decoded by now */
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 4; i++) wgmma<N>(d, a + i * 4, b + i * 2);
    wgmma_commit();
}

#endif
