#include "call.h"

#include <setjmp.h>
#include <stdarg.h> /* for cmocka.h, as the next two */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "moe4/moe4.h"

/* ---- Inputs ---- */

/* Numbers of one token, whatever the other tokens are. */
static struct random token_random(const struct call_plan *plan, int64_t t, uint64_t purpose)
{
    struct random random = {plan->seed + (uint64_t)t * 0x1234567u + purpose * 0x89ABCDEF01u};
    random_bits(&random);
    return random;
}

/* Exact numbers are small integers; fp8's scale is a power of two when the largest of a row is 7 times one. */
static double x_value(struct random *random, const struct call_plan *plan, int64_t h)
{
    if (plan->data == WEIGHTS_EXACT && plan->compute == MOE4_COMPUTE_FP8 && h == 0) return 3.5;
    if (plan->data == WEIGHTS_EXACT) return (double)random_below(random, 5) - 2;
    return random_normal(random) * (h % 100 == 17 ? 20 : 1);
}

/* Bytes of n_rows rows, the last without the gap behind it. */
static size_t matrix_bytes(int64_t n_rows, int64_t columns, int64_t ld, size_t element)
{
    return n_rows ? (size_t)((n_rows - 1) * ld + columns) * element : 0;
}

static void create_quantised_x(struct buffers *buffers, struct call *call)
{
    const int is_fp8 = call->plan.compute == MOE4_COMPUTE_FP8;
    const int64_t H = call->config->hidden_size, n_scales = is_fp8 ? 1 : H / 32, gap = call->plan.gap;
    uint8_t *codes = buffers_allocate(buffers, matrix_bytes(call->T, H, H + gap, 1));
    void *scales = buffers_allocate(buffers, matrix_bytes(call->T, n_scales, n_scales + gap, is_fp8 ? 4 : 1));
    double *row = buffers_allocate(buffers, (size_t)H * sizeof *row);
    for (int64_t t = 0; t < call->T; t++) {
        struct random random = token_random(&call->plan, t, 1);
        for (int64_t h = 0; h < H; h++) row[h] = ref_round_bf16(x_value(&random, &call->plan, h));
        if (is_fp8)
            ref_quantize_fp8(row, H, codes + t * (H + gap), (float *)scales + t * (1 + gap));
        else
            ref_quantize_mxfp8(row, H, codes + t * (H + gap), (uint8_t *)scales + t * (n_scales + gap));
    }
    call->batch.x = codes;
    call->batch.x_scale = scales;
    call->batch.ldx = gap ? H + gap : 0;
    call->batch.ldx_scale = gap ? n_scales + gap : 0;
}

static void *create_rows(struct buffers *buffers, const struct call *call, int64_t columns, moe4_dtype dtype,
                         uint64_t purpose)
{
    const int64_t ld = columns + call->plan.gap;
    void *rows = buffers_allocate(buffers, matrix_bytes(call->T, columns, ld, dtype_bytes(dtype)));
    for (int64_t t = 0; t < call->T; t++) {
        struct random random = token_random(&call->plan, t, purpose);
        for (int64_t i = 0; i < columns; i++) store_value(rows, dtype, t * ld + i, x_value(&random, &call->plan, i));
    }
    return rows;
}

static void create_x(struct buffers *buffers, struct call *call)
{
    const int64_t H = call->config->hidden_size, width = call->config->router.hidden_size, gap = call->plan.gap;
    moe4_dtype dtype = call->plan.x_dtype ? call->plan.x_dtype : MOE4_DTYPE_BF16;
    call->batch.x_dtype = dtype;
    if (dtype == MOE4_DTYPE_F8_E4M3) {
        create_quantised_x(buffers, call);
    } else {
        call->batch.x = create_rows(buffers, call, H, dtype, 1);
        call->batch.ldx = gap ? H + gap : 0;
    }
    int is_same = (width == 0 || width == H) && dtype != MOE4_DTYPE_F8_E4M3;
    if (call->plan.routing != ROUTE_OWN_ROUTER || is_same) return;
    call->batch.router_x = create_rows(buffers, call, width ? width : H, MOE4_DTYPE_F32, 2);
    call->batch.router_x_dtype = MOE4_DTYPE_F32;
    call->batch.ldrouter_x = (width ? width : H) + gap;
}

