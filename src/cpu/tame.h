/* Huge activations.  Kernels add up a block's products before they scale them, so a value of 2^120 or more could
 * overflow where the scaled product would not.  A row that has one is divided by 2^16 and its sums are multiplied
 * again: exact, but for elements below 2^-110, which are lost beside 2^120.  The row decides alone, so batches do not
 * matter. */
#ifndef MOE4_CPU_TAME_H
#define MOE4_CPU_TAME_H

#include <stdint.h>

enum { HUGE_BF16 = 0x7B80 }; /* 2^120; infinities and NaN are huge, too, and stay what they are */

/* Divides row `row` of a packed tile, [K/2][n_rows] pairs, if `largest` (bits of its largest magnitude) is huge.
 * Returns what the row's sums must be multiplied by. */
float tame_row(uint16_t *packed, int32_t n_rows, int32_t row, int64_t K, uint16_t largest);

/* Bits of the largest magnitude of a packed row. */
uint16_t tame_largest(const uint16_t *packed, int32_t n_rows, int32_t row, int64_t K);

#endif
