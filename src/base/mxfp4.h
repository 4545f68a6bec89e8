/* The MXFP4 block: 32 consecutive elements along K share one scale.
 *
 *   codes   byte 0        byte 1        ...  byte 15          scale
 *           [ e1 | e0 ]   [ e3 | e2 ]        [ e31 | e30 ]    [ 2^(byte-127), 0xFF = NaN ]
 *             high low
 *
 *   code s eem: sign, then magnitude 0, 0.5, 1, 1.5, 2, 3, 4, 6 */
#ifndef MOE4_BASE_MXFP4_H
#define MOE4_BASE_MXFP4_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "base/dims.h"

enum { SCALE_NAN = 0xFF };

static inline float e2m1_to_f32(unsigned code)
{
    static const float magnitudes[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
    float magnitude = magnitudes[code & 7];
    return code & 8 ? -magnitude : magnitude;
}

/* Exact, 0x00 being the subnormal 2^-127. */
static inline float e8m0_to_f32(uint8_t scale)
{
    if (scale == SCALE_NAN) return NAN;
    uint32_t bits = scale ? (uint32_t)scale << 23 : (uint32_t)1 << 22;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Code of element k of a row. */
static inline unsigned mxfp4_code(const uint8_t *row, int64_t k)
{
    return (row[k / 2] >> (k & 1 ? 4 : 0)) & 15u;
}

#endif
