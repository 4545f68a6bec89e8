#include "oracle.h"

#include <stdlib.h>
#include <string.h>

#include "command.h"
#include "memory.h"
#include "message.h"
#include "parallel.h"
#include "ref.h"

ref_mode oracle_mode(moe4_compute compute)
{
    static const ref_mode modes[] = {
        [MOE4_COMPUTE_BF16] = REF_MODE_BF16,
        [MOE4_COMPUTE_MXFP8] = REF_MODE_MXFP8,
        [MOE4_COMPUTE_FP8] = REF_MODE_FP8,
        [MOE4_COMPUTE_INT8] = REF_MODE_INT8,
    };
    return modes[compute];
}

/* One expert and the routed rows that are its. */
struct expert_rows {
    const moe4_layer_config *config;
    const moe4_expert *expert;
    int32_t local;
    struct pass *pass;
    const int64_t *slots; /* [n], p = t*A + a ascending */
    int64_t first_row;    /* the row of slots[0]; the rest follow */
    double *x;            /* [n, H], as the three below for all rows of the expert */
    double *intermediate; /* [n, I] */
    double *z;            /* [n, output_size] */
    uint16_t *rows;       /* [R, output_size], all experts' */
};

static void keep_fp8(const double *v, int64_t I, uint8_t *codes, float *scales)
{
    for (int64_t i = 0; i < I; i += 128)
        ref_quantize_fp8(v + i, I - i < 128 ? I - i : 128, codes + i, scales + i / 128);
}

/* v' of rows first..end-1 as the pass keeps it: bf16, or codes and scales. */
static void keep_intermediate(struct expert_rows *self, int64_t first, int64_t end)
{
    struct pass *pass = self->pass;
    moe4_dtype dtype;
    int64_t I = pass->intermediate_size, n_scales = pass_scales(pass, &dtype);
    for (int64_t i = first; i < end; ++i) {
        int64_t at = (self->first_row + i) * I;
        const double *v = self->intermediate + i * I;
        if (pass->compute == MOE4_COMPUTE_MXFP8)
            ref_quantize_mxfp8(v, I, (uint8_t *)pass->intermediate + at, (uint8_t *)pass->intermediate_scale + at / 32);
        else if (pass->compute == MOE4_COMPUTE_FP8)
            keep_fp8(v, I, (uint8_t *)pass->intermediate + at, (float *)pass->intermediate_scale + at / I * n_scales);
        else if (pass->compute == MOE4_COMPUTE_INT8)
            ref_quantize_int8(v, I, (int8_t *)pass->intermediate + at, (float *)pass->intermediate_scale + at / 32);
        else
            for (int64_t j = 0; j < I; ++j) ((uint16_t *)pass->intermediate)[at + j] = ref_to_bf16(v[j]);
    }
}

static void expert_rows_run(void *user, int64_t first, int64_t end)
{
    struct expert_rows *self = user;
    struct pass *pass = self->pass;
    int64_t H = pass->hidden_size, I = pass->intermediate_size, O = pass->output_size, n = end - first;
    const double *x = self->x + first * H;
    double *v = self->intermediate + first * I, *z = self->z + first * O;
    for (int64_t i = first; i < end; ++i) pass_expert_input(pass, self->slots[i], self->x + i * H);
    if (pass->intermediate) { /* before it is quantised */
        ref_expert(self->config, self->expert, self->local, x, n, REF_MODE_BF16, v, z);
        keep_intermediate(self, first, end);
    }
    if (!pass->intermediate || pass->compute != MOE4_COMPUTE_BF16)
        ref_expert(self->config, self->expert, self->local, x, n, oracle_mode(pass->compute), v, z);
    uint16_t *rows = self->rows + (self->first_row + first) * O;
    for (int64_t i = 0; i < n * O; ++i) rows[i] = ref_to_bf16(z[i]);
}

/* Ids and weights of tokens first..end-1. */
struct routing_task {
    const moe4_layer_config *config;
    struct pass *pass;
    double *logits, *weights, *x; /* [T, E], [T, A], [T, router_size] */
};

static void routing_run(void *user, int64_t first, int64_t end)
{
    struct routing_task *self = user;
    struct pass *pass = self->pass;
    int32_t E = pass->n_experts, A = pass->top_k;
    for (int64_t t = first; t < end; ++t) {
        double *logits = self->logits + t * E, *weights = self->weights + t * A, *x = self->x + t * pass->router_size;
        if (pass->routing == PASS_ROUTER) {
            pass_router_input(pass, t, x);
            ref_router(self->config, x, logits, NULL);
        }
        for (int32_t e = 0; e < E; ++e) {
            logits[e] = pass->routing == PASS_ROUTER ? ref_round_f32(logits[e])
                                                     : ref_load(pass->given_logits, pass->logits_dtype, t * E + e);
            pass->logits[t * E + e] = (float)logits[e];
        }
        ref_route(&self->config->routing, E, logits, pass->token_ids ? pass->token_ids[t] : 0, pass->ids + t * A,
                  weights);
        for (int32_t a = 0; a < A; ++a) pass->weights[t * A + a] = (float)weights[a];
    }
}

