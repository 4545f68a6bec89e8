/* fp8_bench: the grouped GEMMs of fp8 compute alone, on random weights and rows made on the GPU.
 *
 * Checks sampled rows of both against double precision, and that rows have the same bits under every tiling; measures
 * what the tensor cores' sums lose, apart from any rounding of results, on ordinary and on adverse data; then times
 * both GEMMs.  `fp8_bench [check|time [SHAPE]]`.  Not part of the library. */
#include "cuda/bench.cuh"
#include "cuda/fp8.cuh"
#include "cuda/launch.cuh"
#include "cuda/pack.h"

namespace
{

constexpr int BASE = 240;      /* stored scale byte of relative exponent 0, which is 2^-13 */
constexpr float UNIT = 512.0f; /* so that weights are codes times 2^-4 and up */

__global__ void fill_weights(uint32_t *words, int64_t n, uint64_t seed)
{
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < n; i += (int64_t)gridDim.x * blockDim.x) {
        uint32_t h = hash(seed ^ (uint64_t)i << 8);
        bool is_scale = i % (CUDA_STEP_BYTES / 4) < CUDA_STEP_SCALES / 4;
        words[i] = is_scale ? (h & 0x03030303u) + BASE * 0x01010101u : h;
    }
}

/* e4m3 codes of about a normal spread. */
__host__ __device__ uint8_t x_code(int64_t token, int64_t k)
{
    const uint32_t h = hash((uint64_t)token << 20 ^ (uint64_t)k ^ 5ull << 50);
    float sum = 0;
    for (int n = 0; n < 4; n++) sum += (float)(h >> 8 * n & 0xFF) / 256.0f - 0.5f;
    const float magnitude = sum < 0 ? -sum * 32 : sum * 32;
    uint32_t exponent = 0;
    while (exponent < 8 && (float)(2u << exponent) <= magnitude) exponent++;
    const uint32_t mantissa = (uint32_t)(magnitude / (float)(1u << exponent) * 8) & 7;
    return (uint8_t)((sum < 0 ? 0x80 : 0) | (exponent + 7) << 3 | mantissa);
}

__global__ void fill_x(fp8_rows x, const int32_t *source, const int32_t *in_expert, int64_t n_rows, int64_t K)
{
    for (int64_t row = blockIdx.x; row < n_rows; row += gridDim.x) {
        for (int64_t k = threadIdx.x; k < (K + 127) / 128 * 128; k += blockDim.x)
            x.codes[(k / 128 * x.rows + row) * 128 + fp8_chunk_offset(in_expert[row], k % 128 / 16) + k % 16] =
                k < K ? x_code(source[row], k) : 0;
        if (threadIdx.x == 0) x.scales[row] = 1.0f / 256;
    }
}

double e4m3(uint8_t code)
{
    int exponent = code >> 3 & 15, mantissa = code & 7;
    double magnitude = exponent ? std::ldexp(8 + mantissa, exponent - 10) : std::ldexp(mantissa, -9);
    return code & 0x80 ? -magnitude : magnitude;
}

struct shape {
    const char *name;
    int L, A, H, I;
};
const shape shapes[] = {{"oss120b", 128, 4, 2880, 2880},
                        {"oss20b", 32, 4, 2880, 2880},
                        {"dsv3", 256, 8, 7168, 2048},
                        {"v4flash", 256, 6, 4096, 2048}};

/* The routed rows of T tokens, grouped by expert and cut into tiles of at most N. */
struct grouping {
    std::vector<int32_t> source, in_expert, expert;
    std::vector<token_tile> tiles;
    int n_experts = 0;
};

grouping group(const shape &s, int first, int T, int N)
{
    grouping g;
    std::vector<std::vector<int32_t>> tokens(s.L);
    for (int t = first; t < first + T; t++)
        for (int a = 0; a < s.A; a++) tokens[hash((uint64_t)t * s.A + a | 9ull << 50) % s.L].push_back(t);
    for (int l = 0; l < s.L; l++) {
        int begin = (int)g.source.size(), n = (int)tokens[l].size();
        for (int i = 0; i < n; i++) g.source.push_back(tokens[l][i]), g.in_expert.push_back(i), g.expert.push_back(l);
        g.n_experts += n > 0;
        int n_tiles = (n + N - 1) / N, each = n ? ((n + n_tiles - 1) / n_tiles + 7) / 8 * 8 : 1;
        for (int r = 0; r < n; r += each) g.tiles.push_back({l, begin + r, std::min(each, n - r)});
    }
    return g;
}

enum { MOST_CLAIMS = 64 };

