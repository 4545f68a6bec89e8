/* gemm_bench: the grouped GEMM kernels alone, at one shape, on random weights made on the GPU.
 *
 * Checks sampled rows of both GEMMs against double precision, exact integers bit for bit, and that a token's rows have
 * the same bits at every T and with every tiling; then times them.  Not part of the library. */
#include "cuda/bench.cuh"
#include "cuda/gemm.cuh"
#include "cuda/resident.cuh"

namespace
{

constexpr int L = 128, A = 4, H = 2880, I = 2880, MAX_T = 8192, R = MAX_T * A;
constexpr int STEPS = H / CUDA_STEP_K;

/* The kernels for gate/up and down, and the most rows of a token tile that they take. */
struct form {
    const char *name;
    int rows;
    void (*kernels[2])(const gemm_call);
    int threads, shared_bytes;
};

constexpr auto SWIGLU = MOE4_ACTIVATION_SWIGLU_OAI, IDENTITY = MOE4_ACTIVATION_IDENTITY;
const form wide = {"wide",
                   MAX_TOKENS,
                   {gemm_kernel<wide_block, SWIGLU>, gemm_kernel<wide_block, IDENTITY>},
                   gemm_threads<wide_block>,
                   gemm_shared_bytes<wide_block>},
           narrow = {"narrow",
                     NARROW_TOKENS,
                     {gemm_kernel<narrow_block, SWIGLU>, gemm_kernel<narrow_block, IDENTITY>},
                     gemm_threads<narrow_block>,
                     gemm_shared_bytes<narrow_block>},
           resident = {"resident",
                       RESIDENT_ROWS,
                       {resident_kernel<3, SWIGLU>, resident_kernel<3, IDENTITY>},
                       RESIDENT_THREADS,
                       RESIDENT_SHARED_BYTES},
           streaming = {"streaming", STREAM_ROWS};
static_assert(STEPS % 3 == 0);
enum { STREAM_BYTES = STREAM_SHARED_BYTES + STREAM_SLACK };
void (*const stream_kernels[])(const stream_call) = {stream_kernel<SWIGLU>, stream_kernel<IDENTITY>};
const int tilings[] = {8, 16, 24, 32, 64, 80, 96, 128, 160}; /* most rows of a token tile */

__global__ void fill_weights(uint32_t *words, int64_t n, int first_scale, int n_scales, uint64_t seed)
{
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < n; i += (int64_t)gridDim.x * blockDim.x) {
        uint32_t h = hash(seed ^ (uint64_t)i << 8), word = h;
        if (i % (CUDA_STEP_BYTES / 4) < CUDA_STEP_SCALES / 4) {
            word = 0;
            for (int b = 0; b < 4; b++) word |= (first_scale + (h >> 8 * b & 255) % n_scales) << 8 * b;
        }
        words[i] = word;
    }
}

/* The routed rows of tokens first .. first+T-1, grouped by expert and cut into tiles of N. */
struct grouping {
    std::vector<int32_t> source, slot;
    std::vector<token_tile> tiles;
    int n_experts = 0;
};

grouping group(const std::vector<int32_t> &ids, int first, int T, int N)
{
    grouping g;
    std::vector<std::vector<int32_t>> slots(L);
    for (int slot = first * A; slot < (first + T) * A; slot++) slots[ids[slot]].push_back(slot);
    for (int l = 0; l < L; l++) {
        int begin = (int)g.source.size(), n = (int)slots[l].size();
        for (int32_t slot : slots[l]) g.source.push_back(slot / A), g.slot.push_back(slot);
        g.n_experts += n > 0;
        int n_tiles = (n + N - 1) / N, each = n ? ((n + n_tiles - 1) / n_tiles + 7) / 8 * 8 : 1;
        for (int r = 0; r < n; r += each) g.tiles.push_back({l, begin + r, std::min(each, n - r)});
    }
    return g;
}

struct device_grouping {
    int32_t *source, *n_tiles;
    token_tile *tiles;
};

