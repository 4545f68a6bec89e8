/* What this GPU can do at best.
 *
 * Matrix products: the tensor cores' bf16 instruction over random operands in shared memory, on all multiprocessors at once
 * and nothing else; no whole matrix product is faster.  Memory: a copy by 16-byte loads and stores, one or several in flight a
 * thread, since cudaMemcpy within the device, done by a copy engine, reaches two thirds of what kernels do. */
#include <stdint.h>

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
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, %64, %65, 1, 1, 1, 0, 0;"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
          "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),
          "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),
          "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]),
          "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]),
          "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]),
          "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]),
          "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
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
