/* The oracle's verdict on a finished call. */
#include <setjmp.h>
#include <stdarg.h> /* for cmocka.h, as the next two */
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "call.h"

/* What the routed rows are, by definition: local experts ascending, slots ascending within one. */
struct routed {
    int64_t n;
    int32_t *expert; /* [n] local */
    int64_t *slot;   /* [n] t*A + a */
};

static struct routed routed_rows(const struct call *call)
{
    struct routed routed = {0, calloc((size_t)call->R + 1, sizeof(int32_t)),
                            calloc((size_t)call->R + 1, sizeof(int64_t))};
    for (int32_t l = 0; l < local_experts(call->config); l++)
        for (int64_t slot = 0; slot < call->T * call->A; slot++) {
            if (ref_local_expert(call->config, call->result.ids[slot]) != l) continue;
            routed.expert[routed.n] = l;
            routed.slot[routed.n++] = slot;
        }
    return routed;
}

static void routed_release(struct routed *routed)
{
    free(routed->expert);
    free(routed->slot);
}

static void check_verdict(const struct call *call, const char *stage, int64_t row, const ref_verdict *verdict)
{
    if (verdict->n_outside == 0) return;
    fail_msg("%s: %s: %lld of %lld outside; worst in row %lld (from %lld), column %lld: %.9g, expected %.9g to %.9g",
             call->label, stage, (long long)verdict->n_outside, (long long)verdict->n_checked,
             (long long)verdict->worst_row, (long long)row, (long long)verdict->worst_column, verdict->worst_got,
             verdict->worst_low, verdict->worst_high);
}

/* ---- Routing ---- */

static void check_logits(const struct call *call, const ref_arithmetic *arithmetic)
{
    const moe4_layer_config *config = call->config;
    const int64_t E = config->n_experts, ld = call->logits.ld ? call->logits.ld : E;
    if (call->plan.routing != ROUTE_OWN_ROUTER) {
        for (int64_t i = 0; i < call->T * E; i++) {
            double given = ref_load(call->logits.logits, call->logits.dtype, i / E * ld + i % E);
            if (call->result.logits[i] != given) fail_msg("%s: logit %lld is not as given", call->label, (long long)i);
        }
        return;
    }
    const moe4_batch *batch = &call->batch;
    const void *x = batch->router_x ? batch->router_x : batch->x;
    const moe4_dtype dtype = batch->router_x ? batch->router_x_dtype : batch->x_dtype;
    const int64_t width = config->router.hidden_size ? config->router.hidden_size : config->hidden_size;
    const int64_t ldx = batch->router_x ? batch->ldrouter_x : batch->ldx ? batch->ldx : width;
    double *row = calloc((size_t)width, sizeof *row);
    for (int64_t t = 0; t < call->T; t++) {
        ref_verdict verdict;
        for (int64_t h = 0; h < width; h++) row[h] = ref_round_bf16(ref_load(x, dtype, t * ldx + h));
        ref_check_router(config, row, 1, call->result.logits + t * E, arithmetic, &verdict);
        check_verdict(call, "router", t, &verdict);
    }
    free(row);
}

static void check_routed_ids(const struct call *call)
{
    ref_verdict verdict;
    const moe4_result *result = &call->result;
    ref_check_routing(&call->config->routing, call->config->n_experts, result->logits, call->batch.token_ids, call->T,
                      result->ids, result->weights, &verdict);
    check_verdict(call, "routing", 0, &verdict);
    for (int64_t i = 0; i < call->T * call->A; i++) assert_int_equal(result->replay[i], result->ids[i]);
    for (int64_t i = call->T * call->A; i < result->replay_rows * call->A; i++) assert_int_equal(result->replay[i], -1);
}