static void create_logits(struct buffers *buffers, struct call *call)
{
    static const moe4_dtype dtypes[] = {MOE4_DTYPE_F32, MOE4_DTYPE_BF16, MOE4_DTYPE_F16};
    if (call->plan.routing == ROUTE_OWN_ROUTER) return;
    call->logits.dtype = dtypes[call->plan.routing];
    call->logits.ld = call->plan.gap ? call->config->n_experts + call->plan.gap : 0;
    call->logits.logits = create_rows(buffers, call, call->config->n_experts, call->logits.dtype, 3);
}

/* A global id that names a local expert, or none. */
static int32_t some_id(const moe4_layer_config *config, struct random *random, int is_local)
{
    int32_t E = config->n_experts, start = (int32_t)random_below(random, E);
    for (int32_t i = 0; i < E; i++)
        if ((ref_local_expert(config, (start + i) % E) >= 0) == is_local) return (start + i) % E;
    return -1;
}

static void choose_distinct(int32_t E, struct random *random, int32_t A, int32_t *ids)
{
    for (int32_t a = 0; a < A; a++) {
        int32_t b = 0;
        ids[a] = (int32_t)random_below(random, E);
        while (b < a) {
            if (ids[a] != ids[b++]) continue;
            ids[a] = (ids[a] + 1) % E;
            b = 0;
        }
    }
}

static int32_t wild_id(const struct call *call, struct random *random)
{
    const int32_t E = call->config->n_experts;
    const int is_packed = call->plan.routing == ROUTE_IDS_PACKED;
    switch (random_below(random, 8)) {
    case 0: return -1;
    case 1: return E;
    case 2: return is_packed ? INT16_MAX : INT32_MAX;
    case 3: return is_packed ? INT16_MIN : INT32_MIN;
    default: return (int32_t)random_below(random, E < 3 ? E : 3); /* duplicates */
    }
}

static void choose_ids(const struct call *call, int64_t t, int32_t *ids)
{
    struct random random = token_random(&call->plan, t, 4), same = {call->plan.seed};
    switch (call->plan.ids) {
    case IDS_DISTINCT: choose_distinct(call->config->n_experts, &random, call->A, ids); break;
    case IDS_WILD:
        for (int32_t a = 0; a < call->A; a++) ids[a] = wild_id(call, &random);
        break;
    case IDS_ONE:
        for (int32_t a = 0; a < call->A; a++) ids[a] = some_id(call->config, &same, 1), same.state = call->plan.seed;
        break;
    case IDS_ELSEWHERE:
        for (int32_t a = 0; a < call->A; a++) ids[a] = some_id(call->config, &random, 0);
        break;
    }
}

static double weight_value(struct random *random, const struct call_plan *plan)
{
    if (plan->data == WEIGHTS_EXACT) return ldexp(random_below(random, 2) ? 1 : -1, -(int)random_below(random, 3));
    return random_normal(random) * 0.5;
}

static void create_topk(struct buffers *buffers, struct call *call)
{
    const int64_t ld = call->A + call->plan.gap;
    moe4_topk *topk = &call->topk;
    topk->weights_dtype = call->plan.routing == ROUTE_IDS_F32 ? MOE4_DTYPE_F32 : MOE4_DTYPE_BF16;
    topk->top_k = call->A;
    topk->weight_use = call->plan.weight_use;
    topk->ld_ids = topk->ld_weights = call->plan.gap ? ld : 0;
    int32_t *ids = buffers_allocate(buffers, matrix_bytes(call->T, call->A, ld, sizeof *ids));
    void *weights = buffers_allocate(buffers, matrix_bytes(call->T, call->A, ld, dtype_bytes(topk->weights_dtype)));
    for (int64_t t = 0; t < call->T; t++) {
        struct random random = token_random(&call->plan, t, 5);
        choose_ids(call, t, ids + t * ld);
        for (int32_t a = 0; a < call->A; a++)
            store_value(weights, topk->weights_dtype, t * ld + a, weight_value(&random, &call->plan));
    }
    topk->ids = ids;
    topk->weights = weights;
    if (call->plan.routing != ROUTE_IDS_PACKED) return;
    for (int64_t t = 0; t < call->T; t++)
        for (int64_t i = t * ld; i < t * ld + call->A; i++)
            ids[i] = (int32_t)((uint32_t)ids[i] << 16 | ((uint16_t *)weights)[i]);
    topk->format = MOE4_TOPK_PACKED;
    topk->weights = NULL;
}

