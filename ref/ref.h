/* The oracle: what a layer computes, in double precision, straight from docs/semantics.md.
 *
 * No SIMD, no threads, no table or function shared with src/ (only the public structs).  Slow on purpose: every function
 * works on any subset of rows, and callers sample. */
#ifndef MOE4_REF_H
#define MOE4_REF_H

#include <stddef.h>
#include <stdint.h>

#include "moe4/moe4.h"

/* ---- Formats, by formula ------------------------------------------------------------------------------------------ */

double ref_e2m1(unsigned code);      /* 0..15 */
double ref_e8m0(unsigned byte);      /* 0xFF = NaN */
double ref_e4m3(unsigned code);      /* "fn": 0x7F, 0xFF = NaN */
double ref_bf16(uint16_t bits);
double ref_f16(uint16_t bits);
uint16_t ref_to_bf16(double value);  /* round to nearest even, directly from double */
double ref_round_bf16(double value);
double ref_round_f32(double value);

/* Element `index` of an array of dtype F32, F16, BF16, F8_E4M3, E8M0, I16, I32 or I64. */
double ref_load(const void *array, moe4_dtype dtype, int64_t index);

/* Element (row, k) of an MXFP4 matrix of reduction length K. */
double ref_weight(const moe4_matrix *matrix, int64_t K, int64_t row, int64_t k);

/* Rows gate[i] and up[i] of a gate/up matrix (gate -1 without a gate). */
void ref_gate_up_rows(const moe4_layer_config *config, int64_t i, int64_t *gate, int64_t *up);

/* ---- Stage (i): routing ---------------------------------------------------------------------------------------------- */

/* One token: logits [E] to ids and weights [top_k]; weights are bf16 values.  token_id is used by HASH only. */
void ref_route(const moe4_routing *routing, int32_t n_experts, const double *logits, int64_t token_id, int32_t *ids,
               double *weights);

/* The router's own GEMM for one token: x [router hidden size] to logits [E]; magnitude [E] = sum |x w| + |b|. */
void ref_router(const moe4_layer_config *config, const double *x, double *logits, double *magnitude);

/* ---- Stages (ii) and (iii): the GEMMs ----------------------------------------------------------------------------------- */

/* value[r] = sum_k x[k] w[r,k] + bias[r] and magnitude[r] = sum_k |x[k] w[r,k]| + |bias[r]| for n_x vectors x at once
 * (x [n_x, K], value and magnitude [n_x, rows]); each weight is decoded once. */
void ref_gemm(const moe4_matrix *matrix, int64_t rows, int64_t K, const double *x, int64_t n_x, double *value,
              double *magnitude);

/* The activation at one point in double precision; parameters of local expert l. */
double ref_activation(const moe4_layer_config *config, int32_t l, double gate, double up);

/* The range of the activation over gate +- gate_error, up +- up_error, as docs/semantics.md bounds it (the widening by
 * 4*2^-24*|v| included). */
void ref_activation_range(const moe4_layer_config *config, int32_t l, double gate, double gate_error, double up,
                          double up_error, double *low, double *high);

/* E of docs/semantics.md: n*u/(1-n*u)*magnitude + flush, n = K + K/16 + segments + 2. */
double ref_gemm_bound(int64_t K, int64_t segments, double unit, double magnitude, double flush);

/* ---- Checking a forward's own stages ---------------------------------------------------------------------------------- */

/* How far a stage is from the oracle: 0 = inside its interval everywhere; the ratio is distance from the exact value over
 * the allowed distance, so <= 1 passes.  worst_* name the element. */
typedef struct ref_verdict {
    int64_t n_checked, n_outside;
    double worst_ratio;
    int64_t worst_row, worst_column;
    double worst_got, worst_low, worst_high;
} ref_verdict;

/* v' [n, I] bf16 from x [n, H] (bf16 values as doubles) for n rows of expert l. */
void ref_check_intermediate(const moe4_layer_config *config, const moe4_expert *expert, int32_t l, const double *x,
                            const uint16_t *got, int64_t n, double unit, int flushes, ref_verdict *verdict);

/* z' [n, output_size] bf16 from v' [n, I] bf16. */
void ref_check_gemm2(const moe4_layer_config *config, const moe4_expert *expert, const uint16_t *intermediate,
                     const uint16_t *got, int64_t n, double unit, int flushes, ref_verdict *verdict);

/* y of one token, bit for bit, from its slots' z' rows (NULL = not local) and weights: f32 fma in slot order.
 * out_f32 [output_size] receives the unrounded accumulator. */
void ref_combine(int64_t output_size, int32_t top_k, const uint16_t *const *rows, const float *weights, float *out_f32);

/* The whole layer, same roundings, for one token whose experts are known: experts[a] NULL = slot a is not local.
 * x [H] bf16 values; out [output_size] is the fp32-like accumulator as double.  With unrounded = 1 no intermediate
 * rounding is done at all. */
void ref_token(const moe4_layer_config *config, const moe4_expert *const *experts, const int32_t *locals, int32_t top_k,
               const double *weights, const double *x, int unrounded, double *out);

#endif