device_grouping upload(const grouping &g)
{
    return {device_copy(g.source), device_copy(std::vector<int32_t>{(int32_t)g.tiles.size()}), device_copy(g.tiles)};
}

void release(const device_grouping &g)
{
    cudaFree(g.source), cudaFree(g.n_tiles), cudaFree(g.tiles);
}

struct setup {
    gemm_call gate_up, down;
    std::vector<uint16_t> x;
    std::vector<int32_t> ids;
    std::vector<float> bias1, bias2;
    uint16_t *v, *z;
    int n_sm;
    const form *by;
};

void launch_stream(const setup &s, const gemm_call &gemm, bool is_down, cudaStream_t stream)
{
    stream_call call = {};
    call.gemm = gemm;
    call.n_stages = STREAM_LEAST_STAGES;
    if (!is_down)
        call.next_weights = s.down.weights, call.next_tiles = s.down.n_tiles, call.next_steps = s.down.n_steps;
    stream_kernels[is_down]<<<s.n_sm, STREAM_THREADS, STREAM_BYTES, stream>>>(call);
}

void launch(const setup &s, const device_grouping &g, int N, bool is_down, cudaStream_t stream)
{
    gemm_call call = is_down ? s.down : s.gate_up;
    call.token_tiles = g.tiles;
    call.n_token_tiles = g.n_tiles;
    call.tile_rows = N;
    call.row_source = is_down ? nullptr : g.source;
    if (s.by == &streaming)
        launch_stream(s, call, is_down, stream);
    else
        s.by->kernels[is_down]<<<s.n_sm, s.by->threads, s.by->shared_bytes, stream>>>(call);
}

setup prepare(bool fill)
{
    setup s = {};
    cudaDeviceProp properties;
    check(cudaGetDeviceProperties(&properties, 0), "device");
    s.n_sm = properties.multiProcessorCount;
    std::printf("%s, %d multiprocessors\n", properties.name, s.n_sm);

    const int tiles1 = I / CUDA_GATED_COLUMNS, tiles2 = H / CUDA_TILE_ROWS;
    int64_t bytes1 = (int64_t)L * tiles1 * STEPS * CUDA_STEP_BYTES, bytes2 = bytes1 / tiles1 * tiles2;
    uint8_t *w1 = device_array<uint8_t>(bytes1), *w2 = device_array<uint8_t>(bytes2);
    if (fill) fill_weights<<<1024, 256>>>((uint32_t *)w1, bytes1 / 4, 244, 4, 1);
    if (fill) fill_weights<<<1024, 256>>>((uint32_t *)w2, bytes2 / 4, 244, 4, 2);

    s.x.resize((size_t)MAX_T * H);
    for (size_t i = 0; i < s.x.size(); i++) {
        float sum = 0;
        for (int n = 0; n < 4; n++) sum += (float)(hash(i * 4 + n + (3ull << 50)) & 0xFFFF) / 65536.0f - 0.5f;
        s.x[i] = bf16_of(sum * 1.7f);
    }
    s.ids.resize(R);
    for (int t = 0; t < MAX_T; t++)
        for (int a = 0; a < A; a++) {
            uint64_t n = 0;
            int id;
            do id = hash((uint64_t)(t * A + a) << 20 | n++ | 5ull << 50) % L;
            while (std::find(&s.ids[t * A], &s.ids[t * A + a], id) != &s.ids[t * A + a]);
            s.ids[t * A + a] = id;
        }
    s.bias1.resize((size_t)L * tiles1 * 64), s.bias2.resize((size_t)L * tiles2 * 64);
    for (size_t i = 0; i < s.bias1.size(); i++) s.bias1[i] = (float)(hash(i | 7ull << 50) & 0xFFF) / 4096.0f - 0.5f;
    for (size_t i = 0; i < s.bias2.size(); i++) s.bias2[i] = (float)(hash(i | 9ull << 50) & 0xFFF) / 4096.0f - 0.5f;

    s.v = device_array<uint16_t>((size_t)R * I), s.z = device_array<uint16_t>((size_t)R * H);
    float *unit = device_copy(std::vector<float>(L, 1.0f));
    activation_params *params = device_copy(std::vector<activation_params>(L, {1.702f, 1.0f, 7.0f}));
    s.gate_up = {w1,      device_copy(s.bias1),
                 unit,    params,
                 tiles1,  STEPS,
                 H,       device_copy(s.x),
                 H,       nullptr,
                 nullptr, nullptr,
                 0,       0,
                 s.v,     I,
                 I};
    s.down = {w2, device_copy(s.bias2), unit, params, tiles2, STEPS, I, s.v, I, nullptr, nullptr, nullptr, 0, 0, s.z, H,
              H};
    for (const form *each : {&wide, &narrow, &resident})
        for (auto *kernel : each->kernels)
            check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, each->shared_bytes),
                  "shared");
    for (auto *kernel : stream_kernels)
        check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, STREAM_BYTES), "shared");
    s.by = &wide;
    check(cudaDeviceSynchronize(), "setup");
    return s;
}

