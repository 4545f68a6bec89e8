/* The oracle: what a layer computes, in double precision, straight from docs/semantics.md.
 *
 * No SIMD, no threads, no table or function shared with src/ (only the public structs).  Slow on purpose: every
 * function works on any subset of rows, and callers sample.  Configs and weights must be ones that the library would
 * accept; an allocation that fails ends the process.  Everything is evaluated in the default rounding mode. */
#ifndef MOE4_REF_H
#define MOE4_REF_H

#include <stddef.h>
#include <stdint.h>

#include "moe4/moe4.h"
#include "moe4/quant.h"

/* ---- Formats, by formula ------------------------------------------------------------------------------------------
 */

double ref_e2m1(unsigned code); /* 0..15 */
double ref_e8m0(unsigned byte); /* 0xFF = NaN */
double ref_e4m3(unsigned code); /* "fn": 0x7F, 0xFF = NaN */
double ref_bf16(uint16_t bits);
double ref_f16(uint16_t bits);

/* Round to nearest, ties to even, directly from double. */
unsigned ref_to_e2m1(double value); /* saturates at 6; NaN becomes +6 */
unsigned ref_to_e4m3(double value); /* saturates at 448; NaN becomes 0x7F */
uint16_t ref_to_bf16(double value);
uint16_t ref_to_f16(double value);
double ref_round_bf16(double value);
double ref_round_f16(double value);
double ref_round_f32(double value);

/* Element `index` of an array, at any alignment, of any dtype but NONE. */
double ref_load(const void *array, moe4_dtype dtype, int64_t index);

/* ---- Quantised activations and weights ------------------------------------------------------------------------------
 */

/* Bit-exact rules.  x holds bf16 values (MXFP4: f32).  Below a NaN scale every code is 0. */
void ref_quantize_mxfp8(const double *x, int64_t n, uint8_t *codes, uint8_t *scales); /* n % 32 == 0 */
void ref_quantize_fp8(const double *x, int64_t n, uint8_t *codes, float *scale);      /* n elements share one scale */
void ref_quantize_int8(const double *x, int64_t n, int8_t *codes, float *scales);     /* n % 32 == 0 */
void ref_quantize_mxfp4(const double *x, int64_t n, moe4_scale_rule rule, uint8_t *codes, uint8_t *scales);

void ref_dequantize_mxfp8(const uint8_t *codes, const uint8_t *scales, int64_t n, double *x);
void ref_dequantize_fp8(const uint8_t *codes, float scale, int64_t n, double *x);
void ref_dequantize_int8(const int8_t *codes, const float *scales, int64_t n, double *x);
void ref_round_fp8(double *x, int64_t n); /* x through both */
void ref_round_int8(double *x, int64_t n);

/* Element (row, k) of an MXFP4 matrix of reduction length K.  6 * 2^127 and its like are infinite, as in f32. */
double ref_weight(const moe4_matrix *matrix, int64_t K, int64_t row, int64_t k);

/* ---- Stage (i): routing
 * ---------------------------------------------------------------------------------------------- */

/* The router's own GEMM for one token: x [router hidden size] to logits [E]; magnitude [E] = sum |x w| + |b|, NULL =
 * not wanted. */
void ref_router(const moe4_layer_config *config, const double *x, double *logits, double *magnitude);

/* One token: logits [E] to ids and weights [top_k]; weights are bf16 values.  token_id is used by HASH only. */
void ref_route(const moe4_routing *routing, int32_t n_experts, const double *logits, int64_t token_id, int32_t *ids,
               double *weights);

/* The local expert that a global id names, -1 if it is not here (or no expert at all). */
int32_t ref_local_expert(const moe4_layer_config *config, int64_t id);

/* ---- Stages (ii) and (iii): the experts
 * ------------------------------------------------------------------------------- */

/* Rows gate[i] and up[i] of a gate/up matrix (gate -1 without a gate). */
void ref_gate_up_rows(const moe4_layer_config *config, int64_t i, int64_t *gate, int64_t *up);

/* value[r] = sum_k x[k] w[r,k] + bias[r] and magnitude[r] = sum_k |x[k] w[r,k]| + |bias[r]| for n_x vectors x at once
 * (x [n_x, K], value and magnitude [n_x, rows], magnitude NULL = not wanted); each weight is decoded once. */
void ref_gemm(const moe4_matrix *matrix, int64_t rows, int64_t K, const double *x, int64_t n_x, double *value,
              double *magnitude);

/* The f32 sum, without bias, of row `row` of a matrix in int8 compute, bit for bit: from +0, block by block, the exact
 * product of a block's integers and scales added and rounded once.  codes [K], scales [K/32]. */
