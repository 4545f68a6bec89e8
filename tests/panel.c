#include "panel.h"

#include "cpu/isa.h"
#include "cpu/kernels/pack.h"
#include "ref.h"

int32_t runnable_kernels(const struct kernel *kernels[MAX_KERNELS])
{
    moe4_isa levels[MAX_LEVELS];
    const int32_t n_levels = isa_levels(levels);
    int32_t n = n_levels;
    for (int32_t i = 0; i < n; i++) kernels[i] = kernel_best(levels[i]);
#if defined(__x86_64__)
    if (isa_includes(levels[n_levels - 1], MOE4_ISA_AVX2)) kernels[n++] = &kernel_avx2_integers;
    if (isa_includes(levels[n_levels - 1], MOE4_ISA_AVX512_VNNI)) kernels[n++] = &kernel_avx512_vnni_x;
    if (isa_includes(levels[n_levels - 1], MOE4_ISA_AVX512)) kernels[n++] = &kernel_amx_emulated;
#endif
    return n;
}

const uint8_t *panel_pack(struct buffers *buffers, const moe4_matrix *matrix, int64_t K)
{
    const struct row_order order = {PANEL_PLAIN, MOE4_GATE_UP_NONE, PANEL_ROWS, PANEL_ROWS};
    float bias[PANEL_ROWS];
    uint8_t *panel = buffers_allocate(buffers, (size_t)(K / 32 * PANEL_BLOCK_BYTES));
    layout_pack_panel(pack_rows_c, matrix, K, &order, 0, panel, bias);
    return panel;
}

struct problem problem_create(enum weight_data data, int64_t K, int32_t n_tokens)
{
    struct problem p = {.buffers = {BUFFERS_GUARD_AFTER, NULL}, .K = K, .n_tokens = n_tokens};
    struct random random = {(uint64_t)(K * 100 + n_tokens)};
    moe4_layer_config config = layer_config(PANEL_ROWS, K, 1, 1);
    struct weight_plan plan = {.data = data, .seed = random_bits(&random)};
    p.matrix = weights_expert(&p.buffers, &config, &plan, 0).down;
    p.panel = panel_pack(&p.buffers, &p.matrix, K);
    p.x = buffers_allocate(&p.buffers, (size_t)(n_tokens * K) * sizeof *p.x);
    for (int64_t i = 0; i < n_tokens * K; i++)
        p.x[i] = ref_to_bf16(data == WEIGHTS_EXACT ? (double)random_below(&random, 5) - 2
                                                   : random_normal(&random) * (i % 100 == 17 ? 20 : 1));
    return p;
}

void problem_release(struct problem *p)
{
    buffers_release(&p->buffers);
}

uint16_t *problem_pack(struct problem *p, int32_t first, int32_t n, int32_t run)
{
    uint16_t *packed = buffers_allocate(&p->buffers, (size_t)(n * p->K) * sizeof *packed);
    for (int64_t k = 0; k < p->K; k++)
        for (int32_t t = 0; t < n; t++) packed[(k / run * n + t) * run + k % run] = p->x[(first + t) * p->K + k];
    return packed;
}

float *problem_run(const struct kernel *kernel, struct problem *p, int32_t first, int32_t n)
{
    float *sums = buffers_allocate(&p->buffers, (size_t)n * PANEL_ROWS * sizeof *sums);
    struct read_ahead ahead = {0};
    read_ahead_begin(&ahead, p->panel, p->K / 32 * PANEL_BLOCK_BYTES);
    const uint16_t *x = problem_pack(p, first, n, kernel->run);
    if (kernel->convert) {
        size_t n_words = (size_t)(n * p->K / BLOCK_SIZE * kernel->block_words);
        int32_t *converted = buffers_allocate(&p->buffers, n_words * sizeof *converted);
        kernel->convert(x, p->K / BLOCK_SIZE, n, converted);
        x = (const uint16_t *)(const void *)converted;
    }
    kernel->gemm_tile(p->panel, p->K / 32, x, n, sums, &ahead);
    return sums;
}
