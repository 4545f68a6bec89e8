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
    return T.on_device ? min(max(max(*T.on_device, 0) - T.first, 0), T.n_tokens) : T.n_tokens;
}

/* One store, which the host sees at some time. */
static __device__ __forceinline__ void report_fault(uint64_t *faults, fault kind, int64_t token, int32_t value)
{
    *(volatile uint64_t *)&faults[kind] = FAULT_SEEN | (uint64_t)token << 32 | (uint32_t)value;
}

/* By one thread of a call's first kernel. */
static __device__ __forceinline__ void check_token_count(const token_count &T, uint64_t *faults)
{
    if (T.on_device && (*T.on_device < 0 || *T.on_device > T.T))
        report_fault(faults, FAULT_TOKEN_COUNT, T.T, *T.on_device);
}

/* Whether the current device has launches that overlap; all code for those that do waits for its predecessors. */
static inline bool launches_overlap(void)
{
    int device, major;
    return !cudaGetDevice(&device) && !cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) &&
           major >= 9;
}

/* A kernel whose blocks form clusters; more than one block a cluster only on Hopper. */
template <class Call>
static int launch_clusters(void (*kernel)(const Call), const Call *call, dim3 blocks, unsigned cluster_blocks,
                           int threads, size_t shared_bytes, cuda_stream stream)
{
    cudaLaunchAttribute attributes[2] = {};
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = 1;
    attributes[1].id = cudaLaunchAttributeClusterDimension;
    attributes[1].val.clusterDim = {cluster_blocks, 1, 1};
    cudaLaunchConfig_t config = {};
    config.gridDim = blocks;
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    config.attrs = attributes;
    config.numAttrs = !launches_overlap() ? 0 : cluster_blocks > 1 ? 2 : 1;
    return cudaLaunchKernelEx(&config, kernel, *call);
}

template <class Call>
static int launch(void (*kernel)(const Call), const Call *call, dim3 blocks, int threads, size_t shared_bytes,
                  cuda_stream stream)
{
    return launch_clusters(kernel, call, blocks, 1, threads, shared_bytes, stream);
}

/* A GEMM's kernels by activation: Kernels names their type, `function`, and one for each activation, `of`. */
template <class Kernels>
static typename Kernels::function *const by_activation[N_ACTIVATIONS] = {
    nullptr,
    Kernels::template of<MOE4_ACTIVATION_SWIGLU_OAI>, /* SILU: alpha 1, beta -0 */
    Kernels::template of<MOE4_ACTIVATION_SWIGLU_OAI>,
    Kernels::template of<MOE4_ACTIVATION_SITU>,
    Kernels::template of<MOE4_ACTIVATION_GEGLU>,
    Kernels::template of<MOE4_ACTIVATION_GEGLU_TANH>,
    Kernels::template of<MOE4_ACTIVATION_SWIGLU_STEP>,
    Kernels::template of<MOE4_ACTIVATION_RELU2>,
    Kernels::template of<MOE4_ACTIVATION_IDENTITY>,
};

/* Shared memory beyond what any kernel may have. */
template <class Call> static int allow_shared(void (*kernel)(const Call), int bytes)
{
    return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
}

template <class Kernels> static int allow_shared(int bytes)
{
    int error = cudaSuccess;
    for (typename Kernels::function *each : by_activation<Kernels>)
        if (each && !error) error = allow_shared(each, bytes);
    return error;
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

/* array[index] = sum, or round(array[index] + sum). */
static __device__ __forceinline__ void store_output(void *array, moe4_dtype dtype, moe4_write write, int64_t index,
                                                    float sum)
{
    if (write == MOE4_WRITE_ADD) sum = load_float(array, dtype, index) + sum;
    if (dtype == MOE4_DTYPE_F32) {
        ((float *)array)[index] = sum;
    } else if (dtype == MOE4_DTYPE_BF16) {
        ((uint16_t *)array)[index] = bf16_bits(sum);
    } else {
        uint16_t half;
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(sum));
        ((uint16_t *)array)[index] = half;
    }
}

#endif