float ref_int8_sum(const moe4_matrix *matrix, int64_t K, int64_t row, const int8_t *codes, const float *scales);

/* The activation at one point in double precision; parameters of local expert l. */
double ref_activation(const moe4_layer_config *config, int32_t l, double gate, double up);

/* x' of MOE4_WEIGHT_ON_INPUT: bf16 of the f32 product. */
double ref_weighted_input(double x, double weight);

/* Which roundings a whole layer has between its stages. */
typedef enum ref_mode {
    REF_MODE_BF16 = 0,      /* bf16 intermediate and gemm2 rows */
    REF_MODE_UNROUNDED = 1, /* none at all, the sum over slots included */
    REF_MODE_MXFP8,         /* as BF16, the intermediate quantised to MXFP8 */
    REF_MODE_FP8,           /* as BF16, the intermediate quantised to e4m3 with an f32 scale per 128 */
    REF_MODE_INT8           /* as BF16, the intermediate quantised to int8 with an f32 scale per 32 */
} ref_mode;

/* One expert on n rows x [n, H], as the expert sees them (bf16 values, or dequantised).  Sums are exact, then rounded
 * to f32 and on as the mode says.  intermediate [n, I] (dequantised; NULL = not wanted), rows [n, output_size]. */
void ref_expert(const moe4_layer_config *config, const moe4_expert *expert, int32_t l, const double *x, int64_t n,
                ref_mode mode, double *intermediate, double *rows);

/* ---- Stage (iv): the sum over slots
 * ------------------------------------------------------------------------------------- */

/* The accumulator of one token, bit for bit, from its slots' z' rows (NULL = not local) and weights: f32 fma in slot
 * order, from +0.  out_f32 [output_size]. */
void ref_combine(int64_t output_size, int32_t top_k, const uint16_t *const *rows, const float *weights, float *out_f32);

/* What y then holds: acc, or the f32 sum before + acc, rounded to dtype F32, F16 or BF16. */
double ref_output(float acc, moe4_write write, double before, moe4_dtype dtype);

/* The whole layer for one token whose experts are known: experts[a] NULL = slot a is not local, locals[a] its number.
 * x [H]; out [output_size] is the accumulator as double (f32 values but for UNROUNDED). */
void ref_token(const moe4_layer_config *config, const moe4_expert *const *experts, const int32_t *locals, int32_t top_k,
               const double *weights, const double *x, ref_mode mode, double *out);

/* ---- Bounds
 * ------------------------------------------------------------------------------------------------------------- */

/* What is known of an implementation's fp32 sums. */
typedef struct ref_arithmetic {
    double unit;      /* u: 2^-24 for round to nearest; 0 = sums must be exact */
    int64_t segments; /* partial sums along K, at most */
    int flushes;      /* 1 = subnormals are flushed to zero */
    int64_t chain;    /* products that are added up at chain_unit before all that the above says of sums; 0 = none */
    double chain_unit;
} ref_arithmetic;
#define REF_ARITHMETIC_FP32                                                                                            \
    {                                                                                                                  \
        0x1p-24, 1, 0, 0, 0                                                                                            \
    }

/* The sums of the CPU backend's kernels at a level (not AUTO), as its instructions are documented: vdpbf16ps, tdpbf16ps
 * and bfmmla flush subnormals, and bfmmla rounds to odd, which can be off by a whole unit in the last place. */
ref_arithmetic ref_arithmetic_of(moe4_isa isa);

/* E of docs/semantics.md: n*u/(1-n*u)*magnitude + flush, n = K + K/16 + segments + 2. */
double ref_gemm_bound(int64_t K, int64_t segments, double unit, double magnitude, double flush);

typedef enum ref_nan { REF_NAN_NEVER, REF_NAN_MAYBE, REF_NAN_ALWAYS } ref_nan;

/* What a computed value may be: low..high, infinities included, or a NaN. */
typedef struct ref_range {
    double low, high;
    ref_nan nan;
} ref_range;

/* The range of an fp32 sum in any order, E = bound.  Infinite only where a partial sum may overflow. */
ref_range ref_sum_range(double value, double magnitude, double bound);

/* The range of the activation over ranges of gate and up, widened by 4*2^-24*|v| as docs/semantics.md says. */
ref_range ref_activation_range(const moe4_layer_config *config, int32_t l, ref_range gate, ref_range up);

/* ---- Checking a forward's own stages
 * -------------------------------------------------------------------------------------
 *
 * Each check takes the implementation's own output of the stage before, and starts its verdict afresh. */

