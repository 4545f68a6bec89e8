/* decode_bench: what decoding packed MXFP4 costs, by operand format and by arrangement of the codes.  Not part of the
 * library: it measures the choice that layout.h states.
 *
 * Every variant reads what the GEMM reads (16 bytes of codes and 4 of scales a lane for 32 codes) and leaves operand A
 * in registers.  One exclusive or for two of them keeps the compiler from dropping the work, and is counted. */
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cuda_fp8.h>

#include "cuda/decode.cuh"
#include "cuda/ptx.cuh"

namespace
{

/* The fp8 arrangement: word = 8 codes of one row and block.  Nibble n's low three bits are code n's magnitude; the
 * signs of codes 0..3 are the top bits of nibbles 1, 3, 5, 7, those of codes 4..7 the top bits of nibbles 0, 2, 4, 6.
 */

/* Magnitudes 0 .5 1 1.5 | 2 3 4 6 of relative exponent 0 as bytes, and what one binade adds to each. */
template <int mantissa_bits> struct magnitudes {
    /* exponent field f, mantissa's top bit m: byte f << bits | m << (bits-1); .5 has exponent field 1 */
    static constexpr uint32_t byte(uint32_t f, uint32_t m)
    {
        return f << mantissa_bits | m << (mantissa_bits - 1);
    }
    static constexpr uint32_t low = byte(1, 0) << 8 | byte(2, 0) << 16 | byte(2, 1) << 24;
    static constexpr uint32_t high = byte(3, 0) | byte(3, 1) << 8 | byte(4, 0) << 16 | byte(4, 1) << 24;
    static constexpr uint32_t low_step = 0x01010100u << mantissa_bits, high_step = 0x01010101u << mantissa_bits;
};

template <class table> __device__ __forceinline__ void decode_fp8_word(uint32_t word, uint32_t exponent, uint32_t *a)
{
    uint32_t low = table::low + exponent * table::low_step, high = table::high + exponent * table::high_step;
    uint32_t select = word & 0x77777777u;
    a[0] = __byte_perm(low, high, select) | (word & 0x80808080u);
    a[2] = __byte_perm(low, high, select >> 16) | (word << 4 & 0x80808080u);
}

template <class table> __device__ __forceinline__ void decode_fp8(uint4 codes, uint32_t scales, uint32_t (&a)[16])
{
    decode_fp8_word<table>(codes.x, scales & 255, a);
    decode_fp8_word<table>(codes.y, scales >> 8 & 255, a + 1);
    decode_fp8_word<table>(codes.z, scales >> 16 & 255, a + 4);
    decode_fp8_word<table>(codes.w, scales >> 24, a + 5);
}

/* fp8 operands from the bf16 arrangement (layout.h): four codes of one row lie in two registers' bits of a word. */
template <class table>
__device__ __forceinline__ void decode_fp8_shared_word(uint32_t word, uint32_t lower, uint32_t upper, uint32_t *a)
{
    uint32_t low = table::low + lower * table::low_step, high = table::high + lower * table::high_step;
    uint32_t r8 = __byte_perm(word, 0, 0x2103), r10 = __funnelshift_l(word, word, 10);
    uint32_t select = (word >> 6 & 0x00070007u) | (r8 & 0x00700070u);
    select = __byte_perm(select, 0, 0x4420);
    a[0] = __byte_perm(low, high, select) | (word >> 8 & 0x00800080u) | (r10 & 0x80008000u);

    low = table::low + upper * table::low_step, high = table::high + upper * table::high_step;
    uint32_t r = __funnelshift_l(word, word, 6), o3 = r ^ r << 8;
    select = (word >> 2 & 0x00070007u) | (o3 >> 2 & 0x00700070u);
    select = __byte_perm(select, 0, 0x4420);
    a[1] = __byte_perm(low, high, select) | (word >> 4 & 0x00800080u) | (o3 & 0x80008000u);
}

template <class table>
__device__ __forceinline__ void decode_fp8_shared(uint4 codes, uint32_t scales, uint32_t (&a)[16])
{
    uint32_t lower = scales & 255, upper = scales >> 8 & 255;
    decode_fp8_shared_word<table>(codes.x, lower, upper, a);
    decode_fp8_shared_word<table>(codes.y, lower, upper, a + 2);
    lower = scales >> 16 & 255, upper = scales >> 24;
    decode_fp8_shared_word<table>(codes.z, lower, upper, a + 4);
    decode_fp8_shared_word<table>(codes.w, lower, upper, a + 6);
}

/* bf16 operands from the fp8 arrangement: sign and magnitude of a code must be fetched apart. */
__device__ __forceinline__ void decode_bf16_shared_word(uint32_t word, uint32_t factor, uint32_t *a)
{
    a[0] = multiply_pair((word << 6 & 0x01C001C0u) | (word << 8 & 0x80008000u), factor);
    a[1] = multiply_pair((word << 2 & 0x01C001C0u) | (word & 0x80008000u), factor);
    a[2] = multiply_pair((word >> 2 & 0x01C001C0u) | (word << 12 & 0x80008000u), factor);
    a[3] = multiply_pair((word >> 6 & 0x01C001C0u) | (word << 4 & 0x80008000u), factor);
}

__device__ __forceinline__ void decode_bf16_shared(uint4 codes, uint32_t scales, uint32_t (&a)[16])
{
    const step_factors factors = factors_of(scales);
    decode_bf16_shared_word(codes.x, half_twice<0>(factors.lower), a);
    decode_bf16_shared_word(codes.y, half_twice<0>(factors.upper), a + 4);
    decode_bf16_shared_word(codes.z, half_twice<1>(factors.lower), a + 8);
    decode_bf16_shared_word(codes.w, half_twice<1>(factors.upper), a + 12);
}

enum variant { BF16, E4M3, E5M2, E5M2_FROM_BF16, BF16_FROM_FP8, N_VARIANTS };
const char *const names[] = {"bf16, its arrangement", "e4m3, its arrangement", "e5m2, its arrangement",
                             "e5m2 from the bf16 arrangement", "bf16 from the fp8 arrangement"};

template <variant v> __device__ __forceinline__ int decode(uint4 codes, uint32_t scales, uint32_t (&a)[16])
{
    if constexpr (v == BF16) return decode_step(codes, scales, a), 16;
    if constexpr (v == E4M3) return decode_fp8<magnitudes<3>>(codes, scales, a), 8;
    if constexpr (v == E5M2) return decode_fp8<magnitudes<2>>(codes, scales, a), 8;
    if constexpr (v == E5M2_FROM_BF16) return decode_fp8_shared<magnitudes<2>>(codes, scales, a), 8;
    return decode_bf16_shared(codes, scales, a), 16;
}

/* Read anew every time, whatever the compiler knows. */
__device__ __forceinline__ uint4 read_codes(uint32_t address)
{
    uint4 v;
    asm volatile("ld.volatile.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(address));
    return v;
}

__device__ __forceinline__ uint32_t read_scales(uint32_t address)
{
    uint32_t v;
    asm volatile("ld.volatile.shared.u32 %0, [%1];" : "=r"(v) : "r"(address));
    return v;
}

constexpr int THREADS = 512, LAPS = 2000, STEPS = 16;

template <variant v> __global__ void __launch_bounds__(THREADS, 1) loop(long long *clocks)
{
    extern __shared__ uint4 codes[];
    __shared__ uint32_t scales[THREADS];
    for (int i = threadIdx.x; i < STEPS * 128; i += THREADS)
        codes[i] = make_uint4(i * 2654435761u, i * 40503u, i * 69069u, i * 1664525u);
    scales[threadIdx.x] = 0x03020105;
    __syncthreads();
    uint32_t code_address = shared_address(codes) + threadIdx.x % 128 * 16;
    uint32_t scale_address = shared_address(scales) + threadIdx.x / 4 * 4;
    uint32_t kept = 0;
    long long begin = clock64();
#pragma unroll 1
    for (int lap = 0; lap < LAPS; lap += STEPS)
#pragma unroll
        for (int s = 0; s < STEPS; s++) {
            uint32_t a[16];
            int n = decode<v>(read_codes(code_address + s * 2048), read_scales(scale_address), a);
#pragma unroll
            for (int i = 0; i < n; i += 2) kept ^= a[i] ^ a[i + 1];
        }
    __syncthreads();
    if (threadIdx.x == 0) clocks[blockIdx.x] = clock64() - begin;
    if (kept == 1) clocks[0] = 0; /* keeps it */
}

template <variant v> void measure(long long *clocks)
{
    cudaFuncSetAttribute(loop<v>, cudaFuncAttributeMaxDynamicSharedMemorySize, STEPS * 2048);
    loop<v><<<132, THREADS, STEPS * 2048>>>(clocks);
    loop<v><<<132, THREADS, STEPS * 2048>>>(clocks);
    long long taken;
    cudaError_t error = cudaMemcpy(&taken, clocks, sizeof taken, cudaMemcpyDeviceToHost);
    std::printf("%-32s %6.1f weights a clock and multiprocessor (%s)\n", names[v],
                (double)THREADS * 32 * LAPS / (double)taken, cudaGetErrorString(error));
}

/* One word of every code under every exponent, by the fp8 arrangement. */
template <class table> __global__ void decode_all(uint32_t *out, uint32_t n_exponents)
{
    uint32_t exponent = threadIdx.x;
    if (exponent >= n_exponents) return;
    for (int half = 0; half < 2; half++) { /* codes 0..7, then 8..15 with signs */
        uint32_t a[4];
        decode_fp8_word<table>(0x76543210u | (half ? 0x88888888u : 0), exponent, a);
        out[(exponent * 2 + half) * 2] = a[0], out[(exponent * 2 + half) * 2 + 1] = a[2];
    }
}

template <class table> int count_wrong(uint32_t *device, uint32_t n_exponents, bool is_e4m3)
{
    static const double values[8] = {0, .5, 1, 1.5, 2, 3, 4, 6};
    static uint32_t out[256];
    decode_all<table><<<1, 64>>>(device, n_exponents);
    cudaMemcpy(out, device, sizeof out, cudaMemcpyDeviceToHost);
    int wrong = 0;
    /* what makes .5 the least normal number under exponent 0 */
    const double unit = is_e4m3 ? std::ldexp(1.0, -5) : std::ldexp(1.0, -13);
    for (uint32_t e = 0; e < n_exponents; e++)
        for (int half = 0; half < 2; half++)
            for (int n = 0; n < 8; n++) {
                uint8_t byte = (uint8_t)(out[(e * 2 + half) * 2 + n / 4] >> 8 * (n % 4));
                __half_raw raw = __nv_cvt_fp8_to_halfraw(byte, is_e4m3 ? __NV_E4M3 : __NV_E5M2);
                double value = (double)__half2float(__half(raw)), expected = std::ldexp(values[n], (int)e) * unit;
                wrong += value != (half ? -expected : expected);
            }
    return wrong;
}

} // namespace

int main()
{
    long long *clocks;
    uint32_t *out;
    if (cudaMalloc(&clocks, 132 * sizeof *clocks) || cudaMalloc(&out, 1024)) return 1;
    std::printf("e4m3 decoding: %d of %d wrong over 12 exponents\n", count_wrong<magnitudes<3>>(out, 12, true),
                12 * 16);
    std::printf("e5m2 decoding: %d of %d wrong over 27 exponents\n", count_wrong<magnitudes<2>>(out, 27, false),
                27 * 16);
    measure<BF16>(clocks);
    measure<E4M3>(clocks);
    measure<E5M2>(clocks);
    measure<E5M2_FROM_BF16>(clocks);
    measure<BF16_FROM_FP8>(clocks);
    return 0;
}