/* ---- Outputs ---- */

int64_t intermediate_bytes(moe4_compute compute)
{
    return compute == MOE4_COMPUTE_BF16 ? 2 : 1;
}

size_t intermediate_scale_bytes(moe4_compute compute, int64_t I)
{
    if (compute == MOE4_COMPUTE_FP8) return (size_t)((I + 127) / 128) * sizeof(float);
    return (size_t)I / 32 * (compute == MOE4_COMPUTE_INT8 ? sizeof(float) : 1);
}

int64_t output_columns(const moe4_layer_config *config)
{
    return config->output_size ? config->output_size : config->hidden_size;
}

static void create_y(struct buffers *buffers, struct call *call)
{
    moe4_result *result = &call->result;
    const int64_t width = output_columns(call->config), ld = width + call->plan.gap;
    result->y_dtype = call->plan.y_dtype ? call->plan.y_dtype : MOE4_DTYPE_BF16;
    result->ldy = call->plan.gap ? ld : 0;
    result->write = call->plan.write;
    call->y_bytes = matrix_bytes(call->T, width, ld, dtype_bytes(result->y_dtype));
    result->y = buffers_allocate(buffers, call->y_bytes);
    if (result->write == MOE4_WRITE_ADD)
        for (int64_t t = 0; t < call->T; t++) {
            struct random random = token_random(&call->plan, t, 6);
            for (int64_t h = 0; h < width; h++)
                store_value(result->y, result->y_dtype, t * ld + h, random_normal(&random));
        }
    call->y_before = buffers_copy(buffers, result->y, call->y_bytes);
}

static void create_outputs(struct buffers *buffers, struct call *call)
{
    const moe4_layer_config *config = call->config;
    const int64_t T = call->T, R = call->R, I = config->intermediate_size;
    moe4_result *result = &call->result;
    create_y(buffers, call);
    result->ids = buffers_allocate(buffers, (size_t)R * sizeof *result->ids);
    result->weights = buffers_allocate(buffers, (size_t)R * sizeof *result->weights);
    result->intermediate = buffers_allocate(buffers, (size_t)(R * I * intermediate_bytes(call->plan.compute)));
    if (call->plan.compute != MOE4_COMPUTE_BF16)
        result->intermediate_scale =
            buffers_allocate(buffers, (size_t)R * intermediate_scale_bytes(call->plan.compute, I));
    result->gemm2_rows = buffers_allocate(buffers, (size_t)(R * output_columns(config)) * sizeof *result->gemm2_rows);
    result->row_map = buffers_allocate(buffers, (size_t)R * sizeof *result->row_map);
    result->n_rows = buffers_allocate(buffers, sizeof *result->n_rows);
    if (!call->is_routed) return;
    result->logits = buffers_allocate(buffers, (size_t)(T * config->n_experts) * sizeof *result->logits);
    result->replay_rows = T + 3;
    result->replay = buffers_allocate(buffers, (size_t)(result->replay_rows * call->A) * sizeof *result->replay);
}

/* ---- Calls ---- */

struct call call_create(struct buffers *buffers, const moe4_layer_config *config, const struct call_plan *plan)
{
    struct call call = {.config = config,
                        .plan = *plan,
                        .label = "",
                        .T = plan->n_tokens,
                        .is_routed = plan->routing < ROUTE_IDS_F32,
                        .batch = MOE4_BATCH_INIT,
                        .topk = MOE4_TOPK_INIT,
                        .logits = MOE4_LOGITS_INIT,
                        .result = MOE4_RESULT_INIT};
    call.A = call.is_routed ? config->routing.top_k : plan->top_k;
    call.R = call.T * call.A;
    call.batch.n_tokens = call.T;
    call.batch.compute = plan->compute;
    create_x(buffers, &call);
    if (call.is_routed)
        create_logits(buffers, &call);
    else
        create_topk(buffers, &call);
    create_outputs(buffers, &call);
    return call;
}

