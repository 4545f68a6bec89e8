/* Verdicts on an implementation's bf16 and f32 stages. */
#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "ref_check.h"

/* ---- Verdicts ---- */

void ref_verdict_add(ref_verdict *total, const ref_verdict *part)
{
    int64_t n_checked = total->n_checked + part->n_checked, n_outside = total->n_outside + part->n_outside;
    if (total->worst_row < 0 || part->worst_ratio > total->worst_ratio) *total = *part;
    total->n_checked = n_checked;
    total->n_outside = n_outside;
}

void ref_verdict_element(ref_verdict *verdict, int64_t row, int64_t column, double got, double low, double high,
                         double ratio)
{
    ref_verdict one = {1, ratio > 1, ratio, row, column, got, low, high};
    ref_verdict_add(verdict, &one);
}

/* The error `needed` to explain what was got over the error allowed, kept on the right side of 1. */
static double error_ratio(double needed, double allowed, int inside)
{
    double ratio = needed / allowed;
    if (inside) return needed == 0 ? 0 : ratio < 1 ? ratio : 1;
    return allowed > 0 && ratio < DBL_MAX ? fmax(ratio, nextafter(1, 2)) : DBL_MAX;
}

/* Magnitude of a bf16, infinity standing where the next number would. */
static double bf16_magnitude(unsigned bits)
{
    return bits == 0x7F80 ? 0x1p128 : ref_bf16((uint16_t)bits);
}

/* The reals that round to this bf16, ends included: what an implementation may have had before it rounded. */
static void bf16_cell(uint16_t bits, double *low, double *high)
{
    unsigned magnitude = bits & 0x7FFFu;
    double here = bf16_magnitude(magnitude);
    double inner = magnitude ? (here + bf16_magnitude(magnitude - 1)) / 2 : -bf16_magnitude(1) / 2;
    double outer = magnitude == 0x7F80 ? INFINITY : (here + bf16_magnitude(magnitude + 1)) / 2;
    *low = bits & 0x8000u ? -outer : inner;
    *high = bits & 0x8000u ? -inner : outer;
}

static void judge_bf16(ref_verdict *verdict, int64_t row, int64_t column, uint16_t bits, double exact, ref_range range)
{
    double got = ref_bf16(bits), low = ref_round_bf16(range.low), high = ref_round_bf16(range.high), ratio;
    if (isnan(got)) {
        ratio = range.nan == REF_NAN_NEVER ? DBL_MAX : 0;
    } else if (range.nan == REF_NAN_ALWAYS) {
        ratio = DBL_MAX;
    } else {
        int inside = low <= got && got <= high;
        double cell_low, cell_high;
        bf16_cell(bits, &cell_low, &cell_high);
        ratio = exact < cell_low    ? error_ratio(cell_low - exact, range.high - exact, inside)
                : exact > cell_high ? error_ratio(exact - cell_high, exact - range.low, inside)
                                    : error_ratio(0, range.high - range.low, inside);
    }
    ref_verdict_element(verdict, row, column, got, low, high, ratio);
}

static void judge_f32(ref_verdict *verdict, int64_t row, int64_t column, float got, double exact, ref_range range)
{
    double low = ref_round_f32(range.low), high = ref_round_f32(range.high), ratio;
    if (isnan(got))
        ratio = range.nan == REF_NAN_NEVER ? DBL_MAX : 0;
    else if (range.nan == REF_NAN_ALWAYS)
        ratio = DBL_MAX;
    else
        ratio = error_ratio(got == exact ? 0 : fabs(got - exact), got < exact ? exact - range.low : range.high - exact,
                            low <= got && got <= high);
    ref_verdict_element(verdict, row, column, got, low, high, ratio);
}

/* Both NaN, or the same bits. */
static int same(double a, double b)
{
    return isnan(a) ? isnan(b) : memcmp(&a, &b, sizeof a) == 0;
}

static void judge_same(ref_verdict *verdict, int64_t row, int64_t column, double got, double expected)
{
    ref_verdict_element(verdict, row, column, got, expected, expected, same(got, expected) ? 0 : DBL_MAX);
}

/* ---- Stage (i) ---- */

void ref_check_router(const moe4_layer_config *config, const double *router_x, int64_t n, const float *got,
                      const ref_arithmetic *arithmetic, ref_verdict *verdict)
{
    int64_t K = ref_router_size(config);
    double *w = ref_allocate(K, sizeof *w), bias;
    *verdict = (ref_verdict)REF_VERDICT_INIT;
    for (int32_t e = 0; e < config->n_experts; e++) {
        ref_router_row(&config->router, K, e, w, &bias);
        for (int64_t t = 0; t < n; t++) {
            ref_sum sum = ref_dot(router_x + t * K, w, K, bias);
            judge_f32(verdict, t, e, got[t * config->n_experts + e], sum.value,
                      ref_sum_range(sum.value, sum.magnitude, ref_sum_bound(&sum, K, arithmetic)));
        }
    }
    free(w);
}

