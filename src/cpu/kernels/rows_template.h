/* The loops of rows.h.  Included by one file an instruction set, which names the table ROW_KERNELS. */
#include <math.h>

#include "base/convert.h"
#include "base/fp8.h"
#include "base/int8.h"
#include "base/mxfp8.h"
#include "cpu/kernels/rows.h"

static void combine(float *sum, const uint16_t *z, float weight, int64_t n)
{
    for (int64_t i = 0; i < n; i++) sum[i] = fmaf(weight, bf16_to_f32(z[i]), sum[i]);
}

static uint16_t largest(const uint16_t *x, int64_t n)
{
    uint16_t most = 0;
    for (int64_t i = 0; i < n; i++) {
        uint16_t magnitude = x[i] & 0x7FFFu;
        if (magnitude > most) most = magnitude;
    }
    return most;
}

static void dequantize_mxfp8(const uint8_t *codes, const uint8_t *scales, int64_t n, uint16_t *x)
{
    for (int64_t i = 0; i < n; i += BLOCK_SIZE) mxfp8_dequantize_block(codes + i, scales[i / BLOCK_SIZE], x + i);
}

static void quantize_mxfp8(uint16_t *x, int64_t n, uint8_t *codes, uint8_t *scales)
{
    for (int64_t i = 0; i < n; i += BLOCK_SIZE) scales[i / BLOCK_SIZE] = mxfp8_quantize_block(x + i, codes + i);
    dequantize_mxfp8(codes, scales, n, x);
}

static void decode_fp8(const uint8_t *codes, int64_t n, uint16_t *x)
{
    for (int64_t i = 0; i < n; i++) x[i] = bf16_from_f32(e4m3_to_f32(codes[i]));
}

static void quantize_fp8(uint16_t *x, int64_t n, float scale, uint8_t *codes)
{
    for (int64_t i = 0; i < n; i++) codes[i] = fp8_code(bf16_to_f32(x[i]), scale);
    decode_fp8(codes, n, x);
}

static void quantize_int8(const uint16_t *x, int64_t n, int8_t *codes, float *scales)
{
    for (int64_t i = 0; i < n; i += BLOCK_SIZE) scales[i / BLOCK_SIZE] = int8_quantize_block(x + i, codes + i);
}

static float dot(const float *x, const float *w, int64_t n)
{
    enum { CHAINS = 16 };
    float chains[CHAINS] = {0};
    int64_t whole = n / CHAINS * CHAINS;
    for (int64_t i = 0; i < whole; i += CHAINS)
        for (int c = 0; c < CHAINS; c++) chains[c] += x[i + c] * w[i + c];
    for (int64_t i = whole; i < n; i++) chains[i - whole] += x[i] * w[i];
    for (int half = CHAINS / 2; half > 0; half /= 2)
        for (int c = 0; c < half; c++) chains[c] += chains[c + half];
    return chains[0];
}

const struct row_kernels ROW_KERNELS = {combine,      largest,    quantize_mxfp8, dequantize_mxfp8,
                                        quantize_fp8, decode_fp8, quantize_int8,  dot};
