/* Routing: which experts a token uses, and with what weights. */
#include <assert.h>
#include <math.h>
#include <stdlib.h>

#include "ref_internal.h"

/* ---- What a method is ---- */

typedef enum selection { SELECT_LOGIT, SELECT_BIASED, SELECT_TABLE } selection;
typedef enum division { DIVIDE_NONE, DIVIDE_SUM_OF_ALL, DIVIDE_SUM_OF_CHOSEN } division;

/* Experts are chosen by their logits (a score that rises with the logit adds rounding and ties, never order), by score
 * plus bias, or by a table.  The weight of a chosen one is score * scale / divisor. */
typedef struct method {
    double (*score)(double logit, double largest);
    selection select;
    division divide;
    double added; /* to the sum that divides, against division by 0 */
    double least; /* that sum can be, for the same */
} method;

static double score_logit(double s, double largest)
{
    (void)largest;
    return s;
}

static double score_exp(double s, double largest)
{
    return exp(s - largest);
}

static double score_sigmoid(double s, double largest)
{
    (void)largest;
    return 1 / (1 + exp(-s));
}

static double score_sqrt_softplus(double s, double largest)
{
    (void)largest;
    return sqrt(s > 0 ? s + log1p(exp(-s)) : log1p(exp(s)));
}

static const method methods[] = {
    [MOE4_ROUTING_DEFAULT] = {score_exp, SELECT_LOGIT, DIVIDE_SUM_OF_ALL, 0, 0},
    [MOE4_ROUTING_RENORMALIZE] = {score_exp, SELECT_LOGIT, DIVIDE_SUM_OF_CHOSEN, 0, 0},
    [MOE4_ROUTING_DEEPSEEK_V3] = {score_sigmoid, SELECT_BIASED, DIVIDE_SUM_OF_CHOSEN, 1e-20, 0},
    [MOE4_ROUTING_LLAMA4] = {score_sigmoid, SELECT_LOGIT, DIVIDE_NONE, 0, 0},
    [MOE4_ROUTING_RENORMALIZE_NAIVE] = {score_exp, SELECT_LOGIT, DIVIDE_SUM_OF_CHOSEN, 0, 0},
    [MOE4_ROUTING_TOPK] = {score_logit, SELECT_LOGIT, DIVIDE_NONE, 0, 0},
    [MOE4_ROUTING_SIGMOID_RENORM] = {score_sigmoid, SELECT_LOGIT, DIVIDE_SUM_OF_CHOSEN, 0, 1e-20},
    [MOE4_ROUTING_MINIMAX2] = {score_sigmoid, SELECT_BIASED, DIVIDE_SUM_OF_CHOSEN, 1e-20, 0},
    [MOE4_ROUTING_SIGMOID] = {score_sigmoid, SELECT_LOGIT, DIVIDE_NONE, 0, 0},
    [MOE4_ROUTING_TOPK_SIGMOID] = {score_sigmoid, SELECT_LOGIT, DIVIDE_NONE, 0, 0},
    [MOE4_ROUTING_SQRT_SOFTPLUS] = {score_sqrt_softplus, SELECT_BIASED, DIVIDE_SUM_OF_CHOSEN, 1e-20, 0},
    [MOE4_ROUTING_HASH] = {score_sqrt_softplus, SELECT_TABLE, DIVIDE_SUM_OF_CHOSEN, 1e-20, 0},
};

/* ---- Choosing ---- */

/* NaN of either sign is larger than every number; -0 equals +0. */
static int key_above(double a, double b)
{
    return isnan(a) ? !isnan(b) : a > b;
}

/* Index of the largest of those keys [n] that are open (the first of equals), -1 if none is. */
static int32_t largest_open(const double *keys, const char *open, int32_t n)
{
    int32_t best = -1;
    for (int32_t i = 0; i < n; i++)
        if (open[i] && (best < 0 || key_above(keys[i], keys[best]))) best = i;
    return best;
}

/* Sum of the two largest of keys [n], n >= 2. */
static double group_score(const double *keys, int32_t n)
{
    double first = keys[0], second = keys[1];
    if (key_above(second, first)) first = keys[1], second = keys[0];
    for (int32_t i = 2; i < n; i++) {
        if (key_above(keys[i], first)) {
            second = first, first = keys[i];
        } else if (key_above(keys[i], second)) {
            second = keys[i];
        }
    }
    return first + second;
}