static int oracle_route(const moe4_layer_config *config, int32_t n_threads, struct pass *pass)
{
    int64_t T = pass->n_tokens, R = T * pass->top_k;
    if (pass->routing == PASS_IDS) {
        for (int64_t p = 0; p < R; ++p) {
            struct pass_choice given = pass_given(pass, p);
            pass->ids[p] = given.id;
            pass->weights[p] = pass->weight_use == MOE4_WEIGHT_ON_INPUT ? 1 : given.weight;
        }
        return EXIT_OK;
    }
    struct routing_task task = {.config = config, .pass = pass};
    int code = allocate(&task.logits, T * pass->n_experts, sizeof *task.logits, "the oracle's logits");
    if (!code) code = allocate(&task.weights, R, sizeof *task.weights, "the oracle's weights");
    if (!code) code = allocate(&task.x, T * pass->router_size, sizeof *task.x, "the oracle's inputs");
    if (!code) parallel_for(n_threads, T, routing_run, &task);
    free(task.logits);
    free(task.weights);
    free(task.x);
    return code;
}

/* Rows of one expert, appended to those before it. */
static int oracle_expert(const moe4_expert_source *source, int32_t n_threads, struct expert_rows *task, int64_t n)
{
    struct pass *pass = task->pass;
    moe4_expert expert;
    if (source->read(source->user, task->local, &expert) != MOE4_OK) return EXIT_FAILED; /* the source has said why */
    task->expert = &expert;
    task->x = task->intermediate = task->z = NULL;
    int code = allocate(&task->x, n * pass->hidden_size, sizeof *task->x, "an expert's inputs");
    if (!code)
        code = allocate(&task->intermediate, n * pass->intermediate_size, sizeof *task->x, "an expert's intermediates");
    if (!code) code = allocate(&task->z, n * pass->output_size, sizeof *task->z, "an expert's rows");
    if (!code) parallel_for(n_threads, n, expert_rows_run, task);
    free(task->x);
    free(task->intermediate);
    free(task->z);
    return code;
}

/* Element `index` of y, from what its slots add up to. */
static void output_store(struct pass *pass, int64_t index, float sum)
{
    double before = pass->addend ? ref_load(pass->addend, pass->y_dtype, index) : 0;
    double y = ref_output(sum, pass->addend ? MOE4_WRITE_ADD : MOE4_WRITE_OVERWRITE, before, pass->y_dtype);
    if (pass->y_dtype == MOE4_DTYPE_F32)
        ((float *)pass->y)[index] = (float)y;
    else
        ((uint16_t *)pass->y)[index] = pass->y_dtype == MOE4_DTYPE_F16 ? ref_to_f16(y) : ref_to_bf16(y);
}

/* y of every token from its slots' rows. */
static int oracle_combine(struct pass *pass, const int32_t *row_map, const uint16_t *rows)
{
    int64_t O = pass->output_size;
    float *sum;
    const uint16_t **slots;
    int code = allocate(&sum, O, sizeof *sum, "the oracle's sums");
    if (code) return code;
    code = allocate(&slots, pass->top_k, sizeof *slots, "the oracle's slots");
    for (int64_t t = 0; !code && t < pass->n_tokens; ++t) {
        const int32_t *map = row_map + t * pass->top_k;
        for (int32_t a = 0; a < pass->top_k; ++a) slots[a] = map[a] < 0 ? NULL : rows + map[a] * O;
        ref_combine(O, pass->top_k, slots, pass->weights + t * pass->top_k, sum);
        for (int64_t o = 0; o < O; ++o) output_store(pass, t * O + o, sum[o]);
    }
    free(sum);
    free(slots);
    return code;
}

/* All local experts in ascending order; their rows are numbered in row_map. */
static int oracle_experts(const moe4_layer_config *config, const moe4_expert_source *source, int32_t n_threads,
                          struct pass *pass, int64_t *slots, int32_t *row_map, uint16_t *rows)
{
    int64_t R = pass->n_tokens * pass->top_k;
    int code = EXIT_OK;
    pass->n_rows = 0;
    for (int64_t p = 0; p < R; ++p) row_map[p] = -1;
    for (int32_t l = 0; !code && l < pass->n_experts; ++l) {
        struct expert_rows task = {
            .config = config, .local = l, .pass = pass, .slots = slots, .first_row = pass->n_rows, .rows = rows};
        int64_t n = 0;
        for (int64_t p = 0; p < R; ++p) {
            if (ref_local_expert(config, pass->ids[p]) != l) continue;
            row_map[p] = (int32_t)pass->n_rows++;
            slots[n++] = p;
        }
        if (n) code = oracle_expert(source, n_threads, &task, n);
    }
    return code;
}

int oracle_forward(const moe4_layer_config *config, const moe4_expert_source *source, int32_t n_threads,
                   struct pass *pass)
{
    int64_t R = pass->n_tokens * pass->top_k;
    int64_t *slots = NULL;
    int32_t *row_map = NULL;
    uint16_t *rows = NULL;
    int code = oracle_route(config, n_threads, pass);
    if (!code) code = allocate(&slots, R, sizeof *slots, "the oracle's slots");
    if (!code) code = allocate(&row_map, R, sizeof *row_map, "the oracle's row map");
    if (!code) code = allocate(&rows, R * pass->output_size, sizeof *rows, "the oracle's rows");
    if (!code) code = oracle_experts(config, source, n_threads, pass, slots, row_map, rows);
    if (!code) code = oracle_combine(pass, row_map, rows);
    if (!code && pass->row_map) memcpy(pass->row_map, row_map, (size_t)R * sizeof *row_map);
    if (!code && pass->gemm2_rows)
        memcpy(pass->gemm2_rows, rows, (size_t)(pass->n_rows * pass->output_size) * sizeof *rows);
    for (int64_t p = 0; !code && pass->replay && p < R; ++p) pass->replay[p] = (int16_t)pass->ids[p];
    free(slots);
    free(row_map);
    free(rows);
    return code;
}
