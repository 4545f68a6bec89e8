/* fp8 activations: e4m3 codes (base/mxfp8.h) under f32 scales, one a token for x, one a row and group of 128 columns
 * for the intermediate. */
#ifndef MOE4_BASE_FP8_H
#define MOE4_BASE_FP8_H

#include <math.h>
#include <stdint.h>

#include "base/mxfp8.h"

enum { FP8_GROUP = 128 /* columns of I that share a scale; the last group may be shorter */ };

static inline int64_t fp8_groups(int64_t I)
{
    return (I + FP8_GROUP - 1) / FP8_GROUP;
}

/* The scale under which amax becomes 448; NaN where amax is not finite. */
static inline float fp8_scale(float amax)
{
    return isfinite(amax) ? amax / 448.0f : NAN;
}

/* x / scale as a code; 0 under a scale of 0 or NaN. */
static inline uint8_t fp8_code(float x, float scale)
{
    return scale > 0.0f ? e4m3_from_f32(x / scale) : 0;
}

#endif
