/* The block of int8 compute: 32 consecutive integers share one f32 scale. */
#ifndef MOE4_BASE_INT8_H
#define MOE4_BASE_INT8_H

#include <math.h>
#include <stdint.h>

#include "base/convert.h"
#include "base/dims.h"

enum { INT8_LARGEST = 127 };

/* Quantises a block of bf16: scale = amax/127, codes = x/scale to nearest even, both divisions in f32.  A block of
 * zeros gets scale 0, one with a NaN or an infinity scale NaN; their codes are 0.  Returns the scale. */
static inline float int8_quantize_block(const uint16_t *x, int8_t *codes)
{
    const float round = 0x1.8p23f; /* added and subtracted: rounds to an integer */
    uint16_t most = 0;
    for (int i = 0; i < BLOCK_SIZE; i++) most = (x[i] & 0x7FFFu) > most ? x[i] & 0x7FFFu : most;
    const int is_finite = most < 0x7F80u;
    const float scale = is_finite ? bf16_to_f32(most) / INT8_LARGEST : NAN;
    const float divisor = most && is_finite ? scale : INFINITY;
    for (int i = 0; i < BLOCK_SIZE; i++) {
        float value = is_finite ? bf16_to_f32(x[i]) : 0.0f;
        codes[i] = (int8_t)(int32_t)(f32_bits(value / divisor + round) - f32_bits(round));
    }
    return scale;
}

#endif
