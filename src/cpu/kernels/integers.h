/* Activations as integers, for kernels that multiply integers of 16 or 8 bits.
 *
 * A bf16 has 8 significant bits, so of a row's block of 32 k the larger elements are integers times one power of two:
 * of x those that are at least 2^-7 of the largest, integers of 15 bits and a sign; of an intermediate, whose elements
 * differ more, those that are at least 2^-14, LONG ones of 22 bits and a sign.  Their products with codes are added up
 * exactly.  The others, the leftovers, are zeros there, and are multiplied one at a time, in f32: one in 40 to 100 of
 * normally distributed elements, infinities and NaN always.
 *
 * A tile of n rows:
 *
 *   [K/32][n]   rows of a block, by pairs or by digits
 *   K/32 times how many leftovers the block has, and these: the even k after each other, then the odd ones */
#ifndef MOE4_CPU_KERNELS_INTEGERS_H
#define MOE4_CPU_KERNELS_INTEGERS_H

#include <stdint.h>

#include "base/dims.h"

enum {
    BLOCK_PAIRS = BLOCK_SIZE / 2,
    BLOCK_FOURS = BLOCK_SIZE / 4,
    DIGITS = 2,      /* of an integer, or */
    LONG_DIGITS = 3, /* of a long one */
    LOW_BITS = 7     /* of long ones, that their pairs do not hold */
};

/* By pairs.  Long integers have 8 words more before their scale: their lowest bits, four k a word as below. */
struct integer_row {
    int32_t pairs[BLOCK_PAIRS]; /* int16 of an even k in the low half, of the next in the high half */
    float scale;                /* half of what an integer 1 is worth */
};

/* By digits of 8 bits and sign, the low ones first; of long integers three instead of two. */
struct digit_row {
    int32_t fours[DIGITS][BLOCK_FOURS]; /* k = 0 4 1 5 and 2 6 3 7 of every code line */
    int32_t starts[DIGITS];             /* -12 times their sums, of even and of odd halves: two int16 */
    float scale;                        /* the same */
};

/* 32-bit words a row and block, and how many there are with leftovers at most. */
#define INTEGER_ROW_WORDS(n_digits) (BLOCK_PAIRS + ((n_digits) == LONG_DIGITS ? BLOCK_FOURS : 0) + 1)
#define DIGIT_ROW_WORDS(n_digits)   ((BLOCK_FOURS + 1) * (n_digits) + 1)
#define INTEGER_WORDS(n_digits)     (DIGIT_ROW_WORDS(n_digits) + 1 + BLOCK_SIZE)

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

/* A tile of bf16, [n_blocks][n_rows][32], to INTEGER_WORDS * n_blocks * n_rows words at most, by digits or by pairs. */
void integers_avx2(const uint16_t *x, int64_t n_blocks, int32_t n_rows, int n_digits, int by_digits, int32_t *tile);

#endif
