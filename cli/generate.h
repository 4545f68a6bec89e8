/* Synthetic weights and inputs.
 *
 * Every value is a pure function of (seed, tensor, layer, index), made with integer arithmetic and single IEEE
 * operations only: any part can be made alone, in any order, on any number of threads, and has the same bits on every
 * machine.
 *
 *   weights  normal, sd 0.02 times a log-normal spread (sigma 0.5) per row, quantised by MOE4_SCALE_EVEN
 *   biases   normal, sd 0.1, bf16
 *   router   logits of sd 1 on generated inputs, its bias such that expert loads follow Zipf 0.7; bf16
 *   inputs   normal, one channel in a hundred times 20; bf16 */
#ifndef MOE4_CLI_GENERATE_H
#define MOE4_CLI_GENERATE_H

#include <stdint.h>

enum { GENERATE_VERSION = 1 }; /* raised when any value changes */

typedef enum generate_tensor {
    GENERATE_GATE_UP,
    GENERATE_GATE_UP_BIAS,
    GENERATE_DOWN,
    GENERATE_DOWN_BIAS,
    GENERATE_ROUTER,
    GENERATE_ROUTER_ORDER, /* which expert has which rank of the load */
    GENERATE_ROUTER_TOKENS,
    GENERATE_INPUT,
    GENERATE_LOGITS,
    GENERATE_HASH_TABLE
} generate_tensor;

/* The stream of one tensor. */
uint64_t generate_key(uint64_t seed, generate_tensor tensor, int64_t layer);

/* 64 random bits. */
uint64_t generate_bits(uint64_t key, uint64_t index);

/* Uniform in the open interval (0, 1). */
double generate_uniform(uint64_t key, uint64_t index);

/* Normal, mean 0, sd 1, at most 6.9 from 0. */
float generate_normal(uint64_t key, uint64_t index);

/* Rows first..end-1 of a [rows, K] MXFP4 matrix: K/2 bytes of codes and K/32 of scales a row.  Row numbers count
 * through all experts of a stacked tensor. */
typedef void generate_rows(uint64_t key, int64_t first, int64_t end, int64_t K, uint8_t *codes, uint8_t *scales);
generate_rows generate_weights;

/* The same shape fast: every code equally likely, scale bytes 118..121.  Realistic to a kernel, not to a model. */
generate_rows generate_weights_fast;

/* n_rows rows, the first of them row first_row, by several threads. */
void generate_matrix(generate_rows *rows, int32_t n_threads, uint64_t key, int64_t first_row, int64_t n_rows, int64_t K,
                     uint8_t *codes, uint8_t *scales);

/* Elements first..first+n-1 of a stacked bias. */
void generate_biases(uint64_t key, int64_t first, int64_t n, uint16_t *bias);

/* What a router's bias is added to: the logit, or a score that follows from it. */
enum generate_score { GENERATE_SCORE_LOGIT, GENERATE_SCORE_SIGMOID, GENERATE_SCORE_SQRT_SOFTPLUS };

/* weight [E, H] and bias [E].  Returns 0 when memory for the calibration is short. */
int generate_router(uint64_t seed, int64_t layer, int32_t n_experts, int32_t top_k, int64_t H,
                    enum generate_score score, int32_t n_threads, uint16_t *weight, uint16_t *bias);

/* Tokens first..end-1: x [end-first, H]. */
void generate_inputs(uint64_t key, int64_t first, int64_t end, int64_t H, uint16_t *x);

/* An order of 0..n-1 that looks random. */
void generate_order(uint64_t key, int32_t n, int32_t *order);

#endif