struct bench {
    shape s;
    fp8_call gate_up, down;
    int n_sm;
    int64_t rows;
    int32_t *claims; /* a launch takes the next */
    mutable int n_claims;
};

void clear_claims(const bench &b, cudaStream_t stream)
{
    check(cudaMemsetAsync(b.claims, 0, MOST_CLAIMS * sizeof *b.claims, stream), "claims");
    b.n_claims = 0;
}

void launch_kernel(const bench &b, void (*kernel)(fp8_call), int shared_bytes, fp8_call call, cudaStream_t stream)
{
    call.claims = b.claims + b.n_claims++;
    check((cudaError_t)launch(kernel, &call, b.n_sm, fp8::THREADS, shared_bytes, stream), "launch");
}

void launch_gate_up(const bench &b, const fp8_call &call, cudaStream_t stream)
{
    launch_kernel(b, fp8::kernel<fp8::GATE_UP, FP8_SWIGLU>, fp8::ring_size<fp8::GATE_UP>::bytes, call, stream);
}

void launch_down(const bench &b, const fp8_call &call, cudaStream_t stream)
{
    launch_kernel(b, fp8::kernel<fp8::DOWN, MOE4_ACTIVATION_IDENTITY>, fp8::ring_size<fp8::DOWN>::bytes, call, stream);
}

fp8_call call_of(const shape &s, int n_tiles, int K, uint64_t seed)
{
    fp8_call call = {};
    call.n_tiles = n_tiles;
    call.n_steps = (K + CUDA_STEP_K - 1) / CUDA_STEP_K;
    int64_t bytes = (int64_t)s.L * n_tiles * call.n_steps * CUDA_STEP_BYTES;
    uint8_t *weights = device_array<uint8_t>(bytes);
    fill_weights<<<1024, 256>>>((uint32_t *)weights, bytes / 4, seed);
    std::vector<float> bias((size_t)s.L * n_tiles * 64);
    for (size_t i = 0; i < bias.size(); i++) bias[i] = (float)(hash(i ^ seed << 40) % 256) / 512 - 0.25f;
    call.weights = weights;
    call.bias = device_copy(bias);
    call.tile_base = device_copy(std::vector<uint8_t>((size_t)s.L * n_tiles, BASE));
    call.unit = device_copy(std::vector<float>(s.L, UNIT));
    call.params = device_copy(std::vector<activation_params>(s.L, activation_params{1.702f, 1.0f, 7.0f}));
    return call;
}

fp8_rows rows_of(int64_t rows, int64_t K, bool many_scales)
{
    int64_t blocks = (K + 127) / 128;
    return {device_array<uint8_t>(rows * blocks * 128), device_array<float>(rows * (many_scales ? blocks : 1)), rows};
}

bench prepare(const shape &s, int max_T)
{
    bench b = {s};
    b.claims = device_array<int32_t>(MOST_CLAIMS);
    cudaDeviceProp properties;
    check(cudaGetDeviceProperties(&properties, 0), "device");
    b.n_sm = properties.multiProcessorCount;
    b.rows = (int64_t)max_T * s.A;
    b.gate_up = call_of(s, s.I / CUDA_GATED_COLUMNS, s.H, 1);
    b.down = call_of(s, (s.H + 63) / 64, s.I, 2);
    b.gate_up.x = rows_of(b.rows, s.H, false);
    b.gate_up.v = b.down.x = rows_of(b.rows, s.I, true);
    b.gate_up.columns = s.I;
    b.down.columns = s.H;
    b.down.ldout = s.H;
    b.down.out = device_array<uint16_t>(b.rows * s.H);
    return b;
}

struct device_grouping {
    int32_t *n_tiles, *source, *in_expert;
    token_tile *tiles;
};

device_grouping upload(const grouping &g)
{
    return {device_copy(std::vector<int32_t>{(int32_t)g.tiles.size()}), device_copy(g.source), device_copy(g.in_expert),
            device_copy(g.tiles)};
}

void release(const device_grouping &d)
{
    cudaFree(d.n_tiles), cudaFree(d.source), cudaFree(d.in_expert), cudaFree(d.tiles);
}

void set_tiles(bench &b, const device_grouping &d)
{
    b.gate_up.token_tiles = b.down.token_tiles = d.tiles;
    b.gate_up.n_token_tiles = b.down.n_token_tiles = d.n_tiles;
}

/* ---- Correctness ------------------------------------------------------------------------------------------------- */

const double magnitudes[8] = {0, .5, 1, 1.5, 2, 3, 4, 6};