/* ---- Checks ----------------------------------------------------------------------------------------------------- */

/* All rows of v and z by slot t*A+a, after both GEMMs of tokens 0..T-1. */
struct rows {
    std::vector<uint16_t> v, z;
};

rows run_layer(const setup &s, int N, int T)
{
    grouping g = group(s.ids, 0, T, N);
    device_grouping d = upload(g);
    size_t n = g.source.size();
    check(cudaMemset(s.v, 0xFF, n * I * 2), "poison");
    check(cudaMemset(s.z, 0xFF, n * H * 2), "poison");
    launch(s, d, N, false, 0);
    launch(s, d, N, true, 0);
    check(cudaGetLastError(), "launch");
    check(cudaDeviceSynchronize(), "run");
    std::vector<uint16_t> v = fetch(s.v, n * I), z = fetch(s.z, n * H);
    release(d);
    rows by_slot = {std::vector<uint16_t>(n * I), std::vector<uint16_t>(n * H)};
    for (size_t r = 0; r < n; r++) {
        std::memcpy(&by_slot.v[(size_t)g.slot[r] * I], &v[r * I], I * 2);
        std::memcpy(&by_slot.z[(size_t)g.slot[r] * H], &z[r * H], H * 2);
    }
    return by_slot;
}

/* One tile's exact sums with one row of activations, and their bounds. */
void exact_sums(const std::vector<uint8_t> &tile, const uint16_t *x, double *sum, double *magnitude)
{
    for (int r = 0; r < 64; r++) {
        sum[r] = magnitude[r] = 0;
        for (int k = 0; k < H; k++) {
            double product = (double)bf16_value(x[k]) * cuda_step_weight(&tile[k / 64 * CUDA_STEP_BYTES], r, k % 64);
            sum[r] += product, magnitude[r] += std::fabs(product);
        }
    }
}

struct error_sums {
    double error = 0, reference = 0, worst = 0;
    long outside = 0, n = 0;
    void add(uint16_t stored, double exact, double low, double high)
    {
        double difference = bf16_value(stored) - exact;
        error += difference * difference, reference += exact * exact, n++;
        worst = std::max(worst, std::fabs(difference) / (std::fabs(exact) + 1e-3));
        float least = bf16_value(bf16_of((float)low)), most = bf16_value(bf16_of((float)high));
        outside += !(bf16_value(stored) >= least && bf16_value(stored) <= most);
    }
    void print(const char *name) const
    {
        std::printf("%s: %ld elements, relative Frobenius %.3e, worst %.2e, outside the stage bound %ld\n", name, n,
                    std::sqrt(error / reference), worst, outside);
    }
};

double bound(double magnitude)
{
    double n = H + H / 16 + 3, u = std::ldexp(1.0, -23);
    return n * u / (1 - n * u) * magnitude;
}

