/* x as integers, for kernels that multiply in 16 bits (gemm_avx2_integers.c).
 *
 * Of a row's block of 32 k most elements are integers of 15 bits and a sign times one power of two: a bf16 has 8
 * significant bits, so all that are at least 2^-7 of the largest are.  Their products with codes are added up exactly.
 * The others, the leftovers, are zeros there, and are multiplied one at a time, in f32: one in 40 to 100 of normally
 * distributed elements, infinities and NaN always.  (Of an intermediate it would be one in three.)
 *
 * A tile of n rows:
 *
 *   [K/32][n]   struct integer_row, or of a row alone struct digit_row
 *   K/32 times how many leftovers the block has, and these: the even k after each other, then the odd ones */
#ifndef MOE4_CPU_KERNELS_INTEGERS_H
#define MOE4_CPU_KERNELS_INTEGERS_H

#include <stdint.h>

#include "base/dims.h"

enum { BLOCK_PAIRS = BLOCK_SIZE / 2 };

enum { BLOCK_FOURS = BLOCK_SIZE / 4, DIGITS = 2 };

struct integer_row {
    int32_t pairs[BLOCK_PAIRS]; /* int16 of an even k in the low half, of the next in the high half */
    float scale;                /* half of what an integer 1 is worth */
};

/* Digits of 8 bits and sign, the low ones first. */
struct digit_row {
    int32_t fours[DIGITS][BLOCK_FOURS]; /* k = 0 4 1 5 and 2 6 3 7 of every code line */
    int32_t starts[DIGITS];             /* -12 times their sums, of even and of odd halves: two int16 */
    float scale;                        /* the same */
};

/* 32-bit words a row and block, and how many there are with leftovers at most. */
enum {
    INTEGER_ROW_WORDS = BLOCK_PAIRS + 1,
    DIGIT_ROW_WORDS = BLOCK_PAIRS + DIGITS + 1,
    INTEGER_WORDS = DIGIT_ROW_WORDS + 1 + BLOCK_SIZE
};

/* A leftover: bf16 in the high half, below it the row in the tile and k. */
static inline uint32_t leftover(uint32_t bf16, int32_t row, int32_t k)
{
    return bf16 << 16 | (uint32_t)row << 5 | (uint32_t)k;
}

static inline int32_t leftover_row(uint32_t item)
{
    return (int32_t)(item >> 5 & 0x7FF);
}

static inline int32_t leftover_k(uint32_t item)
{
    return (int32_t)(item & 31);
}

/* A tile of bf16, [n_blocks][n_rows][32], to INTEGER_WORDS * n_blocks * n_rows words at most. */
void integers_avx2(const uint16_t *x, int64_t n_blocks, int32_t n_rows, int32_t *tile);

#endif