void ref_check_routing(const moe4_routing *routing, int32_t n_experts, const float *logits, const int32_t *token_ids,
                       int64_t n, const int32_t *ids, const float *weights, ref_verdict *verdict)
{
    int32_t top_k = routing->top_k;
    double *row = ref_allocate(n_experts, sizeof *row), *expected_weights = ref_allocate(top_k, sizeof *row);
    int32_t *expected_ids = ref_allocate(top_k, sizeof *expected_ids);
    *verdict = (ref_verdict)REF_VERDICT_INIT;
    for (int64_t t = 0; t < n; t++) {
        for (int32_t e = 0; e < n_experts; e++) row[e] = logits[t * n_experts + e];
        ref_route(routing, n_experts, row, token_ids ? token_ids[t] : 0, expected_ids, expected_weights);
        for (int32_t a = 0; a < top_k; a++) {
            if (ids[t * top_k + a] != expected_ids[a])
                judge_same(verdict, t, a, ids[t * top_k + a], expected_ids[a]);
            else
                judge_same(verdict, t, a, weights[t * top_k + a], expected_weights[a]);
        }
    }
    free(expected_ids);
    free(expected_weights);
    free(row);
}

/* ---- Stages (ii) and (iii) ---- */

double ref_columns_exact(const ref_columns *columns, int32_t l, int64_t j)
{
    return ref_activation(columns->config, l, columns->gate[j].value, columns->up[j].value);
}

ref_range ref_columns_range(const ref_columns *columns, int32_t l, int64_t j, const ref_arithmetic *arithmetic)
{
    const ref_sum *gate = &columns->gate[j], *up = &columns->up[j];
    int64_t K = columns->config->hidden_size;
    return ref_activation_range(columns->config, l,
                                ref_sum_range(gate->value, gate->magnitude, ref_sum_bound(gate, K, arithmetic)),
                                ref_sum_range(up->value, up->magnitude, ref_sum_bound(up, K, arithmetic)));
}

void ref_check_intermediate(const moe4_layer_config *config, const moe4_expert *expert, int32_t l, const double *x,
                            const uint16_t *got, int64_t n, const ref_arithmetic *arithmetic, ref_verdict *verdict)
{
    ref_columns columns = ref_columns_create(config, expert, x, n);
    *verdict = (ref_verdict)REF_VERDICT_INIT;
    for (int64_t i = 0; i < config->intermediate_size; i++) {
        ref_columns_compute(&columns, i);
        for (int64_t j = 0; j < n; j++)
            judge_bf16(verdict, j, i, got[j * config->intermediate_size + i], ref_columns_exact(&columns, l, j),
                       ref_columns_range(&columns, l, j, arithmetic));
    }
    ref_columns_destroy(&columns);
}

void ref_check_gemm2(const moe4_layer_config *config, const moe4_expert *expert, const double *intermediate,
                     const uint16_t *got, int64_t n, const ref_arithmetic *arithmetic, ref_verdict *verdict)
{
    int64_t K = config->intermediate_size, output_size = ref_output_size(config);
    double *w = ref_allocate(K, sizeof *w), bias;
    *verdict = (ref_verdict)REF_VERDICT_INIT;
    for (int64_t h = 0; h < output_size; h++) {
        ref_matrix_row(&expert->down, K, h, w, &bias);
        for (int64_t j = 0; j < n; j++) {
            ref_sum sum = ref_dot(intermediate + j * K, w, K, bias);
            judge_bf16(verdict, j, h, got[j * output_size + h], sum.value,
                       ref_sum_range(sum.value, sum.magnitude, ref_sum_bound(&sum, K, arithmetic)));
        }
    }
    free(w);
}

/* ---- Stage (iv) ---- */

void ref_check_combine(int64_t output_size, int32_t top_k, const uint16_t *const *rows, const float *weights,
                       moe4_write write, const void *before, const void *got, moe4_dtype dtype, ref_verdict *verdict)
{
    float *acc = ref_allocate(output_size, sizeof *acc);
    ref_combine(output_size, top_k, rows, weights, acc);
    *verdict = (ref_verdict)REF_VERDICT_INIT;
    for (int64_t h = 0; h < output_size; h++) {
        double old = write == MOE4_WRITE_ADD ? ref_load(before, dtype, h) : 0;
        judge_same(verdict, 0, h, ref_load(got, dtype, h), ref_output(acc[h], write, old, dtype));
    }
    free(acc);
}
