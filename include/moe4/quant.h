/* moe4 quantisation: f32, bf16 <-> MXFP4 and MXFP8, blocks of 32 elements with one E8M0 scale byte.
 *
 * Arrays hold n_blocks whole blocks, end to end, and may begin at any address that suits their elements; outputs may not
 * overlap inputs.  No function can fail, allocates or keeps state; the host's rounding mode and its treatment of subnormals
 * change nothing, and every CPU gives the same bytes.  n_blocks == 0 touches nothing. */
#ifndef MOE4_QUANT_H
#define MOE4_QUANT_H

#include "moe4/moe4.h"

#ifdef __cplusplus
extern "C" {
#endif

/* How a block's scale follows from its elements.  Codes are then rounded to nearest, ties to even, saturating.  No rule
 * goes beyond 2^125 (byte 252), so that whatever is finite stays finite: elements above 6 * 2^125 = 1.5 * 2^127 become
 * that, the largest value that codes can hold in the range of f32. */
typedef enum moe4_scale_rule {
    MOE4_SCALE_EVEN = 0, /* 2^(e-2), e the exponent of amax after rounding its mantissa to one bit (AMD Quark, compressed-tensors) */
    MOE4_SCALE_FLOOR,    /* 2^(floor(log2 amax) - 2) (OCP, ggml): the largest elements may saturate */
    MOE4_SCALE_CEIL,     /* the smallest power of two >= amax/6: nothing up to 1.5 * 2^127 saturates */
    MOE4_SCALE_MSE       /* the scale of least squared error: FLOOR's, twice or half of it; no other can be better */
} moe4_scale_rule;

/* Quantises n_blocks blocks of 32 floats: codes 16 bytes a block, element 2j in the low nibble of byte j; scales 1 byte.
 * An all-zero block gets scale byte 0 and codes 0.  A block with a NaN or an infinity gets scale 0xFF (NaN) and codes 0.
 * In any other block the sign of a zero, and of what rounds to zero, is kept.
 * MSE sums in f32: of two scales whose errors differ in the last places either may win. */
MOE4_API void moe4_mxfp4_quantize(const float *x, int64_t n_blocks, moe4_scale_rule rule, uint8_t *codes,
                                  uint8_t *scales);

/* The same from bf16, and the same bytes as of the values as f32. */
MOE4_API void moe4_mxfp4_quantize_bf16(const uint16_t *x, int64_t n_blocks, moe4_scale_rule rule, uint8_t *codes,
                                       uint8_t *scales);

/* What quantising loses, over many blocks. */
typedef struct moe4_mxfp4_loss {
    double squared;       /* sum of the squares of elements, of blocks that are finite */
    double squared_error; /* of the squares of elements minus codes times scale, likewise */
    int64_t n_blocks;     /* all of them */
    int64_t n_saturated;  /* elements beyond 6 times their scale */
    int64_t n_zero;       /* blocks whose codes are all zero */
    int64_t n_nan;        /* blocks with a NaN or an infinity */
} moe4_mxfp4_loss;

/* moe4_mxfp4_quantize, or ..._bf16, and adds to *loss (zeroed by the caller at first) what that loses: the counts exactly;
 * of 32 blocks at a time the squares in f32, of elements over their scale, and these sums in double: within 1e-5 in all.
 * The order of summation is fixed: the same calls give the same sums on every CPU.  Threads need a loss each; adding those
 * up in a fixed order, whatever the threads, keeps that. */
MOE4_API void moe4_mxfp4_quantize_measured(const float *x, int64_t n_blocks, moe4_scale_rule rule, uint8_t *codes,
                                           uint8_t *scales, moe4_mxfp4_loss *loss);
MOE4_API void moe4_mxfp4_quantize_bf16_measured(const uint16_t *x, int64_t n_blocks, moe4_scale_rule rule,
                                                uint8_t *codes, uint8_t *scales, moe4_mxfp4_loss *loss);

/* The exact inverse: 32 floats a block.  Values above the f32 range become infinities. */
MOE4_API void moe4_mxfp4_dequantize(const uint8_t *codes, const uint8_t *scales, int64_t n_blocks, float *x);

/* Quantises n_blocks blocks of 32 bf16 to MXFP8, as a layer does its activations: codes 32 e4m3 bytes a block; the scale is
 * the smallest power of two >= amax/448, codes are rounded to nearest, ties to even.  A block of zeros, and one so small
 * that its scale byte is 0, gets codes of zero; one with a NaN or an infinity gets scale 0xFF and codes 0. */
MOE4_API void moe4_mxfp8_quantize(const uint16_t *x, int64_t n_blocks, uint8_t *codes, uint8_t *scales);

/* Back to bf16: exact for scale bytes 3 to 246; outside, what bf16 cannot hold is rounded or infinite. */
MOE4_API void moe4_mxfp8_dequantize(const uint8_t *codes, const uint8_t *scales, int64_t n_blocks, uint16_t *x);

#ifdef __cplusplus
}
#endif
#endif
