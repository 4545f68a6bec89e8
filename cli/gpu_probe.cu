/* What this GPU can do at best.
 *
 * Matrix products: the tensor cores' bf16 instruction over random operands in shared memory, on all multiprocessors at once
 * and nothing else; no whole matrix product is faster.  Memory: a copy by 16-byte loads and stores, one or several in flight a
 * thread, since cudaMemcpy within the device, done by a copy engine, reaches two thirds of what kernels do. */
#include <stdint.h>

#include "cuda/wgmma_sums.cuh"
#include "gpu_probe.h"

/* One stage of operands, 64 columns of K: A is 64 rows a warpgroup, B 128 rows for all of them. */
enum {
    N_WARPGROUPS = 4,
    N_STAGES = 4,
    ROW_BYTES = 128,
    A_BYTES = 64 * ROW_BYTES,
    B_BYTES = 128 * ROW_BYTES,
    STAGE_BYTES = N_WARPGROUPS * A_BYTES + B_BYTES,
    N_SUMS = 64, /* f32 a thread, of 64 x 128 a warpgroup */
    SHARED_BYTES = N_STAGES * STAGE_BYTES + 1024 /* to align it */
};

static __device__ uint32_t random_bits(uint32_t x)
{
    x = (x ^ x >> 16) * 0x7feb352du;
    x = (x ^ x >> 15) * 0x846ca68bu;
    return x ^ x >> 16;
}

/* Two bf16 of random sign and mantissa in 0.25 .. 2. */
static __device__ uint32_t random_pair(uint32_t index)
{
    uint32_t bits = random_bits(index);
    uint32_t exponents = (125 + bits % 3) << 7 | (125 + (bits >> 8) % 3) << 23;
    return (bits & 0x807F807F) | exponents;
}

static __device__ long long nanoseconds_now()
{
    long long now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

/* 128-byte rows in the 128-byte swizzle, eight rows 1024 bytes from the next eight. */
static __device__ uint64_t describe(uint32_t shared_address)
{
    return (uint64_t)(shared_address >> 4) | (uint64_t)1 << 16 | (uint64_t)(1024 >> 4) << 32 | (uint64_t)1 << 62;
}

static __device__ void multiply(float (&d)[N_SUMS], uint64_t a, uint64_t b)
{
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" WGMMA_SUMS_128 "}, %64, %65, 1, 1, 1, 0, 0;"
                 : WGMMA_BIND_128(d)
                 : "l"(a), "l"(b));
}

/* Before the tensor cores read what ordinary stores have written. */
static __device__ void operands_written()
{
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/* All stages once. */
static __device__ void multiply_stages(float (&d)[N_SUMS], uint32_t shared)
{
    for (int stage = 0; stage < N_STAGES; stage++) {
        const uint32_t a = shared + stage * STAGE_BYTES + threadIdx.x / 128 * A_BYTES;
        const uint32_t b = shared + stage * STAGE_BYTES + N_WARPGROUPS * A_BYTES;
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
        for (int k = 0; k < 64; k += 16) multiply(d, describe(a + 2 * k), describe(b + 2 * k));
        asm volatile("wgmma.commit_group.sync.aligned;\n wgmma.wait_group.sync.aligned 0;" ::: "memory");
    }
}

#else

static __device__ void operands_written() {}

/* The same products with the instruction that all GPUs since compute capability 8.0 have, operands in registers. */
static __device__ void multiply_stages(float (&d)[N_SUMS], uint32_t)
{
    uint32_t a[4], b[2];
    for (int i = 0; i < 4; i++) a[i] = random_pair(threadIdx.x * 8 + i);
    for (int i = 0; i < 2; i++) b[i] = random_pair(threadIdx.x * 8 + 4 + i);
    for (int k = 0; k < 64 * N_STAGES; k += 16)
#pragma unroll
        for (int n = 0; n < N_SUMS; n += 4)
            asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
                         "{%8, %9}, {%0, %1, %2, %3};"
                         : "+f"(d[n]), "+f"(d[n + 1]), "+f"(d[n + 2]), "+f"(d[n + 3])
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

#endif

static __global__ void __launch_bounds__(128 * N_WARPGROUPS, 1) multiply_kernel(int repeat, gpu_probe_time *time)
{
    extern __shared__ uint8_t memory[];
    const uint32_t shared = ((uint32_t)__cvta_generic_to_shared(memory) + 1023) / 1024 * 1024;
    uint32_t *words = (uint32_t *)(memory + (shared - (uint32_t)__cvta_generic_to_shared(memory)));
    for (int i = threadIdx.x; i < N_STAGES * STAGE_BYTES / 4; i += blockDim.x)
        words[i] = random_pair(i + blockIdx.x * 65536);
    operands_written();
    __syncthreads();
    float d[N_SUMS] = {};
    const long long clocks = clock64(), nanoseconds = nanoseconds_now();
    for (int i = 0; i < repeat; i++) multiply_stages(d, shared);
    float sum = 0;
    for (int i = 0; i < N_SUMS; i++) sum += d[i];
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        time->clocks = clock64() - clocks;
        time->nanoseconds = nanoseconds_now() - nanoseconds;
    }
    if (sum == 0.123f) time->clocks = 0; /* so that the sums are needed */
}

int gpu_probe_launch(void *stream, int n_multiprocessors, int capability_major, int repeat, gpu_probe_time *device_time,
                     double *flops, const char **instruction)
{
    *flops = 2.0 * (64 * N_WARPGROUPS) * 128 * (64 * N_STAGES);
    *instruction = capability_major == 9 ? "wgmma m64n128k16" : "mma m16n8k16";
    cudaError_t error =
        cudaFuncSetAttribute(multiply_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_BYTES);
    if (error != cudaSuccess) return error;
    multiply_kernel<<<n_multiprocessors, 128 * N_WARPGROUPS, SHARED_BYTES, (cudaStream_t)stream>>>(repeat, device_time);
    return cudaGetLastError();
}

/* ---- Memory ------------------------------------------------------------------------------------------------------ */

enum { COPY_THREADS = 256 };

template <int N_LOADS>
static __global__ void copy_kernel(uint4 *to, const uint4 *from)
{
    const size_t first = (size_t)blockIdx.x * (COPY_THREADS * N_LOADS) + threadIdx.x;
    uint4 words[N_LOADS];
#pragma unroll
    for (int i = 0; i < N_LOADS; i++) words[i] = __ldcs(from + first + i * COPY_THREADS);
#pragma unroll
    for (int i = 0; i < N_LOADS; i++) __stcs(to + first + i * COPY_THREADS, words[i]);
}

template <int N_LOADS>
static int copy_launch(cudaStream_t stream, void *to, const void *from, size_t n_bytes)
{
    const size_t n_blocks = n_bytes / (COPY_THREADS * N_LOADS * sizeof(uint4));
    copy_kernel<N_LOADS><<<(unsigned)n_blocks, COPY_THREADS, 0, stream>>>((uint4 *)to, (const uint4 *)from);
    return cudaGetLastError();
}

int gpu_copy_launch(void *stream, int variant, void *to, const void *from, size_t n_bytes)
{
    static int (*const launches[GPU_COPY_VARIANTS])(cudaStream_t, void *, const void *, size_t) = {
        copy_launch<1>, copy_launch<4>, copy_launch<8>};
    return launches[variant]((cudaStream_t)stream, to, from, n_bytes);
}