/* Weight (r, k) of a step. */
double weight_of(const uint8_t *step, int r, int k)
{
    int warp = r / 16, half = r / 8 % 2, g = r % 8, block = k / 32, in = k % 32;
    int lane = g * 4 + in % 16 / 4, n = in / 16 * 4 + in % 4;
    uint32_t word;
    std::memcpy(&word, step + CUDA_STEP_SCALES + (warp * 32 + lane) * 16 + (block * 2 + half) * 4, 4);
    uint32_t code = fp8_split(word) >> 4 * n & 15;
    int scale = step[warp * 32 + g * 4 + block * 2 + half] - BASE;
    double magnitude = std::ldexp(magnitudes[code & 7], scale - 4);
    return code & 8 ? -magnitude : magnitude;
}

struct outputs {
    std::vector<uint8_t> codes;
    std::vector<float> scales;
    std::vector<uint16_t> z;
};

outputs run_layer(bench &b, int T, int N)
{
    grouping g = group(b.s, 0, T, N);
    device_grouping d = upload(g);
    set_tiles(b, d);
    fill_x<<<4096, 128>>>(b.gate_up.x, d.source, d.in_expert, (int64_t)g.source.size(), b.s.H);
    int64_t v_blocks = (b.s.I + 127) / 128;
    check(cudaMemset(b.gate_up.v.codes, 0x7F, b.rows * v_blocks * 128), "poison");
    check(cudaMemset(b.gate_up.v.scales, 0xFF, b.rows * v_blocks * 4), "poison");
    check(cudaMemset(b.down.out, 0xFF, b.rows * b.s.H * 2), "poison");
    clear_claims(b, 0);
    launch_gate_up(b, b.gate_up, 0);
    launch_down(b, b.down, 0);
    check(cudaDeviceSynchronize(), "run");
    release(d);
    return {fetch(b.gate_up.v.codes, b.rows * v_blocks * 128), fetch(b.gate_up.v.scales, b.rows * v_blocks),
            fetch(b.down.out, b.rows * b.s.H)};
}

double sum_of(const bench &b, const fp8_call &call, int l, int tile, int r, int K, const std::vector<double> &x,
              double *magnitude)
{
    size_t bytes = (size_t)call.n_steps * CUDA_STEP_BYTES;
    static std::vector<uint8_t> host;
    static const uint8_t *held;
    const uint8_t *from = call.weights + ((size_t)l * call.n_tiles + tile) * bytes;
    if (held != from) host = fetch(from, bytes), held = from;
    double sum = 0;
    *magnitude = 0;
    for (int k = 0; k < K; k++) {
        double product = weight_of(&host[k / 64 * CUDA_STEP_BYTES], r, k % 64) * x[k];
        sum += product, *magnitude += std::fabs(product);
    }
    return sum;
}

std::vector<double> v_row(const bench &b, const outputs &out, int64_t row, int in_expert)
{
    std::vector<double> v(b.s.I);
    for (int k = 0; k < b.s.I; k++) {
        int64_t at = k / 128 * b.rows + row;
        v[k] = e4m3(out.codes[at * 128 + (((k % 128 / 16) ^ (in_expert & 7)) << 4) + k % 16]) * out.scales[at];
    }
    return v;
}

