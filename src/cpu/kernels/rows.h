/* Loops over rows of f32 that want vector instructions but no kernel of their own: plain C (rows_template.h), compiled
 * for each instruction set, the same bits on all of them. */
#ifndef MOE4_CPU_KERNELS_ROWS_H
#define MOE4_CPU_KERNELS_ROWS_H

#include <stdint.h>

#include "moe4/moe4.h"

struct row_kernels {
    /* sum[i] = fma(weight, z[i], sum[i]), z bf16 */
    void (*combine)(float *sum, const uint16_t *z, float weight, int64_t n);
    /* Bits of the largest magnitude of n bf16 */
    uint16_t (*largest)(const uint16_t *x, int64_t n);
    /* Quantises n/32 blocks of bf16 to MXFP8 and puts what they are worth, in bf16, in their place. */
    void (*quantize_mxfp8)(uint16_t *x, int64_t n, uint8_t *codes, uint8_t *scales);
    /* x [n] bf16 = codes * scales, n/32 blocks */
    void (*dequantize_mxfp8)(const uint8_t *codes, const uint8_t *scales, int64_t n, uint16_t *x);
    /* Quantises n bf16 to fp8 under a scale; codes, as bf16, take their place. */
    void (*quantize_fp8)(uint16_t *x, int64_t n, float scale, uint8_t *codes);
    /* x [n] bf16 = codes */
    void (*decode_fp8)(const uint8_t *codes, int64_t n, uint16_t *x);
    /* n/32 blocks of bf16 to int8 codes with a scale each. */
    void (*quantize_int8)(const uint16_t *x, int64_t n, int8_t *codes, float *scales);
    /* out [n] = x [n, K] . w [K], each as 16 interleaved chains of multiply and add, added pairwise */
    void (*dot)(const float *x, int64_t ldx, int32_t n, const float *w, int64_t K, float *out);
};

extern const struct row_kernels rows_c, rows_avx2, rows_avx512;

const struct row_kernels *row_kernels_for(moe4_isa isa);

#endif
