/* Verdicts on quantised intermediates.
 *
 * A group of columns shares a scale.  Each of its bf16 values lies in a range; so does the largest magnitude, and with
 * it the scale, which rises with it; and under a given scale each code, which rises with its value. */
#include <float.h>
#include <math.h>
#include <stdlib.h>

#include "ref_check.h"

/* The ranges of one group of one row. */
typedef struct group {
    ref_nan nan; /* the scale, for a NaN or an infinity among the values */
    int64_t n;
    double low[REF_FP8_GROUP], high[REF_FP8_GROUP]; /* bf16 values, finite: what they are if the scale is no NaN */
    double amax_low, amax_high;
} group;

/* Where a group's verdicts go: its row and first column. */
typedef struct place {
    ref_verdict *verdict;
    int64_t row, column;
} place;

static ref_nan nan_scale(double low, double high, ref_nan nan)
{
    if (isinf(low) && low == high) return REF_NAN_ALWAYS;
    if (nan == REF_NAN_NEVER && (isinf(low) || isinf(high))) return REF_NAN_MAYBE;
    return nan;
}

static void group_add(group *g, ref_range range)
{
    const double largest_bf16 = 0x1.FEp127;
    double low = ref_round_bf16(range.low), high = ref_round_bf16(range.high);
    ref_nan nan = nan_scale(low, high, range.nan);
    if (nan > g->nan) g->nan = nan;
    low = fmax(low, -largest_bf16);
    high = fmin(high, largest_bf16);
    g->low[g->n] = low;
    g->high[g->n] = high;
    g->n++;
    g->amax_low = fmax(g->amax_low, low <= 0 && high >= 0 ? 0 : fmin(fabs(low), fabs(high)));
    g->amax_high = fmax(g->amax_high, fmax(fabs(low), fabs(high)));
}

/* Scales are E8M0 bytes or f32 values. */
static int is_nan_scale(ref_mode mode, double scale)
{
    return mode == REF_MODE_MXFP8 ? scale == 0xFF : isnan(scale);
}

static double scale_of(ref_mode mode, double amax)
{
    return mode == REF_MODE_MXFP8 ? ref_mxfp8_scale(amax)
           : mode == REF_MODE_FP8 ? ref_fp8_scale(amax)
                                  : ref_int8_scale(amax);
}

/* As the byte that is stored. */
static unsigned code_of(ref_mode mode, double x, double scale)
{
    return mode == REF_MODE_MXFP8 ? ref_mxfp8_code(x, (unsigned)scale)
           : mode == REF_MODE_FP8 ? ref_fp8_code(x, (float)scale)
                                  : (uint8_t)ref_int8_code(x, (float)scale);
}

/* 0 inside low..high, else 1 + the distance, however small. */
static double distance_ratio(double got, double low, double high)
{
    double distance = got < low ? low - got : got > high ? got - high : 0;
    return distance > 0 ? fmax(1 + distance, nextafter(1, 2)) : 0;
}

/* A code's place in the order of values; NaN is beyond what any value becomes. */
static int code_place(ref_mode mode, unsigned code)
{
    if (mode == REF_MODE_INT8) return (int8_t)code;
    return code & 0x80 ? -(int)(code & 0x7F) : (int)code;
}

static double code_value(ref_mode mode, unsigned code)
{
    return mode == REF_MODE_INT8 ? (int8_t)code : ref_e4m3(code);
}

static void judge_code(const place *at, ref_mode mode, int64_t i, unsigned got, unsigned low, unsigned high)
{
    double ratio = distance_ratio(code_place(mode, got), code_place(mode, low), code_place(mode, high));
    ref_verdict_element(at->verdict, at->row, at->column + i, code_value(mode, got), code_value(mode, low),
                        code_value(mode, high), ratio);
}

