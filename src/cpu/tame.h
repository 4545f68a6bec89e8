/* Activations too large or too small for sums of unscaled products.  Kernels add up a block's products before they
 * scale them: a value of 2^120 or more could overflow where the scaled product would not, and where dot products flush
 * subnormals, a row of values below 2^-64 could vanish under large scales.  Such a row is multiplied by a power of two,
 * and its sums are divided by it again: exact, but for elements below 2^-110 in a row that has one of 2^120.  The row
 * decides alone, so batches do not matter. */
#ifndef MOE4_CPU_TAME_H
#define MOE4_CPU_TAME_H

#include <stdint.h>

enum {
    HUGE_BF16 = 0x7B80, /* 2^120; infinities and NaN are huge, too, and stay what they are */
    TINY_BF16 = 0x1F80  /* 2^-64 */
};

/* Whether a row whose largest magnitude has these bits is one of them.  Zeros need nothing. */
static inline int tame_is_wild(uint16_t largest)
{
    return largest >= HUGE_BF16 || (largest < TINY_BF16 && largest > 0);
}

/* Multiplies row `row` of a packed tile, [K/run][n_rows][run], if `largest` (bits of its largest magnitude) is wild.
 * Returns what the row's sums must be multiplied by. */
float tame_row(uint16_t *packed, int32_t n_rows, int32_t run, int32_t row, int64_t K, uint16_t largest);

/* Bits of the largest magnitude of a packed row. */
uint16_t tame_largest(const uint16_t *packed, int32_t n_rows, int32_t run, int32_t row, int64_t K);

#endif