bool check_stages(const bench &b, const outputs &out, const grouping &g)
{
    double error = 0, reference = 0, quantised = 0, z_error = 0, z_reference = 0, worst = 0;
    long outside = 0, n = 0;
    std::vector<float> bias1 = fetch(b.gate_up.bias, (size_t)b.s.L * b.gate_up.n_tiles * 64);
    std::vector<float> bias2 = fetch(b.down.bias, (size_t)b.s.L * b.down.n_tiles * 64);
    for (int sample = 0; sample < 24; sample++) {
        int64_t row = hash(sample | 11ull << 50) % g.source.size();
        int l = g.expert[row], in = g.in_expert[row], tile = hash(sample | 12ull << 50) % b.gate_up.n_tiles;
        if (sample == 0) tile = b.gate_up.n_tiles - 1;
        std::vector<double> x(b.s.H), v = v_row(b, out, row, in);
        for (int k = 0; k < b.s.H; k++) x[k] = e4m3(x_code(g.source[row], k)) / 256;
        double magnitude;
        for (int i = 0; i < 32; i++) {
            int r = i / 8 * 16 + i % 8;
            const float *bias = &bias1[((size_t)l * b.gate_up.n_tiles + tile) * 64];
            double gate = sum_of(b, b.gate_up, l, tile, r, b.s.H, x, &magnitude) + bias[r];
            double up = sum_of(b, b.gate_up, l, tile, r + 8, b.s.H, x, &magnitude) + bias[r + 8];
            double exact = swiglu(gate, up), got = v[tile * 32 + i];
            int64_t at = tile * 32 / 128 * b.rows + row;
            error += (got - exact) * (got - exact), reference += exact * exact;
            quantised += std::pow(bf16_value(bf16_of((float)exact)) - got, 2);
            /* a code's step is at most an eighth of it or the scale's 2^-9 */
            if (!(std::fabs(got - exact) <= std::fabs(exact) * 0.0701 + out.scales[at] * 0.002 + 0.01)) outside++;
        }
        tile = sample ? hash(sample | 13ull << 50) % b.down.n_tiles : b.down.n_tiles - 1;
        for (int r = 0; r < 64; r += 5) {
            int column = down_column(tile, r);
            double exact = sum_of(b, b.down, l, tile, r, b.s.I, v, &magnitude) +
                           bias2[((size_t)l * b.down.n_tiles + tile) * 64 + r];
            double got = bf16_value(out.z[row * b.s.H + column]), e = 136.0 / 8192 * magnitude;
            z_error += (got - exact) * (got - exact), z_reference += exact * exact, n++;
            worst = std::max(worst, (std::fabs(got - exact) - std::fabs(exact) / 256) / magnitude);
            if (!(std::fabs(got - exact) <= e + std::fabs(exact) / 256)) outside++;
        }
    }
    std::printf(
        "%s: v' against exact %.3e (quantised from exact %.3e), z' %.3e, beyond rounding at most %.2e of the sum "
        "of magnitudes; %ld outside\n",
        b.s.name, std::sqrt(error / reference), std::sqrt(quantised / reference), std::sqrt(z_error / z_reference),
        worst, outside);
    return outside == 0;
}

bool check_bits(bench &b, int T, const outputs &reference)
{
    bool all = true;
    for (int N : {8, 16, 40, 64, 80, 96, 112, 128, 144, 176, 192, 208, 240, 256, 272}) {
        outputs out = run_layer(b, T, N);
        bool v = out.codes != reference.codes, z = out.z != reference.z;
        if (v || z) std::printf("FAIL bits differ: tiles of %d: v %d z %d\n", N, v, z), all = false;
    }
    if (all) std::printf("%s: equal bits under every tiling of T = %d\n", b.s.name, T);
    return all;
}

/* ---- What the tensor cores' sums lose -------------------------------------------------------------------------------
 */

enum pattern { ORDINARY, POSITIVE, LARGE_FIRST, N_PATTERNS };
const char *const pattern_names[] = {"ordinary", "all positive", "a large block first"};

/* One row, biases minus the exact sums: what comes out is the error. */
void measure_loss(bench &b, pattern p)
{
    const int K = b.down.n_steps * 64, n_tiles = 4, blocks = (K + 127) / 128;
    std::vector<uint8_t> codes((size_t)b.rows * blocks * 128),
        weights((size_t)n_tiles * b.down.n_steps * CUDA_STEP_BYTES);
    std::vector<double> x(K);
    for (int k = 0; k < K; k++) {
        uint8_t code = x_code(77, k);
        if (p == POSITIVE) code &= 0x7F;
        if (p == LARGE_FIRST) code = k % 128 < 32 ? 0x7E : (uint8_t)(0x18 | (code & 0x87));
        x[k] = e4m3(code);
        codes[(size_t)k / 128 * b.rows * 128 + k % 128] = code;
    }
    for (size_t i = 0; i < weights.size(); i += 4) {
        uint32_t h = hash(i | 21ull << 50);
        bool is_scale = i % CUDA_STEP_BYTES < CUDA_STEP_SCALES;
        uint32_t word = is_scale ? (h & 0x03030303u) + BASE * 0x01010101u : p == ORDINARY ? h : h & 0x77777777u;
        std::memcpy(&weights[i], &word, 4);
    }
    std::vector<float> bias((size_t)n_tiles * 64);
    double reference = 0, error = 0, worst = 0;
    std::vector<double> exact(bias.size()), magnitude(bias.size());
    for (size_t i = 0; i < bias.size(); i++) {
        for (int k = 0; k < K; k++) {
            const uint8_t *step = &weights[(i / 64 * b.down.n_steps + k / 64) * CUDA_STEP_BYTES];
            double product = weight_of(step, i % 64, k % 64) * x[k];
            exact[i] += product, magnitude[i] += std::fabs(product);
        }
        bias[i] = (float)-exact[i], reference += exact[i] * exact[i];
    }
    fp8_call call = b.down;
    std::vector<float> scales((size_t)b.rows * blocks, 1.0f);
    call.x = {device_copy(codes), device_copy(scales), b.rows};
    call.weights = device_copy(weights), call.bias = device_copy(bias);
    call.n_tiles = n_tiles, call.columns = n_tiles * 64;
    call.token_tiles = device_copy(std::vector<token_tile>{{0, 0, 1}});
    call.n_token_tiles = device_copy(std::vector<int32_t>{1});
    clear_claims(b, 0);
    launch_down(b, call, 0);
    check(cudaDeviceSynchronize(), "loss");
    std::vector<uint16_t> z = fetch(call.out, bias.size());
    for (size_t i = 0; i < bias.size(); i++) {
        int column = down_column((int)i / 64, i % 64);
        double got = bf16_value(z[column]) - (exact[i] + bias[i]);
        error += got * got, worst = std::max(worst, std::fabs(got) / magnitude[i]);
    }
    std::printf("K %5d %-20s relative Frobenius %.2e, worst %.2e of the sum of magnitudes\n", K, pattern_names[p],
                std::sqrt(error / reference), worst);
}

