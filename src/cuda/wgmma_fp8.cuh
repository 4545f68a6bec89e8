/* wgmma m64nNk32: D[64, N] = A[64, 32] * B[32, N], or += , A e5m2 in registers, B e4m3 in shared memory, fp32 sums (of
 * which the tensor core keeps about 13 bits behind the largest addend's leading one: fp8.cuh adds them up elsewhere).
 * B is [N, 128] in rows of 128 bytes, swizzled, as in wgmma.cuh.  One specialisation a width, since the instruction
 * names each of its registers. */
#ifndef MOE4_CUDA_WGMMA_FP8_CUH
#define MOE4_CUDA_WGMMA_FP8_CUH

#include <stdint.h>

/* d = a * b, or d += a * b where `adds` */
template <int N, bool adds> struct wgmma_fp8;

template <bool adds> struct wgmma_fp8<8, adds> {
    static __device__ __forceinline__ void run(float (&d)[4], const uint32_t *a, uint32_t b)
    {
        asm volatile(
            "{ .reg .b64 b; .reg .pred adds; mov.b64 b, {%8, 0x40000040}; setp.ne.b32 adds, %9, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n8k32.f32.e5m2.e4m3 {"
            "%0, %1, %2, %3"
            "}, {%4, %5, %6, %7}, b, adds, 1, 1; }\n"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "n"(adds));
    }
};

template <bool adds> struct wgmma_fp8<16, adds> {
    static __device__ __forceinline__ void run(float (&d)[8], const uint32_t *a, uint32_t b)
    {
        asm volatile(
            "{ .reg .b64 b; .reg .pred adds; mov.b64 b, {%12, 0x40000040}; setp.ne.b32 adds, %13, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n16k32.f32.e5m2.e4m3 {"
            "%0, %1, %2, %3, %4, %5, %6, %7"
            "}, {%8, %9, %10, %11}, b, adds, 1, 1; }\n"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "n"(adds));
    }
};

template <bool adds> struct wgmma_fp8<24, adds> {
    static __device__ __forceinline__ void run(float (&d)[12], const uint32_t *a, uint32_t b)
    {
        asm volatile(
            "{ .reg .b64 b; .reg .pred adds; mov.b64 b, {%16, 0x40000040}; setp.ne.b32 adds, %17, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n24k32.f32.e5m2.e4m3 {"
            "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11"
            "}, {%12, %13, %14, %15}, b, adds, 1, 1; }\n"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
              "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "n"(adds));
    }
};

template <bool adds> struct wgmma_fp8<32, adds> {
    static __device__ __forceinline__ void run(float (&d)[16], const uint32_t *a, uint32_t b)
    {
        asm volatile(
            "{ .reg .b64 b; .reg .pred adds; mov.b64 b, {%20, 0x40000040}; setp.ne.b32 adds, %21, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n32k32.f32.e5m2.e4m3 {"
            "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
            "}, {%16, %17, %18, %19}, b, adds, 1, 1; }\n"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
              "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "n"(adds));
    }
};

template <bool adds> struct wgmma_fp8<40, adds> {
    static __device__ __forceinline__ void run(float (&d)[20], const uint32_t *a, uint32_t b)
    {
        asm volatile(
            "{ .reg .b64 b; .reg .pred adds; mov.b64 b, {%24, 0x40000040}; setp.ne.b32 adds, %25, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n40k32.f32.e5m2.e4m3 {"
            "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
            "%16, %17, %18, %19"
            "}, {%20, %21, %22, %23}, b, adds, 1, 1; }\n"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
              "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
              "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "n"(adds));
    }
};

template <bool adds> struct wgmma_fp8<48, adds> {
    static __device__ __forceinline__ void run(float (&d)[24], const uint32_t *a, uint32_t b)
    {
        asm volatile(
            "{ .reg .b64 b; .reg .pred adds; mov.b64 b, {%28, 0x40000040}; setp.ne.b32 adds, %29, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n48k32.f32.e5m2.e4m3 {"
            "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
            "%16, %17, %18, %19, %20, %21, %22, %23"
            "}, {%24, %25, %26, %27}, b, adds, 1, 1; }\n"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
              "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
              "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "n"(adds));
    }
};

template <bool adds> struct wgmma_fp8<56, adds> {
    static __device__ __forceinline__ void run(float (&d)[28], const uint32_t *a, uint32_t b)
    {
        asm volatile(
            "{ .reg .b64 b; .reg .pred adds; mov.b64 b, {%32, 0x40000040}; setp.ne.b32 adds, %33, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n56k32.f32.e5m2.e4m3 {"
            "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
            "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27"
            "}, {%28, %29, %30, %31}, b, adds, 1, 1; }\n"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
              "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
              "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
              "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "n"(adds));
    }
};

template <bool adds> struct wgmma_fp8<64, adds> {
    static __device__ __forceinline__ void run(float (&d)[32], const uint32_t *a, uint32_t b)
    {
        asm volatile(
            "{ .reg .b64 b; .reg .pred adds; mov.b64 b, {%36, 0x40000040}; setp.ne.b32 adds, %37, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n64k32.f32.e5m2.e4m3 {"
            "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
            "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
            "}, {%32, %33, %34, %35}, b, adds, 1, 1; }\n"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
              "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
              "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
              "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "n"(adds));
    }
};

template <bool adds> struct wgmma_fp8<72, adds> {
    static __device__ __forceinline__ void run(float (&d)[36], const uint32_t *a, uint32_t b)
    {
        asm volatile(
            "{ .reg .b64 b; .reg .pred adds; mov.b64 b, {%40, 0x40000040}; setp.ne.b32 adds, %41, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n72k32.f32.e5m2.e4m3 {"
            "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
            "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
            "%32, %33, %34, %35"
            "}, {%36, %37, %38, %39}, b, adds, 1, 1; }\n"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
              "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
              "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
              "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
              "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "n"(adds));
    }
};

template <bool adds> struct wgmma_fp8<80, adds> {
    static __device__ __forceinline__ void run(float (&d)[40], const uint32_t *a, uint32_t b)
    {
        asm volatile(
            "{ .reg .b64 b; .reg .pred adds; mov.b64 b, {%44, 0x40000040}; setp.ne.b32 adds, %45, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n80k32.f32.e5m2.e4m3 {"
            "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
            "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
            "%32, %33, %34, %35, %36, %37, %38, %39"
            "}, {%40, %41, %42, %43}, b, adds, 1, 1; }\n"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
              "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
              "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
              "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
              "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "n"(adds));
    }
};

/* m64n8k32 by one row of B as it lies in memory, 16-byte chunks one after another: chunks stand for rows, too, so that
 * seven of the eight columns of d are of no use. */
template <bool adds>
static __device__ __forceinline__ void wgmma_fp8_row(float (&d)[4], const uint32_t *a, uint32_t b)
{
    asm volatile("{ .reg .b64 b; .reg .pred adds; mov.b64 b, {%8, 1}; setp.ne.b32 adds, %9, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n8k32.f32.e5m2.e4m3 {"
                 "%0, %1, %2, %3"
                 "}, {%4, %5, %6, %7}, b, adds, 1, 1; }\n"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "n"(adds));
}

#endif