moe4_status call_run(struct buffers *buffers, moe4_context *context, const moe4_layer *layer, struct call *call)
{
    size_t bytes;
    moe4_status status =
        moe4_workspace_bytes(context, layer, call->plan.compute, call->batch.n_tokens, call->A, &bytes);
    if (status) return status;
    size_t padded = (bytes + 255) / 256 * 256, spare = buffers->kind == BUFFERS_PLAIN ? 256 : 0;
    char *memory = buffers_allocate(buffers, padded + spare); /* in an buffers with guards it begins or ends at one */
    call->workspace_end = memory + padded + spare;
    call->batch.workspace = memory + (256 - (uintptr_t)memory % 256) % 256;
    call->batch.workspace_bytes = bytes;
    const moe4_logits *logits = call->plan.routing == ROUTE_OWN_ROUTER ? NULL : &call->logits;
    return call->is_routed ? moe4_forward_router(context, layer, &call->batch, logits, &call->result)
                           : moe4_forward_experts(context, layer, &call->batch, &call->topk, &call->result);
}

void call_must_run(struct buffers *buffers, moe4_context *context, const moe4_layer *layer, struct call *call)
{
    moe4_status status = call_run(buffers, context, layer, call);
    if (status) fail_msg("%s: %s: %s", call->label, moe4_status_name(status), moe4_context_message(context));
}

/* ---- Comparisons ---- */

static void compare_bytes(const char *what, int64_t t, const void *first, const void *second, size_t bytes)
{
    if (memcmp(first, second, bytes) == 0) return;
    size_t i = 0;
    while (((const char *)first)[i] == ((const char *)second)[i]) i++;
    fail_msg("%s of token %lld differs at byte %zu of %zu", what, (long long)t, i, bytes);
}

static void compare_slot(const struct call *first, int64_t p, const struct call *second, int64_t q)
{
    const moe4_layer_config *config = first->config;
    const int64_t I = config->intermediate_size, width = output_columns(config);
    const int64_t row = first->result.row_map[p], other = second->result.row_map[q], t = p / first->A;
    if ((row < 0) != (other < 0)) fail_msg("a slot of token %lld is local in one call only", (long long)t);
    if (row < 0) return;
    const size_t bytes = (size_t)(I * intermediate_bytes(first->plan.compute));
    compare_bytes("intermediate", t, (char *)first->result.intermediate + (size_t)row * bytes,
                  (char *)second->result.intermediate + (size_t)other * bytes, bytes);
    const size_t scale_bytes = intermediate_scale_bytes(first->plan.compute, I);
    if (first->result.intermediate_scale)
        compare_bytes("intermediate scale", t, (char *)first->result.intermediate_scale + (size_t)row * scale_bytes,
                      (char *)second->result.intermediate_scale + (size_t)other * scale_bytes, scale_bytes);
    compare_bytes("gemm2 row", t, first->result.gemm2_rows + row * width, second->result.gemm2_rows + other * width,
                  (size_t)width * 2);
}

void call_compare_tokens(const struct call *first, int64_t t, const struct call *second, int64_t u)
{
    const moe4_layer_config *config = first->config;
    const int64_t width = output_columns(config), A = first->A, E = config->n_experts;
    const size_t element = dtype_bytes(first->result.y_dtype), slots = (size_t)A * 4;
    const int64_t ld = first->result.ldy ? first->result.ldy : width;
    const int64_t other_ld = second->result.ldy ? second->result.ldy : width;
    if (first->result.logits)
        compare_bytes("logits", t, first->result.logits + t * E, second->result.logits + u * E, (size_t)E * 4);
    compare_bytes("weights", t, first->result.weights + t * A, second->result.weights + u * A, slots);
    compare_bytes("ids", t, first->result.ids + t * A, second->result.ids + u * A, slots);
    for (int32_t a = 0; a < A; a++) compare_slot(first, t * A + a, second, u * A + a);
    compare_bytes("y", t, (char *)first->result.y + (size_t)(t * ld) * element,
                  (char *)second->result.y + (size_t)(u * other_ld) * element, (size_t)width * element);
}

void call_compare(const struct call *first, const struct call *second)
{
    assert_int_equal(first->T, second->T);
    assert_int_equal(*first->result.n_rows, *second->result.n_rows);
    compare_bytes("row map", 0, first->result.row_map, second->result.row_map, (size_t)first->R * 4);
    for (int64_t t = 0; t < first->T; t++) call_compare_tokens(first, t, second, t);
}
