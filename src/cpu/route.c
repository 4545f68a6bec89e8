#include "cpu/route.h"

#include <math.h>
#include <string.h>

#include "base/convert.h"
#include "base/dims.h"
#include "cpu/route_method.h"
#include "cpu/route_select.h"

/* ---- Scores: double functions of a logit ---------------------------------------------------------------------- */

static double score_logit(double logit, double best)
{
    (void)best;
    return logit;
}

/* A softmax's numerator.  NaN for an all -inf row and for +inf: nothing is invented. */
static double score_exponential(double logit, double best)
{
    return exp(logit - best);
}

static double score_sigmoid(double logit, double best)
{
    (void)best;
    return 1.0 / (1.0 + exp(-logit));
}

static double score_sqrt_softplus(double logit, double best)
{
    (void)best;
    double above = logit > 0.0 ? logit : 0.0;
    return sqrt(above + log1p(exp(-fabs(logit))));
}

/* ---- Divisors ------------------------------------------------------------------------------------------------- */

static const double tiny = 1e-20;

static double divide_by_one(const struct router *router, const struct route_row *row, const double *scores)
{
    (void)router, (void)row, (void)scores;
    return 1.0;
}

static double divide_by_sum(const struct router *router, const struct route_row *row, const double *scores)
{
    (void)row;
    double sum = 0.0;
    for (int32_t a = 0; a < router->top_k; a++) sum += scores[a];
    return sum;
}

static double divide_by_sum_plus_tiny(const struct router *router, const struct route_row *row, const double *scores)
{
    return divide_by_sum(router, row, scores) + tiny;
}

static double divide_by_sum_or_tiny(const struct router *router, const struct route_row *row, const double *scores)
{
    if (router->renormalize == MOE4_RENORMALIZE_NO) return 1.0;
    double sum = divide_by_sum(router, row, scores);
    return sum < tiny ? tiny : sum;
}

/* The softmax's sum over every expert. */
static double divide_by_sum_of_all(const struct router *router, const struct route_row *row, const double *scores)
{
    (void)scores;
    double best = row->logits[row->ids[0]], sum = 0.0;
    for (int32_t e = 0; e < router->n_experts; e++) sum += score_exponential(row->logits[e], best);
    return sum;
}

/* ---- Selection ------------------------------------------------------------------------------------------------ */

static void select_raw(const struct router *router, const struct route_row *row)
{
    select_order(row->logits, router->n_experts, row->keys);
    select_best(row->keys, router->n_experts, router->top_k, row->ids);
}

/* Keys round to float twice, after the score and after the bias: this is part of the contract. */
static void select_biased(const struct router *router, const struct route_row *row)
{
    const int32_t E = router->n_experts;
    for (int32_t e = 0; e < E; e++) {
        float key = (float)router->method->score(row->logits[e], 0.0);
        if (router->bias) key += router->bias[e];
        memcpy(&row->keys[e], &key, sizeof key);
    }
    select_order((const float *)row->keys, E, row->keys);
    if (router->n_group == 1)
        select_best(row->keys, E, router->top_k, row->ids);
    else
        select_best_grouped(row->keys, E, router->n_group, router->topk_group, router->top_k, row->groups, row->ids);
}

static void select_from_table(const struct router *router, const struct route_row *row)
{
    memcpy(row->ids, row->table_row, (size_t)router->top_k * sizeof *row->ids);
}

/* ---- Methods -------------------------------------------------------------------------------------------------- */

