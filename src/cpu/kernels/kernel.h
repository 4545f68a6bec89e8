/* A CPU kernel: what one instruction-set level brings.  docs/performance-cpu.md explains how each works. */
#ifndef MOE4_CPU_KERNELS_KERNEL_H
#define MOE4_CPU_KERNELS_KERNEL_H

#include <stdint.h>

#include "cpu/read_ahead.h"
#include "moe4/moe4.h"

/* The whole-K product of one packed panel and one token tile:
 *
 *   sums[t][r] = sum over k of x[t,k] * w[r,k],   t < n_tokens, r < PANEL_ROWS
 *
 *   panel   n_blocks blocks of cpu/layout.h, 64-byte aligned
 *   x       [32 * n_blocks / run][n_tokens][run] bf16, or what `convert` makes of that; for int8 kernels the words of
 *           cpu/int8.h
 *   sums    [n_tokens][PANEL_ROWS] f32, 64-byte aligned
 *   ahead   what to read meanwhile; for kernels that can ask for it
 *
 * There are at most TILE_TOKENS tokens, or as many as the kernel likes, if these are more.
 *
 * An element's additions are in one order, the same for any n_tokens: a token's sums do not depend on its tile.
 * |x| < 2^120, lest a block of unscaled products overflow (cpu/tame.h). */
typedef void gemm_tile_fn(const uint8_t *panel, int64_t n_blocks, const uint16_t *x, int32_t n_tokens, float *sums,
                          struct read_ahead *ahead);

/* A tile as a kernel wants it: at most block_words * n_blocks * n_tokens words. */
typedef void convert_tile_fn(const uint16_t *x, int64_t n_blocks, int32_t n_tokens, int32_t *tile);

struct kernel {
    const char *name;    /* gemm_ISA */
    const char *order;   /* the accumulation order: how an element's chain is formed */
    moe4_isa isa;        /* the lowest level that can run it */
    int32_t tile_tokens; /* what it likes: tiles of so many rows at most */
    int32_t grain;       /* a tile costs as much as one of the next multiple of this; 0 = just what it holds */
    int32_t run;         /* x comes by pairs, or by whole blocks */
    int32_t block_words;
    convert_tile_fn *convert;   /* or NULL */
    const struct kernel *for_x; /* multiplies x in its place, and it the intermediate, or NULL */
    gemm_tile_fn *gemm_tile;
};

extern const struct kernel kernel_c;
extern const struct kernel kernel_avx2, kernel_avx2_integers, kernel_avx512, kernel_avx512_vnni, kernel_avx512_vnni_x,
    kernel_avx512_bf16, kernel_amx;                       /* x86 */
extern const struct kernel kernel_neon, kernel_neon_bf16; /* aarch64 */
extern const struct kernel kernel_int8_c;
extern const struct kernel kernel_int8_avx2, kernel_int8_avx512_vnni; /* x86 */

/* The best kernel that a level (not AUTO) includes, and the one that is exact for every scale byte. */
const struct kernel *kernel_best(moe4_isa isa);
const struct kernel *kernel_exact(void);

/* The same of int8 compute. */
const struct kernel *kernel_int8_best(moe4_isa isa);
const struct kernel *kernel_int8_exact(void);

#endif
