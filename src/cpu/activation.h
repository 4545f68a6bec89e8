/* Activations: v = act(gate, up) in f32, each result within 0.51 ulp of the exact function (docs/semantics.md,
 * activations).
 *
 * The arithmetic is double precision and uses only +, -, *, / and integer operations, so the same source compiled for
 * another instruction set gives the same bits.  NaN results are always 0x7FC00000. */
#ifndef MOE4_CPU_ACTIVATION_H
#define MOE4_CPU_ACTIVATION_H

#include <stdint.h>

#include "moe4/moe4.h"

enum { N_ACTIVATIONS = MOE4_ACTIVATION_IDENTITY + 1 }; /* NONE included */

/* One expert's parameters.  An absent one has the value with which it vanishes from the formula. */
struct activation_params {
    float alpha; /* 1 when absent */
    float beta;  /* SITU: +inf when absent, beta*tanh(u/beta) being u then; others: -0, which changes no u */
    float limit; /* +inf when absent */
};

/* v[i] = act(gate[i], up[i]) for i < n.  gate may be NULL when the activation has none; v overlaps neither. */
typedef void activation_fn(const float *gate, const float *up, int64_t n, const struct activation_params *params,
                           float *v);

/* What is compiled once for each instruction set. */
struct activation_kernels {
    activation_fn *run[N_ACTIVATIONS];                           /* by moe4_activation; NULL for NONE */
    void (*round)(const float *v, int64_t n, uint16_t *rounded); /* v' = bf16(v) */
};

extern const struct activation_kernels activation_c, activation_avx2, activation_avx512;

/* The kernels to use at this level (not AUTO). */
const struct activation_kernels *activation_kernels_for(moe4_isa isa);

/* "silu", "swiglu_oai", ...; NULL for what is no activation. */
const char *activation_name(moe4_activation activation);

/* Whether gate/up matrices hold a gate: 2I rows, not I. */
int activation_has_gate(moe4_activation activation);

/* Refuses, in words: an unknown activation, parameters it does not use or that are out of range, a missing one that it
 * needs, a gate/up order that does not fit.  Looks only at words and MOE4_SAME values, never through a pointer. */
moe4_status activation_validate(struct moe4_context *context, const moe4_layer_config *config);

/* The same for the values of the MOE4_PER_EXPERT parameters of n_local_experts experts. */
moe4_status activation_validate_values(struct moe4_context *context, const moe4_layer_config *config,
                                       int32_t n_local_experts);

/* The parameters of one local expert of a config that passed both. */
struct activation_params activation_resolve(const moe4_layer_config *config, int32_t local_expert);

#endif