/* The caller's weight of a slot. */
static double given_weight(const struct call *call, int64_t slot)
{
    const moe4_topk *topk = &call->topk;
    const int64_t A = call->A, ld = topk->ld_weights ? topk->ld_weights : A, at = slot / A * ld + slot % A;
    return topk->weights ? ref_load(topk->weights, topk->weights_dtype, at) : ref_bf16((uint16_t)topk->ids[at]);
}

static void check_given_ids(const struct call *call)
{
    const moe4_topk *topk = &call->topk;
    const int64_t A = call->A, ld = topk->ld_ids ? topk->ld_ids : A;
    for (int64_t i = 0; i < call->T * A; i++) {
        int32_t id = topk->ids[i / A * ld + i % A];
        double weight = topk->weight_use == MOE4_WEIGHT_ON_INPUT ? 1 : given_weight(call, i);
        if (call->result.ids[i] != (topk->weights ? id : id >> 16))
            fail_msg("%s: id %d of slot %lld is not %d", call->label, call->result.ids[i], (long long)i, id);
        if (call->result.weights[i] != (float)weight)
            fail_msg("%s: weight %g of slot %lld is not %g", call->label, (double)call->result.weights[i], (long long)i,
                     weight);
    }
}

static void check_map(const struct call *call, const struct routed *routed)
{
    int64_t n_local = 0;
    assert_int_equal(*call->result.n_rows, routed->n);
    for (int64_t row = 0; row < routed->n; row++)
        if (call->result.row_map[routed->slot[row]] != row)
            fail_msg("%s: slot %lld is row %d, expected %lld", call->label, (long long)routed->slot[row],
                     call->result.row_map[routed->slot[row]], (long long)row);
    for (int64_t slot = 0; slot < call->T * call->A; slot++) n_local += call->result.row_map[slot] >= 0;
    assert_int_equal(n_local, routed->n);
}

/* ---- Experts ---- */

/* A row of the intermediate in fp8 compute: 128 columns share a scale. */
static void dequantize_fp8(const uint8_t *codes, const float *scales, int64_t n, double *v)
{
    for (int64_t i = 0; i < n; i += 128)
        ref_dequantize_fp8(codes + i, scales[i / 128], n - i < 128 ? n - i : 128, v + i);
}

/* What mxfp8 compute makes of bf16 values, in place. */
static void round_mxfp8(double *x, int64_t H)
{
    uint8_t codes[32], scale;
    for (int64_t h = 0; h < H; h += 32) {
        ref_quantize_mxfp8(x + h, 32, codes, &scale);
        ref_dequantize_mxfp8(codes, &scale, 32, x + h);
    }
}

/* x of a routed slot as its expert sees it. */
static void expert_input(const struct call *call, int64_t slot, double *x)
{
    const moe4_batch *batch = &call->batch;
    const int64_t H = call->config->hidden_size, t = slot / call->A;
    const int64_t ldx = batch->ldx ? batch->ldx : H, is_fp8 = batch->compute == MOE4_COMPUTE_FP8;
    const int64_t ld_scale = batch->ldx_scale ? batch->ldx_scale : is_fp8 ? 1 : H / 32;
    if (batch->x_dtype == MOE4_DTYPE_F8_E4M3 && is_fp8) {
        ref_dequantize_fp8((const uint8_t *)batch->x + t * ldx, ((const float *)batch->x_scale)[t * ld_scale], H, x);
    } else if (batch->x_dtype == MOE4_DTYPE_F8_E4M3) {
        ref_dequantize_mxfp8((const uint8_t *)batch->x + t * ldx, (const uint8_t *)batch->x_scale + t * ld_scale, H, x);
    } else {
        for (int64_t h = 0; h < H; h++) x[h] = ref_round_bf16(ref_load(batch->x, batch->x_dtype, t * ldx + h));
        if (!call->is_routed && call->topk.weight_use == MOE4_WEIGHT_ON_INPUT)
            for (int64_t h = 0; h < H; h++) x[h] = ref_weighted_input(x[h], given_weight(call, slot));
        if (batch->compute == MOE4_COMPUTE_MXFP8) round_mxfp8(x, H);
        if (is_fp8) ref_round_fp8(x, H);
        if (batch->compute == MOE4_COMPUTE_INT8) ref_round_int8(x, H);
    }
}

