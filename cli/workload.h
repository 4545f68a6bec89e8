/* A synthetic layer of a known shape in memory, and calls that load its experts in known ways. */
#ifndef MOE4_CLI_WORKLOAD_H
#define MOE4_CLI_WORKLOAD_H

#include "moe4/moe4.h"
#include "shapes.h"

/* Weights, one expert at a time: as many bytes as one expert, made again at every read. */
struct workload {
    const struct layer_shape *shape;
    int32_t n_threads;
    uint8_t *gate_up_codes, *gate_up_scales, *down_codes, *down_scales;
    uint16_t *gate_up_bias, *down_bias; /* bf16; NULL = the shape has none */
};

int workload_open(const struct layer_shape *shape, int32_t n_threads, struct workload *workload);
moe4_expert_source workload_source(struct workload *workload);
void workload_close(struct workload *workload);

/* How the tokens of a call spread over the experts. */
typedef enum load_pattern {
    LOAD_UNIFORM, /* random distinct experts */
    LOAD_ZIPF,    /* the r-th expert chosen first with odds 1/r */
    LOAD_HOT      /* every token's first expert is the same one */
} load_pattern;
extern const char *const load_pattern_names[];

/* Logits [T, E] of the repetition-th call. */
int workload_logits(load_pattern pattern, int64_t repetition, int64_t n_tokens, int32_t n_experts, float *logits);

#endif
