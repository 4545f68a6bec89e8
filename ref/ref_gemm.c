/* Sums of products over rows of weights, and the error that fp32 may make in them. */
#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ref_internal.h"

void *ref_allocate(int64_t count, size_t element_bytes)
{
    void *memory = calloc(count > 0 ? (size_t)count : 1, element_bytes);
    if (!memory) {
        fprintf(stderr, "ref: out of memory for %lld elements of %zu bytes\n", (long long)count, element_bytes);
        abort();
    }
    return memory;
}

/* ---- Rows of weights ---- */

static const uint8_t *row_bytes(const uint8_t *bytes, int64_t row, int64_t stride, int64_t tight)
{
    return bytes + row * (stride ? stride : tight);
}

static double row_bias(const void *bias, moe4_dtype dtype, int64_t row)
{
    return bias ? ref_load(bias, dtype, row) : 0;
}

/* The 16 code values under one scale: what 0xFF makes NaN and 2^127 may make infinite. */
static void scaled_codes(unsigned scale, double values[16])
{
    for (unsigned code = 0; code < 16; code++) values[code] = ref_round_f32(ref_e2m1(code) * ref_e8m0(scale));
}

double ref_weight(const moe4_matrix *matrix, int64_t K, int64_t row, int64_t k)
{
    const uint8_t *codes = row_bytes(matrix->codes, row, matrix->codes_row_bytes, K / 2);
    const uint8_t *scales = row_bytes(matrix->scales, row, matrix->scales_row_bytes, K / REF_MX_BLOCK);
    unsigned code = k % 2 ? codes[k / 2] >> 4 : codes[k / 2] & 15;
    return ref_round_f32(ref_e2m1(code) * ref_e8m0(scales[k / REF_MX_BLOCK]));
}

void ref_matrix_row(const moe4_matrix *matrix, int64_t K, int64_t row, double *w, double *bias)
{
    const uint8_t *codes = row_bytes(matrix->codes, row, matrix->codes_row_bytes, K / 2);
    const uint8_t *scales = row_bytes(matrix->scales, row, matrix->scales_row_bytes, K / REF_MX_BLOCK);
    double values[256][16]; /* by scale; a row has few, so they are found once each */
    uint8_t is_known[256] = {0};
    for (int64_t k = 0; k < K; k += 2) {
        const unsigned scale = scales[k / REF_MX_BLOCK];
        if (!is_known[scale]) scaled_codes(scale, values[scale]);
        is_known[scale] = 1;
        w[k] = values[scale][codes[k / 2] & 15];
        w[k + 1] = values[scale][codes[k / 2] >> 4];
    }
    *bias = row_bias(matrix->bias, matrix->bias_dtype, row);
}

void ref_router_row(const moe4_router *router, int64_t K, int64_t row, double *w, double *bias)
{
    for (int64_t k = 0; k < K; k++) w[k] = ref_load(router->weight, router->weight_dtype, row * K + k);
    *bias = row_bias(router->bias, router->bias_dtype, row);
}

void ref_gate_up_rows(const moe4_layer_config *config, int64_t i, int64_t *gate, int64_t *up)
{
    int64_t half = config->stored_intermediate_size ? config->stored_intermediate_size : config->intermediate_size;
    *gate = -1;
    *up = i;
    switch (config->gate_up) {
    case MOE4_GATE_UP_NONE: break;
    case MOE4_GATE_UP_INTERLEAVED: *gate = 2 * i, *up = 2 * i + 1; break;
    case MOE4_GATE_UP_GATE_FIRST: *gate = i, *up = half + i; break;
    case MOE4_GATE_UP_UP_FIRST: *gate = half + i; break;
    }
}

int64_t ref_output_size(const moe4_layer_config *config)
{
    return config->output_size ? config->output_size : config->hidden_size;
}

int64_t ref_router_size(const moe4_layer_config *config)
{
    return config->router.hidden_size ? config->router.hidden_size : config->hidden_size;
}

/* ---- Sums ---- */

ref_sum ref_dot(const double *x, const double *w, int64_t K, double bias)
{
    ref_sum sum = {0, 0, 0, 0};
    for (int64_t k = 0; k < K; k++) {
        double product = x[k] * w[k];
        sum.value += product;
        sum.magnitude += fabs(product);
        sum.x += fabs(x[k]);
        sum.w += fabs(w[k]);
    }
    sum.value += bias;
    sum.magnitude += fabs(bias);
    return sum;
}

void ref_gemm(const moe4_matrix *matrix, int64_t rows, int64_t K, const double *x, int64_t n_x, double *value,
              double *magnitude)
{
    double *w = ref_allocate(K, sizeof *w), bias;
    for (int64_t row = 0; row < rows; row++) {
        ref_matrix_row(matrix, K, row, w, &bias);
        for (int64_t j = 0; j < n_x; j++) {
            ref_sum sum = ref_dot(x + j * K, w, K, bias);
            value[j * rows + row] = sum.value;
            if (magnitude) magnitude[j * rows + row] = sum.magnitude;
        }
    }
    free(w);
}