/* ---- Timing ----------------------------------------------------------------------------------------------------- */

void time_shape(bench &b, int T)
{
    const int n_sets = T >= 2048 ? 2 : std::min(24, 8192 / T);
    std::vector<device_grouping> sets;
    double experts = 0;
    for (int n = 0; n < n_sets; n++) {
        grouping g = group(b.s, n * T % 8192, T, FP8_MAX_ROWS);
        experts += g.n_experts;
        sets.push_back(upload(g));
        fill_x<<<4096, 128>>>(b.gate_up.x, sets[n].source, sets[n].in_expert, (int64_t)g.source.size(), b.s.H);
    }
    double ms[2];
    for (int is_down = 0; is_down < 2; is_down++)
        ms[is_down] = median_ms([&](cudaStream_t stream) {
                          clear_claims(b, stream);
                          for (const device_grouping &d : sets) {
                              set_tiles(b, d);
                              is_down ? launch_down(b, b.down, stream) : launch_gate_up(b, b.gate_up, stream);
                          }
                      }) /
                      n_sets;
    for (const device_grouping &d : sets) release(d);
    double step = experts / n_sets * CUDA_STEP_BYTES, flops = 2.0 * T * b.s.A * b.s.H * b.s.I;
    std::printf("%-8s T %5d  gate/up %8.4f ms %6.0f GB/s %6.0f TFLOP/s   down %8.4f ms %6.0f GB/s %6.0f TFLOP/s\n",
                b.s.name, T, ms[0], step * b.gate_up.n_tiles * b.gate_up.n_steps / ms[0] * 1e-6,
                2 * flops / ms[0] * 1e-9, ms[1], step * b.down.n_tiles * b.down.n_steps / ms[1] * 1e-6,
                flops / ms[1] * 1e-9);
}

} // namespace

int main(int argc, char **argv)
{
    const bool checks = argc < 2 || !std::strcmp(argv[1], "check"), times = argc < 2 || !std::strcmp(argv[1], "time");
    std::setvbuf(stdout, nullptr, _IOLBF, 1 << 16);
    check(cudaFuncSetAttribute(fp8::kernel<fp8::GATE_UP, FP8_SWIGLU>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               fp8::ring_size<fp8::GATE_UP>::bytes),
          "shared memory");
    check(cudaFuncSetAttribute(fp8::kernel<fp8::DOWN, MOE4_ACTIVATION_IDENTITY>,
                               cudaFuncAttributeMaxDynamicSharedMemorySize, fp8::ring_size<fp8::DOWN>::bytes),
          "shared memory");
    bool good = true;
    for (const shape &s : shapes) {
        if (argc > 2 && std::strcmp(argv[2], s.name)) continue;
        bench b = prepare(s, 8192);
        if (checks && s.L > 32) {
            grouping g = group(s, 0, 4000, FP8_MAX_ROWS);
            outputs out = run_layer(b, 4000, FP8_MAX_ROWS);
            good &= check_stages(b, out, g) && check_bits(b, 4000, out);
            for (int p = 0; p < N_PATTERNS; p++) measure_loss(b, (pattern)p);
        }
        for (int T : {1, 8, 32, 128, 512, 2048, 8192})
            if (times) time_shape(b, T);
        for (const fp8_call *call : {&b.gate_up, &b.down})
            cudaFree((void *)call->weights), cudaFree(call->x.codes), cudaFree(call->x.scales);
        cudaFree(b.down.out);
    }
    return !good;
}