static const struct route_method methods[] = {
    [MOE4_ROUTING_DEFAULT] = {"default", 0, MAX_TOP_K, select_raw, score_exponential, divide_by_sum_of_all},
    [MOE4_ROUTING_RENORMALIZE] = {"renormalize", 0, MAX_TOP_K, select_raw, score_exponential, divide_by_sum},
    [MOE4_ROUTING_DEEPSEEK_V3] = {"deepseek_v3", ROUTE_BIAS | ROUTE_GROUPS, MAX_TOP_K, select_biased, score_sigmoid,
                                  divide_by_sum_plus_tiny},
    [MOE4_ROUTING_LLAMA4] = {"llama4", 0, 1, select_raw, score_sigmoid, divide_by_one},
    [MOE4_ROUTING_RENORMALIZE_NAIVE] = {"renormalize_naive", 0, MAX_TOP_K, select_raw, score_exponential,
                                        divide_by_sum},
    [MOE4_ROUTING_TOPK] = {"topk", 0, MAX_TOP_K, select_raw, score_logit, divide_by_one},
    [MOE4_ROUTING_SIGMOID_RENORM] = {"sigmoid_renorm", ROUTE_RENORMALIZE, MAX_TOP_K, select_raw, score_sigmoid,
                                     divide_by_sum_or_tiny},
    [MOE4_ROUTING_MINIMAX2] = {"minimax2", ROUTE_BIAS, MAX_TOP_K, select_biased, score_sigmoid,
                               divide_by_sum_plus_tiny},
    [MOE4_ROUTING_SIGMOID] = {"sigmoid", 0, MAX_TOP_K, select_raw, score_sigmoid, divide_by_one},
    [MOE4_ROUTING_TOPK_SIGMOID] = {"topk_sigmoid", 0, MAX_TOP_K, select_raw, score_sigmoid, divide_by_one},
    [MOE4_ROUTING_SQRT_SOFTPLUS] = {"sqrt_softplus", ROUTE_BIAS, MAX_TOP_K, select_biased, score_sqrt_softplus,
                                    divide_by_sum_plus_tiny},
    [MOE4_ROUTING_HASH] = {"hash", ROUTE_TABLE, MAX_TOP_K, select_from_table, score_sqrt_softplus,
                           divide_by_sum_plus_tiny},
};

const struct route_method *route_method_of(moe4_routing_method method)
{
    unsigned index = (unsigned)method;
    return index < sizeof methods / sizeof *methods && methods[index].name ? &methods[index] : NULL;
}

const char *route_method_name(moe4_routing_method method)
{
    const struct route_method *row = route_method_of(method);
    return row ? row->name : NULL;
}

/* ---- Rows ----------------------------------------------------------------------------------------------------- */

size_t route_scratch_bytes(const struct router *router)
{
    size_t groups = (size_t)router->n_group * sizeof(int64_t);
    return groups + (size_t)router->n_experts * (sizeof(float) + sizeof(int32_t));
}

/* The row as f32.  Logits may begin at any byte. */
static void widen_row(const void *logits, moe4_dtype dtype, int64_t first, int32_t n, float *row)
{
    if (dtype == MOE4_DTYPE_F32) {
        memcpy(row, (const char *)logits + first * (int64_t)sizeof *row, (size_t)n * sizeof *row);
        return;
    }
    for (int32_t e = 0; e < n; e++) row[e] = load_f32(logits, dtype, first + e);
}

/* Through f32 rounded to odd, which keeps what a second rounding needs to know.  One NaN for all. */
static uint16_t bf16_from_f64(double x)
{
    if (x != x) return 0x7FC0;
    float rounded = (float)x;
    if ((double)rounded == x) return bf16_from_f32(rounded);
    uint32_t bits = f32_bits(rounded);
    bits -= fabs((double)rounded) > fabs(x); /* towards zero; from infinity to the largest float */
    return bf16_from_f32(f32_from_bits(bits | 1));
}

static void row_weights(const struct router *router, const struct route_row *row, float *weights)
{
    double scores[MAX_TOP_K];
    double best = row->logits[row->ids[0]];
    for (int32_t a = 0; a < router->top_k; a++) scores[a] = router->method->score(row->logits[row->ids[a]], best);
    double divisor = router->method->divisor(router, row, scores);
    for (int32_t a = 0; a < router->top_k; a++)
        weights[a] = bf16_to_f32(bf16_from_f64(scores[a] * router->scale / divisor));
}

void route_rows(const struct router *router, const struct route_call *call, int64_t first, int64_t last, void *scratch)
{
    const int32_t E = router->n_experts, A = router->top_k;
    struct route_row row = {.groups = scratch};
    float *logits = (float *)(row.groups + router->n_group);
    row.logits = logits;
    row.keys = (int32_t *)(logits + E);
    for (int64_t t = first; t < last; t++) {
        widen_row(call->logits, call->dtype, t * call->ld, E, logits);
        row.ids = call->ids + t * A;
        if (router->table) row.table_row = router->table + (int64_t)call->token_ids[t] * A;
        router->method->select(router, &row);
        row_weights(router, &row, call->weights + t * A);
        if (!call->replay) continue;
        for (int32_t a = 0; a < A; a++) call->replay[t * A + a] = (int16_t)row.ids[a];
    }
}