/* acc + product, rounded once to f32: first to odd in double, which has more than twice f32's bits. */
static float add_rounded_once(float acc, double product)
{
    double sum = acc + product, product_part = sum - acc;
    double error = (acc - (sum - product_part)) + (product - product_part);
    uint64_t bits;
    memcpy(&bits, &sum, sizeof bits);
    if (isfinite(sum) && error != 0 && !(bits & 1)) sum = nextafter(sum, error > 0 ? INFINITY : -INFINITY);
    return (float)sum;
}

float ref_int8_sum(const moe4_matrix *matrix, int64_t K, int64_t row, const int8_t *codes, const float *scales)
{
    double *w = ref_allocate(K, sizeof *w), bias;
    float acc = 0;
    ref_matrix_row(matrix, K, row, w, &bias);
    for (int64_t first = 0; first < K; first += REF_MX_BLOCK) {
        double sum = 0; /* exact: integers times one power of two */
        for (int64_t k = first; k < first + REF_MX_BLOCK; k++) sum += codes[k] * w[k];
        acc = add_rounded_once(acc, sum * scales[first / REF_MX_BLOCK]);
    }
    free(w);
    return acc;
}

ref_columns ref_columns_create(const moe4_layer_config *config, const moe4_expert *expert, const double *x, int64_t n)
{
    return (ref_columns){.config = config,
                         .expert = expert,
                         .x = x,
                         .n = n,
                         .gate = ref_allocate(n, sizeof(ref_sum)),
                         .up = ref_allocate(n, sizeof(ref_sum)),
                         .w = ref_allocate(config->hidden_size, sizeof(double))};
}

static void columns_row(ref_columns *columns, int64_t row, ref_sum *sums)
{
    int64_t H = columns->config->hidden_size;
    double bias;
    ref_matrix_row(&columns->expert->gate_up, H, row, columns->w, &bias);
    for (int64_t j = 0; j < columns->n; j++) sums[j] = ref_dot(columns->x + j * H, columns->w, H, bias);
}

void ref_columns_compute(ref_columns *columns, int64_t i)
{
    int64_t gate, up;
    ref_gate_up_rows(columns->config, i, &gate, &up);
    if (gate >= 0) columns_row(columns, gate, columns->gate);
    columns_row(columns, up, columns->up);
}

void ref_columns_destroy(ref_columns *columns)
{
    free(columns->w);
    free(columns->up);
    free(columns->gate);
}

void ref_router(const moe4_layer_config *config, const double *x, double *logits, double *magnitude)
{
    int64_t K = ref_router_size(config);
    double *w = ref_allocate(K, sizeof *w), bias;
    for (int32_t e = 0; e < config->n_experts; e++) {
        ref_router_row(&config->router, K, e, w, &bias);
        ref_sum sum = ref_dot(x, w, K, bias);
        logits[e] = sum.value;
        if (magnitude) magnitude[e] = sum.magnitude;
    }
    free(w);
}

/* ---- Bounds ---- */

ref_arithmetic ref_arithmetic_of(moe4_isa isa)
{
    switch (isa) {
    case MOE4_ISA_AVX512_BF16:
    case MOE4_ISA_AMX: return (ref_arithmetic){0x1p-24, 1, 1, 0, 0};
    case MOE4_ISA_NEON_BF16: return (ref_arithmetic){0x1p-23, 1, 1, 0, 0};
    default: return (ref_arithmetic)REF_ARITHMETIC_FP32;
    }
}

double ref_gemm_bound(int64_t K, int64_t segments, double unit, double magnitude, double flush)
{
    double nu = (double)(K + K / 16 + segments + 2) * unit;
    return nu < 1 ? nu / (1 - nu) * magnitude + flush : INFINITY;
}

double ref_sum_bound(const ref_sum *sum, int64_t K, const ref_arithmetic *arithmetic)
{
    double flush = arithmetic->flushes ? 0x1p-126 * ((double)K + sum->x + sum->w) : 0;
    double chains =
        ref_gemm_bound(arithmetic->chain, 0, arithmetic->chain ? arithmetic->chain_unit : 0, sum->magnitude, 0);
    return chains + ref_gemm_bound(K, arithmetic->segments, arithmetic->unit, sum->magnitude, flush);
}

ref_range ref_sum_range(double value, double magnitude, double bound)
{
    if (!isfinite(value)) return (ref_range){value, value, isnan(value) ? REF_NAN_ALWAYS : REF_NAN_NEVER};
    /* A partial sum is at most all that is positive, at least all that is negative. */
    int overflows_up = (magnitude + value) / 2 + bound > FLT_MAX;
    int overflows_down = (magnitude - value) / 2 + bound > FLT_MAX;
    return (ref_range){overflows_down ? -INFINITY : value - bound, overflows_up ? INFINITY : value + bound,
                       overflows_up && overflows_down ? REF_NAN_MAYBE : REF_NAN_NEVER};
}