/* n rows of the intermediate output as gemm2 sees them. */
static void intermediate_values(const struct call *call, int64_t first, int64_t n, double *v)
{
    const moe4_result *result = &call->result;
    const int64_t I = call->config->intermediate_size;
    if (call->plan.compute == MOE4_COMPUTE_MXFP8)
        ref_dequantize_mxfp8((const uint8_t *)result->intermediate + first * I,
                             (const uint8_t *)result->intermediate_scale + first * I / 32, n * I, v);
    else if (call->plan.compute == MOE4_COMPUTE_FP8)
        for (int64_t row = first; row < first + n; row++, v += I)
            dequantize_fp8((const uint8_t *)result->intermediate + row * I,
                           (const float *)result->intermediate_scale + row * ((I + 127) / 128), I, v);
    else if (call->plan.compute == MOE4_COMPUTE_INT8)
        ref_dequantize_int8((const int8_t *)result->intermediate + first * I,
                            (const float *)result->intermediate_scale + first * I / 32, n * I, v);
    else
        for (int64_t i = 0; i < n * I; i++) v[i] = ref_bf16(((const uint16_t *)result->intermediate)[first * I + i]);
}

/* Both GEMM stages of n rows of one expert. */
static void check_rows(const struct call *call, const moe4_expert *expert, const struct routed *routed, int64_t first,
                       int64_t n, const ref_arithmetic *arithmetic)
{
    const moe4_layer_config *config = call->config;
    const moe4_result *result = &call->result;
    const int64_t H = config->hidden_size, I = config->intermediate_size;
    const int32_t l = routed->expert[first];
    double *x = calloc((size_t)(n * H), sizeof *x), *v = calloc((size_t)(n * I), sizeof *v);
    ref_verdict verdict;
    for (int64_t i = 0; i < n; i++) expert_input(call, routed->slot[first + i], x + i * H);
    if (call->plan.compute == MOE4_COMPUTE_MXFP8)
        ref_check_intermediate_mxfp8(config, expert, l, x, (const uint8_t *)result->intermediate + first * I,
                                     (const uint8_t *)result->intermediate_scale + first * I / 32, n, arithmetic,
                                     &verdict);
    else if (call->plan.compute == MOE4_COMPUTE_FP8)
        ref_check_intermediate_fp8(config, expert, l, x, (const uint8_t *)result->intermediate + first * I,
                                   (const float *)result->intermediate_scale + first * ((I + 127) / 128), n, arithmetic,
                                   &verdict);
    else if (call->plan.compute == MOE4_COMPUTE_INT8)
        ref_check_intermediate_int8(config, expert, l, x, (const int8_t *)result->intermediate + first * I,
                                    (const float *)result->intermediate_scale + first * I / 32, n, arithmetic,
                                    &verdict);
    else
        ref_check_intermediate(config, expert, l, x, (const uint16_t *)result->intermediate + first * I, n, arithmetic,
                               &verdict);
    check_verdict(call, "intermediate", first, &verdict);
    intermediate_values(call, first, n, v);
    ref_check_gemm2(config, expert, v, result->gemm2_rows + first * output_columns(config), n, arithmetic, &verdict);
    check_verdict(call, "gemm2", first, &verdict);
    free(v);
    free(x);
}

/* Whether a row is one of about max_rows that are looked at: the first and last of all, both ends of experts, and some
 * between. */
static int is_sampled(const struct routed *routed, int64_t row, int64_t max_rows)
{
    if (routed->n <= max_rows || row == 0 || row == routed->n - 1) return 1;
    int is_edge = routed->expert[row - 1] != routed->expert[row] || routed->expert[row + 1] != routed->expert[row];
    int64_t n_candidates = is_edge ? routed->n / 4 + 1 : routed->n;
    struct random random = {(uint64_t)(routed->n * 31 + row)};
    return random_below(&random, n_candidates) < max_rows / 2;
}