static void judge_group(const place *at, const group *g, ref_mode mode, const uint8_t *codes, double scale)
{
    double low = g->nan == REF_NAN_ALWAYS ? NAN : scale_of(mode, g->amax_low);
    double high = g->nan == REF_NAN_ALWAYS ? NAN : scale_of(mode, g->amax_high);
    int is_nan = is_nan_scale(mode, scale);
    int holds = is_nan ? g->nan != REF_NAN_NEVER : g->nan != REF_NAN_ALWAYS;
    double ratio = !holds ? DBL_MAX : is_nan ? 0 : distance_ratio(scale, low, high);
    ref_verdict_element(at->verdict, at->row, at->column, scale, low, high, ratio);
    if (ratio > 0 || is_nan) return;
    for (int64_t i = 0; i < g->n; i++)
        judge_code(at, mode, i, codes[i], code_of(mode, g->low[i], scale), code_of(mode, g->high[i], scale));
}

/* An implementation's output: codes [n, I], scales [n, groups a row]. */
typedef struct quantized {
    ref_mode mode;
    const uint8_t *codes;
    const void *scales;
} quantized;

static double quantized_scale(const quantized *q, int64_t index)
{
    return q->mode == REF_MODE_MXFP8 ? ((const uint8_t *)q->scales)[index] : ref_load(q->scales, MOE4_DTYPE_F32, index);
}

static void check_quantized(ref_columns *columns, int32_t l, const quantized *got, const ref_arithmetic *arithmetic,
                            ref_verdict *verdict)
{
    int64_t I = columns->config->intermediate_size, n = columns->n;
    int64_t size = got->mode == REF_MODE_FP8 ? REF_FP8_GROUP : REF_MX_BLOCK, per_row = (I + size - 1) / size;
    group *groups = ref_allocate(n, sizeof *groups);
    *verdict = (ref_verdict)REF_VERDICT_INIT;
    for (int64_t first = 0; first < I; first += size) {
        int64_t end = first + size < I ? first + size : I;
        for (int64_t j = 0; j < n; j++) groups[j] = (group){.nan = REF_NAN_NEVER};
        for (int64_t i = first; i < end; i++) {
            ref_columns_compute(columns, i);
            for (int64_t j = 0; j < n; j++) group_add(&groups[j], ref_columns_range(columns, l, j, arithmetic));
        }
        for (int64_t j = 0; j < n; j++)
            judge_group(&(place){verdict, j, first}, &groups[j], got->mode, got->codes + j * I + first,
                        quantized_scale(got, j * per_row + first / size));
    }
    free(groups);
}

void ref_check_intermediate_mxfp8(const moe4_layer_config *config, const moe4_expert *expert, int32_t l,
                                  const double *x, const uint8_t *codes, const uint8_t *scales, int64_t n,
                                  const ref_arithmetic *arithmetic, ref_verdict *verdict)
{
    ref_columns columns = ref_columns_create(config, expert, x, n);
    check_quantized(&columns, l, &(quantized){REF_MODE_MXFP8, codes, scales}, arithmetic, verdict);
    ref_columns_destroy(&columns);
}

void ref_check_intermediate_fp8(const moe4_layer_config *config, const moe4_expert *expert, int32_t l, const double *x,
                                const uint8_t *codes, const float *scales, int64_t n, const ref_arithmetic *arithmetic,
                                ref_verdict *verdict)
{
    ref_columns columns = ref_columns_create(config, expert, x, n);
    check_quantized(&columns, l, &(quantized){REF_MODE_FP8, codes, scales}, arithmetic, verdict);
    ref_columns_destroy(&columns);
}

void ref_check_intermediate_int8(const moe4_layer_config *config, const moe4_expert *expert, int32_t l, const double *x,
                                 const int8_t *codes, const float *scales, int64_t n, const ref_arithmetic *arithmetic,
                                 ref_verdict *verdict)
{
    ref_columns columns = ref_columns_create(config, expert, x, n);
    check_quantized(&columns, l, &(quantized){REF_MODE_INT8, (const uint8_t *)codes, scales}, arithmetic, verdict);
    ref_columns_destroy(&columns);
}
