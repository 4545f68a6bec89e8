/* What the programs share that check and time GEMM kernels: numbers, memory of the device, a median. */
#ifndef MOE4_CUDA_BENCH_CUH
#define MOE4_CUDA_BENCH_CUH

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

namespace
{

void check(cudaError_t error, const char *what)
{
    if (error == cudaSuccess) return;
    std::printf("FAIL %s: %s\n", what, cudaGetErrorString(error));
    std::exit(1);
}

/* ---- Numbers ----------------------------------------------------------------------------------------------------- */

__host__ __device__ uint32_t hash(uint64_t x)
{
    x = (x + 0x9E3779B97F4A7C15ull) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ x >> 27) * 0x94D049BB133111EBull;
    return (uint32_t)(x >> 32);
}

float bf16_value(uint16_t x)
{
    uint32_t bits = (uint32_t)x << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

/* To nearest, ties to even; finite values. */
uint16_t bf16_of(float x)
{
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

/* MOE4_ACTIVATION_SWIGLU_OAI with gpt-oss's alpha and limit. */
double swiglu(double g, double u)
{
    g = std::min(g, 7.0), u = std::max(-7.0, std::min(u, 7.0));
    return g / (1 + std::exp(-1.702 * g)) * (u + 1);
}

/* The column of the output that row r of down's tile is. */
int down_column(int tile, int r)
{
    return tile * 64 + r / 16 * 16 + r % 8 * 2 + r / 8 % 2;
}

/* ---- Memory ------------------------------------------------------------------------------------------------------ */

template <class T> T *device_array(size_t n)
{
    void *memory;
    check(cudaMalloc(&memory, n * sizeof(T)), "cudaMalloc");
    return (T *)memory;
}

template <class T> T *device_copy(const std::vector<T> &host)
{
    T *memory = device_array<T>(host.size());
    check(cudaMemcpy(memory, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice), "copy");
    return memory;
}

template <class T> std::vector<T> fetch(const T *memory, size_t n)
{
    std::vector<T> host(n);
    check(cudaMemcpy(host.data(), memory, n * sizeof(T), cudaMemcpyDeviceToHost), "fetch");
    return host;
}

/* ---- Time -------------------------------------------------------------------------------------------------------- */

/* Median of 11 replays of a graph, ms, after three that do not count. */
double median_ms(cudaGraphExec_t graph, cudaStream_t stream)
{
    std::vector<float> times;
    cudaEvent_t begin, end;
    cudaEventCreate(&begin), cudaEventCreate(&end);
    for (int n = 0; n < 14; n++) {
        cudaEventRecord(begin, stream);
        cudaGraphLaunch(graph, stream);
        cudaEventRecord(end, stream);
        check(cudaEventSynchronize(end), "timing");
        float ms;
        cudaEventElapsedTime(&ms, begin, end);
        if (n >= 3) times.push_back(ms);
    }
    cudaEventDestroy(begin), cudaEventDestroy(end);
    std::sort(times.begin(), times.end());
    return times[times.size() / 2];
}

/* The same of whatever `launches(stream)` puts into a stream. */
template <class F> double median_ms(const F &launches)
{
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    check(cudaStreamCreate(&stream), "stream");
    cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal);
    launches(stream);
    check(cudaStreamEndCapture(stream, &graph), "capture");
    check(cudaGraphInstantiate(&executable, graph, 0), "graph");
    const double ms = median_ms(executable, stream);
    cudaGraphExecDestroy(executable), cudaGraphDestroy(graph), cudaStreamDestroy(stream);
    return ms;
}

} // namespace

#endif
