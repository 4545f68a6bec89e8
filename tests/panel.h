/* What the tests of the kernels share: one packed panel, rows of x, and the kernels that can be run here. */
#ifndef MOE4_TEST_PANEL_H
#define MOE4_TEST_PANEL_H

#include "cpu/kernels/kernel.h"
#include "cpu/layout.h"
#include "fixture.h"

enum { MAX_KERNELS = MAX_LEVELS + 3 };

/* The kernels of the levels this CPU offers, those that they leave x to, and what is emulated; their number. */
int32_t runnable_kernels(const struct kernel *kernels[MAX_KERNELS]);

#if defined(__x86_64__)
/* gemm_amx.c on tiles made of C (amx_tiles.h); needs AVX-512. */
extern const struct kernel kernel_amx_emulated;
#endif

/* A panel of 64 rows, and rows of x. */
struct problem {
    struct buffers buffers;
    int64_t K;
    moe4_matrix matrix; /* [64, K] */
    const uint8_t *panel;
    uint16_t *x; /* [n_tokens, K] bf16 */
    int32_t n_tokens;
};

struct problem problem_create(enum weight_data data, int64_t K, int32_t n_tokens);
void problem_release(struct problem *p);

/* Tokens first .. first+n-1 as kernels want them, runs of so many k. */
uint16_t *problem_pack(struct problem *p, int32_t first, int32_t n, int32_t run);

/* Runs a kernel on tokens first .. first+n-1, to sums [n][64] that nothing follows. */
float *problem_run(const struct kernel *kernel, struct problem *p, int32_t first, int32_t n);

/* A matrix [64, K] as a panel. */
const uint8_t *panel_pack(struct buffers *buffers, const moe4_matrix *matrix, int64_t K);

#endif
