/* How a prepared layer's config is kept in a file: the numbers, in this order, as one I64 tensor.  New ones are
 * appended, and the format version in saved.c raised. */
#ifndef MOE4_SAVED_H
#define MOE4_SAVED_H

enum saved_number {
    SAVED_HIDDEN_SIZE,
    SAVED_INTERMEDIATE_SIZE,
    SAVED_OUTPUT_SIZE,
    SAVED_STORED_INTERMEDIATE_SIZE,
    SAVED_N_EXPERTS,
    SAVED_FIRST_EXPERT,
    SAVED_N_LOCAL_EXPERTS,
    SAVED_GATE_UP,
    SAVED_ACTIVATION,
    SAVED_HAS_ALPHA,
    SAVED_HAS_BETA,
    SAVED_HAS_LIMIT,
    SAVED_METHOD,
    SAVED_TOP_K,
    SAVED_N_GROUP,
    SAVED_TOPK_GROUP,
    SAVED_RENORMALIZE,
    SAVED_HAS_CORRECTION_BIAS,
    SAVED_VOCAB_SIZE,
    SAVED_ROUTER_SIZE,
    SAVED_COMPUTE,
    N_SAVED_NUMBERS
};

#endif
