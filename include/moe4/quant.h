/* moe4 quantisation: f32 <-> MXFP4, blocks of 32 elements with one E8M0 scale byte. */
#ifndef MOE4_QUANT_H
#define MOE4_QUANT_H

#include "moe4/moe4.h"

#ifdef __cplusplus
extern "C" {
#endif

/* How a block's scale follows from its largest magnitude.  Codes are then rounded to nearest, ties to even, saturating. */
typedef enum moe4_scale_rule {
    MOE4_SCALE_EVEN = 0, /* 2^(e-2), e the exponent of amax after rounding its mantissa to one bit (AMD Quark, compressed-tensors) */
    MOE4_SCALE_FLOOR,    /* 2^(floor(log2 amax) - 2) (OCP, ggml): the largest elements may saturate */
    MOE4_SCALE_CEIL      /* the smallest power of two >= amax/6: nothing saturates */
} moe4_scale_rule;

/* Quantises n_blocks blocks of 32 floats: codes 16 bytes a block, element 2j in the low nibble of byte j; scales 1 byte.
 * An all-zero block gets scale byte 0 and codes 0.  A block with a NaN or an infinity gets scale 0xFF (NaN) and codes 0.
 * In any other block the sign of a zero, and of what rounds to zero, is kept. */
MOE4_API void moe4_mxfp4_quantize(const float *x, int64_t n_blocks, moe4_scale_rule rule, uint8_t *codes,
                                  uint8_t *scales);

/* The exact inverse: 32 floats a block.  Values above the f32 range become infinities. */
MOE4_API void moe4_mxfp4_dequantize(const uint8_t *codes, const uint8_t *scales, int64_t n_blocks, float *x);

#ifdef __cplusplus
}
#endif
#endif
