/* The block of int8 compute: 32 consecutive integers share one f32 scale. */
#ifndef MOE4_BASE_INT8_H
#define MOE4_BASE_INT8_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "base/convert.h"
#include "base/dims.h"

enum { INT8_LARGEST = 127 };

/* Quantises a block of bf16: scale = amax/127, codes = x/scale to nearest even, both divisions in f32.  A block of
 * zeros gets scale 0, one with a NaN or an infinity scale NaN; their codes are 0.  Returns the scale. */
static inline float int8_quantize_block(const uint16_t *x, int8_t *codes)
{
    const float round = 0x1.8p23f; /* added: the integer is then in the lowest bits */
    uint16_t most = 0;
    for (int i = 0; i < BLOCK_SIZE; i++) {
        uint16_t magnitude = x[i] & 0x7FFFu;
        if (magnitude > most) most = magnitude;
    }
    if (most == 0 || most >= 0x7F80u) {
        memset(codes, 0, BLOCK_SIZE);
        return most ? NAN : 0.0f;
    }
    const float scale = bf16_to_f32(most) / INT8_LARGEST;
    for (int i = 0; i < BLOCK_SIZE; i++) codes[i] = (int8_t)(f32_bits(bf16_to_f32(x[i]) / scale + round) & 0xFFu);
    return scale;
}

#endif
