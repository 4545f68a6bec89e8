/* The loops of rows.h.  Included by one file an instruction set, which names the table ROW_KERNELS and says how many
 * bytes its vectors have, VECTOR_BYTES. */
#include <math.h>
#include <string.h>

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

/* ---- MXFP8.  Under a scale of ordinary size everything is done on vectors of 16-bit integers, bits of bf16 over the
 * scale; the results are those of base/mxfp8.h, which takes the other scales. */

enum { LANES = VECTOR_BYTES / 2 };
typedef int16_t words __attribute__((vector_size(VECTOR_BYTES)));
typedef uint8_t bytes __attribute__((vector_size(LANES)));

/* Scale bytes under which no code's value and no limit between two codes is subnormal or infinite in bf16. */
static int is_ordinary(uint8_t scale)
{
    return scale >= 12 && scale <= 245;
}

/* What is added to a bf16's bits to multiply it by the scale. */
static int16_t scale_shift(uint8_t scale)
{
    return (int16_t)((scale - 127) * 128);
}

static inline words choose(words condition, words yes, words no)
{
    return (condition & yes) | (~condition & no);
}

/* Bits of the bf16 that the magnitudes of e4m3 codes are worth.  Codes below 8 are subnormal: 0 to 7 steps of 2^-9. */
static inline words e4m3_bits(words code)
{
    words steps = ((code > 0) & 0x3B00) + ((code > 1) & 0x80) + ((code > 2) & 0x40) + ((code > 3) & 0x40) +
                  ((code > 4) & 0x20) + ((code > 5) & 0x20) + ((code > 6) & 0x20);
    return choose(code < 8, steps, (code << 4) + 0x3C00);
}

/* Nearest e4m3 magnitudes, ties to even, of bf16 with these bits, up to 448; bits below 0 count as 0. */
static inline words e4m3_nearest(words bits)
{
    words steps = (bits > 0x3A80) + (bits >= 0x3B40) + (bits > 0x3BA0) + (bits >= 0x3BE0) + (bits > 0x3C10) +
                  (bits >= 0x3C30) + (bits > 0x3C50) + (bits >= 0x3C70); /* true is -1 */
    return choose(bits < 0x3C80, -steps, ((bits + 7 + (bits >> 4 & 1)) >> 4) - 0x3C0);
}

static inline void dequantize_ordinary(const uint8_t *codes, int16_t shift, uint16_t *x)
{
    for (int i = 0; i < BLOCK_SIZE; i += LANES) {
        bytes narrow;
        memcpy(&narrow, codes + i, sizeof narrow);
        words code = __builtin_convertvector(narrow, words), magnitude = code & 0x7F;
        words bits = choose(magnitude == 0x7F, (words){0} + 0x7FC0, e4m3_bits(magnitude) + shift);
        bits = (bits & (magnitude > 0)) | (code & 0x80) << 8;
        memcpy(x + i, &bits, sizeof bits);
    }
}

static void dequantize_mxfp8(const uint8_t *codes, const uint8_t *scales, int64_t n, uint16_t *x)
{
    for (int64_t i = 0; i < n; i += BLOCK_SIZE) {
        uint8_t scale = scales[i / BLOCK_SIZE];
        if (is_ordinary(scale))
            dequantize_ordinary(codes + i, scale_shift(scale), x + i);
        else
            mxfp8_dequantize_block(codes + i, scale, x + i);
    }
}

static inline void quantize_ordinary(const uint16_t *x, int16_t shift, uint8_t *codes)
{
    for (int i = 0; i < BLOCK_SIZE; i += LANES) {
        words bits;
        memcpy(&bits, x + i, sizeof bits);
        words code = e4m3_nearest((bits & 0x7FFF) - shift) | (bits >> 8 & 0x80);
        bytes narrow = __builtin_convertvector(code, bytes);
        memcpy(codes + i, &narrow, sizeof narrow);
    }
}

static void quantize_mxfp8(uint16_t *x, int64_t n, uint8_t *codes, uint8_t *scales)
{
    for (int64_t i = 0; i < n; i += BLOCK_SIZE) {
        uint16_t amax = largest(x + i, BLOCK_SIZE);
        uint8_t scale = amax < 0x7F80 ? mxfp8_scale(bf16_to_f32(amax)) : SCALE_NAN;
        scales[i / BLOCK_SIZE] = scale;
        if (is_ordinary(scale))
            quantize_ordinary(x + i, scale_shift(scale), codes + i);
        else
            mxfp8_quantize_block(x + i, codes + i);
    }
    dequantize_mxfp8(codes, scales, n, x);
}

/* ---- fp8 ---- */

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

/* ---- The router's dot products --------------------------------------------------------------------------------- */

enum { CHAINS = 16, DOT_TOKENS = 4, DOT_PREFETCH = 1024 /* floats: weights come from memory, on small pages */ };
typedef float chains __attribute__((vector_size(CHAINS * sizeof(float))));

/* N of them at once, since an addition waits for the one before.  Always inlined with a constant. */
static inline __attribute__((always_inline)) void dot_rows(const float *x, int64_t ldx, const int n, const float *w,
                                                           int64_t K, float *out)
{
    const int64_t whole = K / CHAINS * CHAINS;
    chains sum[DOT_TOKENS] = {{0}}, a, b;
    for (int64_t i = 0; i < whole; i += CHAINS) {
        __builtin_prefetch(w + i + DOT_PREFETCH, 0, 2);
        memcpy(&b, w + i, sizeof b);
        for (int t = 0; t < n; t++) {
            memcpy(&a, x + t * ldx + i, sizeof a);
            sum[t] += a * b;
        }
    }
    for (int t = 0; t < n; t++) {
        for (int64_t i = whole; i < K; i++) sum[t][i - whole] += x[t * ldx + i] * w[i];
        for (int half = CHAINS / 2; half > 0; half /= 2)
            for (int c = 0; c < half; c++) sum[t][c] += sum[t][c + half];
        out[t] = sum[t][0];
    }
}

static void dot(const float *x, int64_t ldx, int32_t n, const float *w, int64_t K, float *out)
{
    for (; n >= DOT_TOKENS; n -= DOT_TOKENS, x += DOT_TOKENS * ldx, out += DOT_TOKENS)
        dot_rows(x, ldx, DOT_TOKENS, w, K, out);
    for (; n > 0; n--, x += ldx, out++) dot_rows(x, ldx, 1, w, K, out);
}

const struct row_kernels ROW_KERNELS = {combine,      largest,    quantize_mxfp8, dequantize_mxfp8,
                                        quantize_fp8, decode_fp8, quantize_int8,  dot};