std::vector<uint8_t> fetch_tile(const gemm_call &call, int l, int tile)
{
    size_t bytes = (size_t)STEPS * CUDA_STEP_BYTES;
    return fetch(call.weights + ((size_t)l * call.n_tiles + tile) * bytes, bytes);
}

bool check_stages(const setup &s, const rows &out)
{
    error_sums e1, e2;
    for (int sample = 0; sample < 40; sample++) {
        int slot = hash(sample | 11ull << 50) % R, l = s.ids[slot];
        double sum[64], magnitude[64];
        int tile = sample ? hash(sample | 12ull << 50) % s.gate_up.n_tiles : s.gate_up.n_tiles - 1;
        exact_sums(fetch_tile(s.gate_up, l, tile), &s.x[(size_t)(slot / A) * H], sum, magnitude);
        const float *b = &s.bias1[((size_t)l * s.gate_up.n_tiles + tile) * 64];
        for (int i = 0; i < 32; i++) {
            int g = i / 8 * 16 + i % 8;
            double gate = sum[g] + b[g], up = sum[g + 8] + b[g + 8], eg = bound(magnitude[g]),
                   eu = bound(magnitude[g + 8]);
            double v = swiglu(gate, up), low = v, high = v;
            for (int c = 0; c < 4; c++) {
                double corner = swiglu(gate + (c & 1 ? eg : -eg), up + (c & 2 ? eu : -eu));
                low = std::min(low, corner), high = std::max(high, corner);
            }
            double widen = std::ldexp(std::fabs(v), -22);
            e1.add(out.v[(size_t)slot * I + tile * 32 + i], v, low - widen, high + widen);
        }
        tile = sample ? hash(sample | 13ull << 50) % s.down.n_tiles : s.down.n_tiles - 1;
        exact_sums(fetch_tile(s.down, l, tile), &out.v[(size_t)slot * I], sum, magnitude);
        b = &s.bias2[((size_t)l * s.down.n_tiles + tile) * 64];
        for (int r = 0; r < 64; r++) {
            double z = sum[r] + b[r], e = bound(magnitude[r]);
            int column = down_column(tile, r);
            e2.add(out.z[(size_t)slot * H + column], z, z - e, z + e);
        }
    }
    e1.print("gemm1"), e2.print("gemm2");
    return e1.outside + e2.outside == 0;
}

bool check_bits(const setup &s, const rows &reference)
{
    setup by = s;
    bool all = true;
    for (const form *each : {&wide, &narrow, &resident, &streaming})
        for (int N : tilings)
            for (int T : {1, 8, 33, 128, 8192}) {
                if (N > each->rows || T / 32 > N * 4) continue;
                by.by = each;
                rows out = run_layer(by, N, T);
                bool v = std::memcmp(out.v.data(), reference.v.data(), (size_t)T * A * I * 2) != 0;
                bool z = std::memcmp(out.z.data(), reference.z.data(), (size_t)T * A * H * 2) != 0;
                if (v || z) std::printf("FAIL bits differ: %s, tiles of %d, T %d: v %d z %d\n", each->name, N, T, v, z);
                all &= !v && !z;
            }
    if (all) std::printf("bits: equal for every T, kernel and tiling\n");
    return all;
}