static void check_experts(const struct call *call, const moe4_expert_source *source, const struct routed *routed,
                          int64_t max_rows, const ref_arithmetic *arithmetic)
{
    for (int64_t first = 0; first < routed->n;) {
        moe4_expert expert;
        int64_t end = first;
        while (end < routed->n && routed->expert[end] == routed->expert[first] && is_sampled(routed, end, max_rows))
            end++;
        if (end > first) {
            assert_int_equal(source->read(source->user, routed->expert[first], &expert), MOE4_OK);
            check_rows(call, &expert, routed, first, end - first, arithmetic);
        }
        first = end > first ? end : first + 1;
    }
}

/* ---- Combine ---- */

static void check_y(const struct call *call)
{
    const moe4_result *result = &call->result;
    const int64_t width = output_columns(call->config), ldy = result->ldy ? result->ldy : width, A = call->A;
    const size_t row_bytes = (size_t)ldy * dtype_bytes(result->y_dtype);
    const uint16_t *rows[128];
    float weights[128];
    for (int64_t t = 0; t < call->T; t++) {
        ref_verdict verdict;
        for (int32_t a = 0; a < A; a++) {
            int32_t row = result->row_map[t * A + a];
            rows[a] = row < 0 ? NULL : result->gemm2_rows + row * width;
            weights[a] = result->weights[t * A + a];
        }
        ref_check_combine(width, (int32_t)A, rows, weights, result->write,
                          (char *)call->y_before + (size_t)t * row_bytes, (char *)result->y + (size_t)t * row_bytes,
                          result->y_dtype, &verdict);
        check_verdict(call, "y", t, &verdict);
    }
}

/* ---- What must not be touched ---- */

static void check_ff(const struct call *call, const char *what, const void *end_of_results, const void *end)
{
    for (const uint8_t *byte = end_of_results; byte < (const uint8_t *)end; byte++)
        if (*byte != 0xFF) fail_msg("%s: something was written beyond %s", call->label, what);
}

static void check_untouched(const struct call *call, const struct routed *routed)
{
    const moe4_result *result = &call->result;
    const int64_t width = output_columns(call->config), ldy = result->ldy ? result->ldy : width;
    const int64_t I = call->config->intermediate_size, R = call->R;
    const size_t element = dtype_bytes(result->y_dtype);
    for (size_t i = 0; i < call->y_bytes; i++) {
        int64_t index = (int64_t)(i / element), t = index / ldy;
        if (t < call->T && index % ldy < width) continue;
        if (((char *)result->y)[i] != ((char *)call->y_before)[i])
            fail_msg("%s: byte %zu of y, which is no result, was written", call->label, i);
    }
    check_ff(call, "gemm2 rows", result->gemm2_rows + routed->n * width, result->gemm2_rows + R * width);
    const int64_t bytes = I * intermediate_bytes(call->plan.compute);
    check_ff(call, "the intermediate", (char *)result->intermediate + routed->n * bytes,
             (char *)result->intermediate + R * bytes);
    check_ff(call, "the row map", result->row_map + call->T * call->A, result->row_map + R);
    check_ff(call, "the ids", result->ids + call->T * call->A, result->ids + R);
    check_ff(call, "the weights", result->weights + call->T * call->A, result->weights + R);
    check_ff(call, "the workspace", (char *)call->batch.workspace + call->batch.workspace_bytes, call->workspace_end);
}

/* What is known of the sums of the kernels under test.  Those of a GPU in fp8 compute add up 128 products with about 13
 * bits behind the largest one's first. */