/* Leaves only the experts of the topk_group best groups open. */
static void close_groups(const moe4_routing *routing, const double *keys, char *open, int32_t n_experts)
{
    int32_t n_group = routing->n_group, group_size = n_experts / n_group;
    double *scores = ref_allocate(n_group, sizeof *scores);
    char *group_open = ref_allocate(n_group, 1);
    for (int32_t g = 0; g < n_group; g++) {
        scores[g] = group_score(keys + g * group_size, group_size);
        group_open[g] = 1;
    }
    for (int32_t e = 0; e < n_experts; e++) open[e] = 0;
    for (int32_t i = 0; i < routing->topk_group; i++) {
        int32_t best = largest_open(scores, group_open, n_group);
        group_open[best] = 0;
        for (int32_t e = best * group_size; e < (best + 1) * group_size; e++) open[e] = 1;
    }
    free(group_open);
    free(scores);
}

/* Keys [E]: logits as they are, or f32(f32(score) + bias). */
static void selection_keys(const moe4_routing *routing, const method *m, int32_t n_experts, const double *logits,
                           double *keys)
{
    for (int32_t e = 0; e < n_experts; e++) {
        keys[e] = logits[e];
        if (m->select != SELECT_BIASED) continue;
        double bias =
            routing->correction_bias ? ref_load(routing->correction_bias, routing->correction_bias_dtype, e) : 0;
        keys[e] = ref_round_f32(ref_round_f32(m->score(logits[e], 0)) + bias);
    }
}

static void choose(const moe4_routing *routing, const method *m, int32_t n_experts, const double *logits, int32_t *ids)
{
    double *keys = ref_allocate(n_experts, sizeof *keys);
    char *open = ref_allocate(n_experts, 1);
    selection_keys(routing, m, n_experts, logits, keys);
    for (int32_t e = 0; e < n_experts; e++) open[e] = 1;
    if (routing->method == MOE4_ROUTING_DEEPSEEK_V3 && routing->n_group > 1)
        close_groups(routing, keys, open, n_experts);
    for (int32_t a = 0; a < routing->top_k; a++) {
        ids[a] = largest_open(keys, open, n_experts);
        open[ids[a]] = 0;
    }
    free(open);
    free(keys);
}

static void look_up(const moe4_routing *routing, int32_t n_experts, int64_t token_id, int32_t *ids)
{
    assert(token_id >= 0 && token_id < routing->vocab_size);
    (void)n_experts;
    for (int32_t a = 0; a < routing->top_k; a++) {
        ids[a] = (int32_t)ref_load(routing->hash_table, routing->hash_table_dtype, token_id * routing->top_k + a);
        assert(ids[a] >= 0 && ids[a] < n_experts);
    }
}

/* ---- Weighing ---- */

static double divisor(const moe4_routing *routing, const method *m, int32_t n_experts, const double *logits,
                      const int32_t *ids, double largest)
{
    if (m->divide == DIVIDE_NONE) return 1;
    if (routing->method == MOE4_ROUTING_SIGMOID_RENORM && routing->renormalize == MOE4_RENORMALIZE_NO) return 1;
    double sum = 0;
    if (m->divide == DIVIDE_SUM_OF_ALL)
        for (int32_t e = 0; e < n_experts; e++) sum += m->score(logits[e], largest);
    else
        for (int32_t a = 0; a < routing->top_k; a++) sum += m->score(logits[ids[a]], largest);
    sum += m->added;
    return sum < m->least ? m->least : sum; /* a NaN stays */
}

void ref_route(const moe4_routing *routing, int32_t n_experts, const double *logits, int64_t token_id, int32_t *ids,
               double *weights)
{
    const method *m = &methods[routing->method];
    if (m->select == SELECT_TABLE)
        look_up(routing, n_experts, token_id, ids);
    else
        choose(routing, m, n_experts, logits, ids);

    double largest = logits[ids[0]]; /* of all and of the chosen, where a score needs it */
    double scale = routing->scaling_factor == 0 ? 1 : routing->scaling_factor;
    double sum = divisor(routing, m, n_experts, logits, ids, largest);
    for (int32_t a = 0; a < routing->top_k; a++)
        weights[a] = ref_round_bf16(m->score(logits[ids[a]], largest) * scale / sum);
}

int32_t ref_local_expert(const moe4_layer_config *config, int64_t id)
{
    if (id < 0 || id >= config->n_experts) return -1;
    if (config->expert_map) return config->expert_map[id];
    int64_t local = id - config->first_expert;
    int64_t n_local = config->n_local_experts ? config->n_local_experts : config->n_experts - config->first_expert;
    return local >= 0 && local < n_local ? (int32_t)local : -1;
}