/* Small integers: every partial sum is exact, so the result is one number in any order. */
bool check_exact(setup &s)
{
    std::vector<uint16_t> x((size_t)64 * H);
    for (size_t i = 0; i < x.size(); i++) x[i] = bf16_of((float)((int)(hash(i | 15ull << 50) % 9) - 4));
    uint16_t *device_x = device_copy(x);
    int64_t bytes = (int64_t)s.down.n_tiles * STEPS * CUDA_STEP_BYTES;
    uint8_t *weights = device_array<uint8_t>(bytes);
    fill_weights<<<256, 256>>>((uint32_t *)weights, bytes / 4, 252, 3, 17);
    grouping g;
    for (int r = 0; r < 64; r++) g.source.push_back(r);
    bool all = true;
    setup t = s;
    t.down.weights = weights, t.down.x = device_x;
    for (int N : tilings) {
        g.tiles.clear();
        for (int r = 0; r < 64; r += N) g.tiles.push_back({0, r, std::min(N, 64 - r)});
        device_grouping d = upload(g);
        launch(t, d, N, true, 0);
        check(cudaDeviceSynchronize(), "exact");
        release(d);
        std::vector<uint16_t> z = fetch(s.z, (size_t)64 * H);
        long wrong = 0;
        for (int tile : {0, 7, 44}) {
            std::vector<uint8_t> host = fetch_tile(t.down, 0, tile);
            for (int row = 0; row < 64; row += 9) {
                double sum[64], magnitude[64];
                exact_sums(host, &x[(size_t)row * H], sum, magnitude);
                for (int r = 0; r < 64; r++) {
                    float exact = (float)(sum[r] + (double)s.bias2[tile * 64 + r]);
                    wrong += bf16_of(exact) != z[(size_t)row * H + down_column(tile, r)];
                }
            }
        }
        if (wrong) std::printf("FAIL exact: tiles of %d: %ld wrong\n", N, wrong), all = false;
    }
    if (all) std::printf("exact integers: bitwise\n");
    return all;
}

/* ---- Timing ----------------------------------------------------------------------------------------------------- */

void time_tiling(const setup &s, int N, int T)
{
    const int n_sets = T >= 2048 ? 2 : std::min(24, MAX_T / T);
    std::vector<device_grouping> sets;
    double experts = 0;
    for (int n = 0; n < n_sets; n++) {
        grouping g = group(s.ids, (int)((int64_t)n * T % MAX_T), T, N);
        experts += g.n_experts;
        sets.push_back(upload(g));
    }
    double ms[2];
    for (int is_down = 0; is_down < 2; is_down++)
        ms[is_down] = median_ms([&](cudaStream_t stream) {
                          for (const device_grouping &g : sets) launch(s, g, N, is_down, stream);
                      }) /
                      n_sets;
    for (const device_grouping &g : sets) release(g);
    double bytes = experts / n_sets * STEPS * CUDA_STEP_BYTES, flops = 2.0 * T * A * H * I;
    std::printf(
        "%-9s T %5d tiles of %3d   gemm1 %8.4f ms %6.0f GB/s %6.1f TFLOP/s   gemm2 %8.4f ms %6.0f GB/s %6.1f TFLOP/s\n",
        s.by->name, T, N, ms[0], bytes * s.gate_up.n_tiles / ms[0] * 1e-6, 2 * flops / ms[0] * 1e-9, ms[1],
        bytes * s.down.n_tiles / ms[1] * 1e-6, flops / ms[1] * 1e-9);
}

} // namespace

int main(int argc, char **argv)
{
    const bool only_checks = argc > 1 && !std::strcmp(argv[1], "check"),
               small = argc > 1 && !std::strcmp(argv[1], "small");
    std::setvbuf(stdout, nullptr, _IOLBF, 1 << 16);
    setup s = prepare(!small);
    if (small) { /* for the sanitizer */
        for (const form *each : {&wide, &narrow, &resident, &streaming})
            for (int T : {2, 150}) s.by = each, run_layer(s, each->rows, T);
        std::printf("small: ran\n");
        return 0;
    }
    if (argc > 1 && !std::strcmp(argv[1], "profile")) {
        for (int i = 2; i < argc; i++) run_layer(s, MAX_TOKENS, std::atoi(argv[i]));
        return 0;
    }
    rows reference = run_layer(s, MAX_TOKENS, MAX_T);
    bool good = check_stages(s, reference);
    good &= check_exact(s);
    good &= check_bits(s, reference);
    if (only_checks) return !good;
    for (int T : {1, 8, 32, 128, 512, 2048, 8192})
        for (const form *each : {&wide, &narrow, &resident, &streaming}) {
            s.by = each;
            if (each->rows >= T * A / L / 2) time_tiling(s, each->rows, T);
        }
    return !good;
}
