/* Launches that may overlap the end of the kernel before them in the stream: each kernel of the backend calls
 * begin_kernel before it touches anything that another one wrote. */
#ifndef MOE4_CUDA_LAUNCH_CUH
#define MOE4_CUDA_LAUNCH_CUH

#include <cuda_runtime.h>

#include "cuda/kernels.h"
#include "cuda/ptx.cuh"

/* The kernels before this one are over; the next one may come up. */
static __device__ __forceinline__ void begin_kernel(void)
{
    wait_for_predecessors();
    launch_dependents();
}

static __device__ __forceinline__ int32_t token_count_of(const token_count &T)
{
    return T.on_device ? *T.on_device : T.n_tokens;
}

template <class Call>
static int launch(void (*kernel)(const Call), const Call *call, dim3 blocks, int threads, size_t shared_bytes,
                  cuda_stream stream)
{
    cudaLaunchAttribute overlap = {};
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = blocks;
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    config.attrs = &overlap;
    config.numAttrs = 1;
    return cudaLaunchKernelEx(&config, kernel, *call);
}

/* Element `index` of an array of F32, F16 or BF16. */
static __device__ __forceinline__ float load_float(const void *array, moe4_dtype dtype, int64_t index)
{
    if (dtype == MOE4_DTYPE_F32) return ((const float *)array)[index];
    uint16_t half = ((const uint16_t *)array)[index];
    float value = __uint_as_float((uint32_t)half << 16);
    if (dtype == MOE4_DTYPE_F16) asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(half));
    return value;
}

static __device__ __forceinline__ uint16_t bf16_bits(float value)
{
    uint16_t bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

static __device__ __forceinline__ float bf16_float(uint16_t bits)
{
    return __uint_as_float((uint32_t)bits << 16);
}

#endif