static ref_arithmetic kernel_arithmetic(moe4_isa isa, moe4_compute compute, int64_t I)
{
    const ref_arithmetic fp32 = REF_ARITHMETIC_FP32;
    ref_arithmetic arithmetic = compute == MOE4_COMPUTE_INT8 ? fp32 : ref_arithmetic_of(isa);
    if (compute != MOE4_COMPUTE_FP8) return arithmetic;
    arithmetic.segments += (I + 127) / 128;
    if (is_cpu_tested()) return arithmetic;
    arithmetic.chain = 128;
    arithmetic.chain_unit = 0x1p-13;
    return arithmetic;
}

void call_check_from(const struct call *call, const moe4_expert_source *source, moe4_isa isa, int64_t max_rows)
{
    const ref_arithmetic router = REF_ARITHMETIC_FP32; /* no kernel's sums; int8's are f32 on every level too */
    const ref_arithmetic arithmetic = kernel_arithmetic(isa, call->plan.compute, call->config->intermediate_size);
    struct routed routed = routed_rows(call);
    if (call->is_routed) {
        check_logits(call, &router);
        check_routed_ids(call);
    } else {
        check_given_ids(call);
    }
    check_map(call, &routed);
    check_experts(call, source, &routed, max_rows, &arithmetic);
    check_y(call);
    check_untouched(call, &routed);
    routed_release(&routed);
}

static moe4_status read_array(void *user, int32_t l, moe4_expert *expert)
{
    *expert = ((const moe4_expert *)user)[l];
    return MOE4_OK;
}

void call_check(const struct call *call, const moe4_expert *experts, moe4_isa isa, int64_t max_rows)
{
    const moe4_expert_source source = {.read = read_array, .user = (void *)experts};
    call_check_from(call, &source, isa, max_rows);
}

/* ---- Exact mode ---- */

static const ref_mode modes[] = {
    [MOE4_COMPUTE_BF16] = REF_MODE_BF16, [MOE4_COMPUTE_MXFP8] = REF_MODE_MXFP8, [MOE4_COMPUTE_FP8] = REF_MODE_FP8};

static void check_exact_row(const struct call *call, const moe4_expert *experts, const struct routed *routed,
                            int64_t row)
{
    const moe4_layer_config *config = call->config;
    const int64_t H = config->hidden_size, I = config->intermediate_size, width = output_columns(config);
    const int32_t l = routed->expert[row];
    double *x = calloc((size_t)H, sizeof *x), *v = calloc((size_t)I, sizeof *v), *z = calloc((size_t)width, sizeof *z);
    double *got = calloc((size_t)I, sizeof *got);
    expert_input(call, routed->slot[row], x);
    ref_expert(config, &experts[l], l, x, 1, modes[call->plan.compute], v, z);
    intermediate_values(call, row, 1, got);
    for (int64_t i = 0; i < I; i++)
        if (got[i] != v[i])
            fail_msg("%s: intermediate [%lld][%lld] is %.9g, exactly %.9g", call->label, (long long)row, (long long)i,
                     got[i], v[i]);
    /* sums of any e4m3 codes want more than the 13 bits that a GPU's fp8 tensor cores keep */
    const int is_exact = call->plan.compute != MOE4_COMPUTE_FP8 || is_cpu_tested();
    for (int64_t h = 0; h < width && is_exact; h++)
        if (ref_bf16(call->result.gemm2_rows[row * width + h]) != z[h])
            fail_msg("%s: gemm2 [%lld][%lld] is %.9g, exactly %.9g", call->label, (long long)row, (long long)h,
                     ref_bf16(call->result.gemm2_rows[row * width + h]), z[h]);
    free(got);
    free(z);
    free(v);
    free(x);
}

void call_check_exact(const struct call *call, const moe4_expert *experts)
{
    struct routed routed = routed_rows(call);
    for (int64_t row = 0; row < routed.n; row++)
        if (is_sampled(&routed, row, 16)) check_exact_row(call, experts, &routed, row);
    routed_release(&routed);
}
