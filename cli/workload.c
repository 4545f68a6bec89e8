#include "workload.h"

#include <math.h>
#include <stdlib.h>

#include "command.h"
#include "generate.h"
#include "memory.h"

const char *const load_pattern_names[] = {"uniform", "zipf", "hot", NULL};

int workload_open(const struct layer_shape *shape, int32_t n_threads, struct workload *workload)
{
    int64_t H = shape->hidden_size, I = shape->intermediate_size;
    *workload = (struct workload){.shape = shape, .n_threads = n_threads};
    int code = allocate(&workload->gate_up_codes, I * H, 1, "an expert's weights");
    if (!code) code = allocate(&workload->gate_up_scales, I * H / 16, 1, "an expert's scales");
    if (!code) code = allocate(&workload->down_codes, H * I / 2, 1, "an expert's weights");
    if (!code) code = allocate(&workload->down_scales, H * I / 32, 1, "an expert's scales");
    if (!code && shape->has_biases) {
        code = allocate(&workload->gate_up_bias, 2 * I, sizeof(uint16_t), "an expert's biases");
        if (!code) code = allocate(&workload->down_bias, H, sizeof(uint16_t), "an expert's biases");
    }
    if (code) workload_close(workload);
    return code;
}

void workload_close(struct workload *workload)
{
    free(workload->gate_up_codes);
    free(workload->gate_up_scales);
    free(workload->down_codes);
    free(workload->down_scales);
    free(workload->gate_up_bias);
    free(workload->down_bias);
    *workload = (struct workload){0};
}

static moe4_status workload_read(void *user, int32_t local_expert, moe4_expert *expert)
{
    struct workload *self = user;
    int64_t H = self->shape->hidden_size, I = self->shape->intermediate_size;
    int64_t gate_up_row = local_expert * 2 * I, down_row = local_expert * H;
    generate_matrix(generate_weights_fast, self->n_threads, generate_key(0, GENERATE_GATE_UP, 0), gate_up_row, 2 * I, H,
                    self->gate_up_codes, self->gate_up_scales);
    generate_matrix(generate_weights_fast, self->n_threads, generate_key(0, GENERATE_DOWN, 0), down_row, H, I,
                    self->down_codes, self->down_scales);
    *expert = (moe4_expert){{.codes = self->gate_up_codes, .scales = self->gate_up_scales},
                            {.codes = self->down_codes, .scales = self->down_scales}};
    if (self->shape->has_biases) {
        generate_biases(generate_key(0, GENERATE_GATE_UP_BIAS, 0), gate_up_row, 2 * I, self->gate_up_bias);
        generate_biases(generate_key(0, GENERATE_DOWN_BIAS, 0), down_row, H, self->down_bias);
        expert->gate_up.bias = self->gate_up_bias;
        expert->down.bias = self->down_bias;
        expert->gate_up.bias_dtype = expert->down.bias_dtype = MOE4_DTYPE_BF16;
    }
    return MOE4_OK;
}

moe4_expert_source workload_source(struct workload *workload)
{
    return (moe4_expert_source){.read = workload_read, .user = workload};
}

/* ---- Logits ------------------------------------------------------------------------------------------------------ */

/* A random value whose largest over experts falls on each with odds e^logit: top-k of logit + this draws without
 * replacement. */
static double gumbel(double uniform)
{
    return -log(-log(uniform));
}

int workload_logits(load_pattern pattern, int64_t repetition, int64_t n_tokens, int32_t n_experts, float *logits)
{
    uint64_t key = generate_key(0, GENERATE_LOGITS, repetition);
    int32_t *rank;
    int code = allocate(&rank, n_experts, sizeof *rank, "the experts' ranks");
    if (code) return code;
    generate_order(generate_key(0, GENERATE_ROUTER_ORDER, 0), n_experts, rank);
    for (int64_t t = 0; t < n_tokens; ++t)
        for (int32_t e = 0; e < n_experts; ++e) {
            double uniform = generate_uniform(key, (uint64_t)(t * n_experts + e)), logit = 4 * uniform - 2;
            if (pattern == LOAD_ZIPF) logit = gumbel(uniform) - log(1 + rank[e]);
            if (pattern == LOAD_HOT && rank[e] == 0) logit = 20;
            logits[t * n_experts + e] = (float)logit;
        }
    free(rank);
    return EXIT_OK;
}