/* worst_ratio is the least error that explains the worst element, over the error that its bound allows: <= 1 exactly
 * when nothing is outside.  DBL_MAX where none is allowed, for NaN instead of a number and the reverse.  Of quantised
 * codes and scales: 0, or 1 + how many codes, bytes or units too far.  The worst element is element (worst_row,
 * worst_column) of the array that was checked, low..high what it may hold (NaN, NaN: a NaN).  No element: rows and
 * columns are -1. */
typedef struct ref_verdict {
    int64_t n_checked, n_outside;
    double worst_ratio;
    int64_t worst_row, worst_column;
    double worst_got, worst_low, worst_high;
} ref_verdict;
#define REF_VERDICT_INIT                                                                                               \
    {                                                                                                                  \
        0, 0, 0.0, -1, -1, 0.0, 0.0, 0.0                                                                               \
    }

/* Adds `part` to `total`, which keeps the worse element.  Put part's worst_row into total's numbering first. */
void ref_verdict_add(ref_verdict *total, const ref_verdict *part);

/* f32 logits [n, E] of the layer's own router from router_x [n, router hidden size]. */
void ref_check_router(const moe4_layer_config *config, const double *router_x, int64_t n, const float *got,
                      const ref_arithmetic *arithmetic, ref_verdict *verdict);

/* ids and weights [n, top_k] from f32 logits [n, E] and, for HASH, token_ids [n]: ids identical, weights bit for bit.
 * A wrong id is reported as such, and its weight is then not looked at. */
void ref_check_routing(const moe4_routing *routing, int32_t n_experts, const float *logits, const int32_t *token_ids,
                       int64_t n, const int32_t *ids, const float *weights, ref_verdict *verdict);

/* v' [n, I] bf16 from x [n, H] for n rows of expert l. */
void ref_check_intermediate(const moe4_layer_config *config, const moe4_expert *expert, int32_t l, const double *x,
                            const uint16_t *got, int64_t n, const ref_arithmetic *arithmetic, ref_verdict *verdict);

/* The same for MXFP8: e4m3 codes [n, I], E8M0 scales [n, I/32].  A scale must be reachable from the range of its
 * block's maximum, the codes reachable under that scale; codes under a NaN scale are not looked at.  A wrong scale is
 * reported as the first element of its block, with bytes as values. */
void ref_check_intermediate_mxfp8(const moe4_layer_config *config, const moe4_expert *expert, int32_t l,
                                  const double *x, const uint8_t *codes, const uint8_t *scales, int64_t n,
                                  const ref_arithmetic *arithmetic, ref_verdict *verdict);

/* The same for fp8: f32 scales [n, ceil(I/128)]. */
void ref_check_intermediate_fp8(const moe4_layer_config *config, const moe4_expert *expert, int32_t l, const double *x,
                                const uint8_t *codes, const float *scales, int64_t n, const ref_arithmetic *arithmetic,
                                ref_verdict *verdict);

/* The same for int8: f32 scales [n, I/32].  x is what the codes of x are worth. */
void ref_check_intermediate_int8(const moe4_layer_config *config, const moe4_expert *expert, int32_t l, const double *x,
                                 const int8_t *codes, const float *scales, int64_t n, const ref_arithmetic *arithmetic,
                                 ref_verdict *verdict);

/* z' [n, output_size] bf16 from v' [n, I] (dequantised). */
void ref_check_gemm2(const moe4_layer_config *config, const moe4_expert *expert, const double *intermediate,
                     const uint16_t *got, int64_t n, const ref_arithmetic *arithmetic, ref_verdict *verdict);

/* y [output_size] of one token, bit for bit, from its slots' z' rows and weights as ref_combine.  before: y as it was,
 * for MOE4_WRITE_ADD. */
void ref_check_combine(int64_t output_size, int32_t top_k, const uint16_t *const *rows, const float *weights,
                       moe4_write write, const void *before, const void *got, moe4_dtype dtype, ref_verdict *verdict);

/* ---- Whole layers
 * ----------------------------------------------------------------------------------------------------------- */

/* Relative Frobenius errors |got - expected| / |expected|: of all, of the worst row, of the worst column.  Equal
 * infinities and NaN against NaN are no error; anything else that is not finite, or an error where zeros are expected,
 * is DBL_MAX. */
typedef struct ref_frobenius {
    double overall, worst_row, worst_column;
    int64_t worst_row_index, worst_column_index; /* -1 when there are none */
} ref_frobenius;

void ref_compare(const double *got, const double *expected, int64_t rows, int64_t columns, ref_frobenius *result);

/* Whether that is close enough for an oracle with these roundings: same roundings 2e-3 overall and 6e-3 for every row
 * and column, unrounded 3.7e-3 overall. */
int ref_close(const ref_frobenius *frobenius, ref_mode mode);

#endif
