/* wgmma m64nNk32: D[64, N] = A[64, 32] * B[32, N], or += , A e5m2 in registers, B e4m3 in shared memory, fp32 sums (of
 * which the tensor core keeps about 13 bits behind the largest addend's leading one: fp8.cuh adds them up elsewhere).
 * B is [N, 128] in rows of 128 bytes, swizzled, as in wgmma.cuh. */
#ifndef MOE4_CUDA_WGMMA_FP8_CUH
#define MOE4_CUDA_WGMMA_FP8_CUH

#include <stdint.h>

#include "cuda/wgmma_sums.cuh"

/* d = a * b, or d += a * b where `adds` */
template <int N, bool adds> struct wgmma_fp8;

/* A width and the numbers of its operands behind the sums. */
#define WGMMA_FP8(N, a0, a1, a2, a3, operand_b, whether)                                                               \
    template <bool adds> struct wgmma_fp8<N, adds> {                                                                   \
        static __device__ __forceinline__ void run(float (&d)[N / 2], const uint32_t *a, uint32_t b)                   \
        {                                                                                                              \
            asm volatile("{ .reg .b64 b; .reg .pred adds; mov.b64 b, {%" #operand_b ", 0x40000040}; "                  \
                         "setp.ne.b32 adds, %" #whether ", 0;\n"                                                       \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e5m2.e4m3 {" WGMMA_SUMS_##N                   \
                         "}, "                                                                                         \
                         "{%" #a0 ", %" #a1 ", %" #a2 ", %" #a3 "}, b, adds, 1, 1; }\n"                                \
                         : WGMMA_BIND_##N(d)                                                                           \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "n"(adds));                             \
        }                                                                                                              \
    };
WGMMA_FP8(8, 4, 5, 6, 7, 8, 9)
WGMMA_FP8(16, 8, 9, 10, 11, 12, 13)
WGMMA_FP8(24, 12, 13, 14, 15, 16, 17)
WGMMA_FP8(32, 16, 17, 18, 19, 20, 21)
WGMMA_FP8(40, 20, 21, 22, 23, 24, 25)
WGMMA_FP8(48, 24, 25, 26, 27, 28, 29)
WGMMA_FP8(56, 28, 29, 30, 31, 32, 33)
WGMMA_FP8(64, 32, 33, 34, 35, 36, 37)
WGMMA_FP8(72, 36, 37, 38, 39, 40, 41)
WGMMA_FP8(80, 40, 41, 42, 43, 44, 45)
#undef WGMMA_FP8

/* m64n8k32 by one row of B as it lies in memory, 16-byte chunks one after another: chunks stand for rows, too, so that
 * seven of the eight columns of d are of no use. */
template <bool adds> static __device__ __forceinline__ void wgmma_fp8_row(float (&d)[4], const uint32_t *a, uint32_t b)
{
    asm volatile("{ .reg .b64 b; .reg .pred adds; mov.b64 b, {%8, 1}; setp.ne.b32 adds, %9, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n8k32.f32.e5m2.e4m3 {"
                 "%0, %1, %2, %3"
                 "}, {%4, %5, %6, %7}, b, adds, 1, 1; }\n"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "n"(adds));
}

#endif
