#include "verify.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "command.h"
#include "memory.h"
#include "message.h"
#include "oracle.h"
#include "parallel.h"
#include "report.h"
#include "tensor.h"

enum { MAX_SAMPLES = 16, K_PER_SEGMENT = 32, FP8_GROUP = 128 };

const char *verify_stage_name(verify_stage stage)
{
    static const char *const names[] = {"router", "routing", "intermediate", "gemm2", "output"};
    return names[stage];
}

/* Sampled tokens of a pass and all that belongs to them. */
struct sample {
    const moe4_layer_config *config;
    const struct pass *pass;
    ref_arithmetic arithmetic;
    int64_t n_tokens;
    int64_t tokens[MAX_SAMPLES]; /* ascending */

    /* The expert at hand, and its sampled rows. */
    const moe4_expert *expert;
    int32_t local;
    int64_t n_rows;
    double *x;             /* [n, H], as the experts see it */
    uint8_t *intermediate; /* [n, I] bf16, or codes */
    uint8_t *scales;       /* [n, row_scales] bytes, in quantised compute */
    int64_t row_scales;
    double *widened;      /* the same as numbers */
    uint16_t *gemm2_rows; /* [n, output_size] */
    ref_verdict gemm1, gemm2;
};

/* First, last and evenly between. */
static void sample_choose(struct sample *sample, int64_t work)
{
    const struct pass *pass = sample->pass;
    double products = 3.0 * pass->top_k * (double)pass->hidden_size * (double)pass->intermediate_size;
    int64_t n = (int64_t)((double)work / products);
    if (n > MAX_SAMPLES) n = MAX_SAMPLES;
    if (n > pass->n_tokens) n = pass->n_tokens;
    if (n < 1 && pass->n_tokens) n = 1;
    for (int64_t i = 0; i < n; ++i) sample->tokens[i] = n > 1 ? i * (pass->n_tokens - 1) / (n - 1) : 0;
    sample->n_tokens = n;
}

/* The sums of a kernel: at most one partial sum a block.  Those of a GPU's tensor cores are cut off, not rounded. */
static ref_arithmetic sample_arithmetic(const struct pass *pass, const struct machine *machine)
{
    int64_t K = pass->hidden_size > pass->intermediate_size ? pass->hidden_size : pass->intermediate_size;
    const ref_arithmetic fp32 = REF_ARITHMETIC_FP32; /* int8 sums are f32 on every level */
    ref_arithmetic arithmetic = pass->compute == MOE4_COMPUTE_INT8 ? fp32 : ref_arithmetic_of(machine->info.isa);
    if (machine->info.device == MOE4_DEVICE_CUDA) arithmetic.unit = 0x1p-23;
    arithmetic.segments = K / K_PER_SEGMENT;
    if (machine->info.device == MOE4_DEVICE_CUDA && pass->compute == MOE4_COMPUTE_FP8) {
        arithmetic.chain = FP8_GROUP; /* of which the tensor cores keep about 13 bits, added up in fp32 */
        arithmetic.chain_unit = 0x1p-13;
    }
    return arithmetic;
}

/* Row `row` of y or of what it is added to; NULL stays NULL. */
static const void *output_row(const struct pass *pass, const void *rows, int64_t row)
{
    size_t row_bytes = (size_t)pass->output_size * dtype_bytes(pass->y_dtype);
    return rows ? (const uint8_t *)rows + (size_t)row * row_bytes : NULL;
}

/* ---- Stages ------------------------------------------------------------------------------------------------------ */

/* Whether the results say of every slot what was given, its weight 1 where the input has taken it. */
static void check_given(const struct sample *sample, struct verify_report *report)
{
    const struct pass *pass = sample->pass;
    const int64_t A = pass->top_k;
    for (int64_t i = 0; i < sample->n_tokens * A; ++i) {
        int64_t a = i % A, p = sample->tokens[i / A] * A + a;
        struct pass_choice given = pass_given(pass, p);
        if (pass->weight_use == MOE4_WEIGHT_ON_INPUT) given.weight = 1;
        int wrong_id = pass->ids[p] != given.id;
        double got = wrong_id ? pass->ids[p] : pass->weights[p], expected = wrong_id ? given.id : given.weight;
        int good = got == expected || (isnan(got) && isnan(expected));
        ref_verdict verdict = {1, !good, good ? 0 : DBL_MAX, sample->tokens[i / A], a, got, expected, expected};
        ref_verdict_add(&report->stages[VERIFY_ROUTING], &verdict);
    }
}

static int check_routing(const struct sample *sample, struct verify_report *report)
{
    const struct pass *pass = sample->pass;
    const ref_arithmetic arithmetic = REF_ARITHMETIC_FP32; /* no kernel's sums */
    int64_t E = pass->n_experts, A = pass->top_k;
    if (pass->routing == PASS_IDS) {
        check_given(sample, report);
        return EXIT_OK;
    }
    double *x;
    int code = allocate(&x, pass->router_size, sizeof *x, "the router's input");
    for (int64_t i = 0; !code && i < sample->n_tokens; ++i) {
        int64_t t = sample->tokens[i];
        ref_verdict verdict = REF_VERDICT_INIT;
        if (pass->routing == PASS_ROUTER) {
            pass_router_input(pass, t, x);
            ref_check_router(sample->config, x, 1, pass->logits + t * E, &arithmetic, &verdict);
            ref_verdict_add(&report->stages[VERIFY_ROUTER], &verdict);
        }
        ref_check_routing(&sample->config->routing, pass->n_experts, pass->logits + t * E,
                          pass->token_ids ? pass->token_ids + t : NULL, 1, pass->ids + t * A, pass->weights + t * A,
                          &verdict);
        ref_verdict_add(&report->stages[VERIFY_ROUTING], &verdict);
    }
    free(x);
    return code;
}

/* Copies the routed row of a slot out of the pass. */
static void row_gather(struct sample *sample, int64_t slot)
{
    const struct pass *pass = sample->pass;
    const int64_t row = pass->row_map[slot];
    int64_t H = pass->hidden_size, I = pass->intermediate_size, O = pass->output_size, n = sample->n_rows++;
    int64_t row_bytes = I * (int64_t)pass_intermediate_bytes(pass);
    uint8_t *intermediate = sample->intermediate + n * row_bytes, *scales = sample->scales + n * sample->row_scales;
    pass_expert_input(pass, slot, sample->x + n * H);
    memcpy(intermediate, (const uint8_t *)pass->intermediate + row * row_bytes, (size_t)row_bytes);
    memcpy(sample->gemm2_rows + n * O, pass->gemm2_rows + row * O, (size_t)O * sizeof *pass->gemm2_rows);
    if (sample->row_scales)
        memcpy(scales, (const uint8_t *)pass->intermediate_scale + row * sample->row_scales,
               (size_t)sample->row_scales);
    pass_widen_intermediate(pass, intermediate, scales, sample->widened + n * I);
}

/* All sampled rows of the local expert at hand. */
static void expert_gather(struct sample *sample)
{
    const struct pass *pass = sample->pass;
    sample->n_rows = 0;
    for (int64_t i = 0; i < sample->n_tokens; ++i)
        for (int64_t p = sample->tokens[i] * pass->top_k; p < (sample->tokens[i] + 1) * pass->top_k; ++p)
            if (pass->row_map[p] >= 0 && ref_local_expert(sample->config, pass->ids[p]) == sample->local)
                row_gather(sample, p);
}

static void gemm1_check(struct sample *self)
{
    if (self->pass->compute == MOE4_COMPUTE_MXFP8)
        ref_check_intermediate_mxfp8(self->config, self->expert, self->local, self->x, self->intermediate, self->scales,
                                     self->n_rows, &self->arithmetic, &self->gemm1);
    else if (self->pass->compute == MOE4_COMPUTE_FP8)
        ref_check_intermediate_fp8(self->config, self->expert, self->local, self->x, self->intermediate,
                                   (const float *)(const void *)self->scales, self->n_rows, &self->arithmetic,
                                   &self->gemm1);
    else if (self->pass->compute == MOE4_COMPUTE_INT8)
        ref_check_intermediate_int8(self->config, self->expert, self->local, self->x,
                                    (const int8_t *)self->intermediate, (const float *)(const void *)self->scales,
                                    self->n_rows, &self->arithmetic, &self->gemm1);
    else
        ref_check_intermediate(self->config, self->expert, self->local, self->x,
                               (const uint16_t *)(const void *)self->intermediate, self->n_rows, &self->arithmetic,
                               &self->gemm1);
}

/* The two GEMMs of the expert at hand: item 0 is the first, item 1 the second. */
static void expert_check(void *user, int64_t first, int64_t end)
{
    struct sample *self = user;
    if (first == 0) gemm1_check(self);
    if (end == 2)
        ref_check_gemm2(self->config, self->expert, self->widened, self->gemm2_rows, self->n_rows, &self->arithmetic,
                        &self->gemm2);
}

static int sample_allocate(struct sample *sample)
{
    const struct pass *pass = sample->pass;
    int64_t n = sample->n_tokens * pass->top_k; /* an expert can be in every slot */
    int64_t H = pass->hidden_size, I = pass->intermediate_size, O = pass->output_size;
    sample->row_scales = (int64_t)pass_scale_bytes(pass);
    int code = allocate(&sample->x, n * H, sizeof *sample->x, "sampled inputs");
    if (!code) code = allocate(&sample->intermediate, n * I, pass_intermediate_bytes(pass), "sampled intermediates");
    if (!code) code = allocate(&sample->scales, n * sample->row_scales, 1, "sampled scales");
    if (!code) code = allocate(&sample->widened, n * I, sizeof *sample->widened, "sampled intermediates");
    if (!code) code = allocate(&sample->gemm2_rows, n * O, sizeof *sample->gemm2_rows, "sampled rows");
    return code;
}

static int check_experts(struct sample *sample, const moe4_expert_source *source, int32_t n_threads,
                         struct verify_report *report)
{
    int code = sample_allocate(sample);
    for (int32_t l = 0; !code && l < sample->pass->n_experts; ++l) {
        moe4_expert expert;
        sample->local = l;
        sample->expert = &expert;
        expert_gather(sample);
        if (!sample->n_rows) continue;
        if (source->read(source->user, sample->local, &expert) != MOE4_OK) code = EXIT_FAILED;
        if (code) break;
        parallel_for(n_threads, 2, expert_check, sample);
        ref_verdict_add(&report->stages[VERIFY_INTERMEDIATE], &sample->gemm1);
        ref_verdict_add(&report->stages[VERIFY_GEMM2], &sample->gemm2);
    }
    free(sample->x);
    free(sample->intermediate);
    free(sample->scales);
    free(sample->widened);
    free(sample->gemm2_rows);
    return code;
}

static int check_output(const struct sample *sample, struct verify_report *report)
{
    const struct pass *pass = sample->pass;
    int64_t O = pass->output_size;
    const uint16_t **rows;
    int code = allocate(&rows, pass->top_k, sizeof *rows, "sampled slots");
    if (code) return code;
    for (int64_t i = 0; i < sample->n_tokens; ++i) {
        int64_t t = sample->tokens[i];
        const int32_t *map = pass->row_map + t * pass->top_k;
        for (int32_t a = 0; a < pass->top_k; ++a) rows[a] = map[a] < 0 ? NULL : pass->gemm2_rows + map[a] * O;
        ref_verdict verdict = REF_VERDICT_INIT;
        ref_check_combine(O, pass->top_k, rows, pass->weights + t * pass->top_k,
                          pass->addend ? MOE4_WRITE_ADD : MOE4_WRITE_OVERWRITE, output_row(pass, pass->addend, t),
                          output_row(pass, pass->y, t), pass->y_dtype, &verdict);
        ref_verdict_add(&report->stages[VERIFY_OUTPUT], &verdict);
    }
    free(rows);
    return code;
}

/* ---- Whole layer ------------------------------------------------------------------------------------------------- */

/* Copies rows of row_bytes, those of the sampled tokens, to one after another. */
static int rows_take(const struct sample *sample, const void *from, int64_t row_bytes, void *to)
{
    uint8_t *rows;
    int code = allocate(&rows, sample->n_tokens * row_bytes, 1, "sampled rows");
    for (int64_t i = 0; !code && i < sample->n_tokens; ++i)
        memcpy(rows + i * row_bytes, (const uint8_t *)from + sample->tokens[i] * row_bytes, (size_t)row_bytes);
    memcpy(to, &rows, sizeof rows); /* `to` is the address of a pointer of any type */
    return code;
}

/* The ids and weights of the sampled tokens: those given, or those that the library chose. */
static int choices_take(const struct sample *sample, struct pass *part)
{
    const struct pass *pass = sample->pass;
    const int64_t A = pass->top_k;
    float *weights = NULL;
    int code = allocate(&part->given_ids, sample->n_tokens * A, sizeof *part->given_ids, "sampled ids");
    if (!code) code = allocate(&weights, sample->n_tokens * A, sizeof *weights, "sampled weights");
    for (int64_t i = 0; !code && i < sample->n_tokens * A; ++i) {
        int64_t p = sample->tokens[i / A] * A + i % A;
        struct pass_choice choice = {pass->ids[p], pass->weights[p]};
        if (pass->routing == PASS_IDS) choice = pass_given(pass, p);
        part->given_ids[i] = choice.id;
        weights[i] = choice.weight;
    }
    part->given_weights = weights;
    return code;
}

/* A pass of the sampled tokens alone, routed as they were. */
static int sample_pass(const struct sample *sample, struct pass *part)
{
    const struct pass *pass = sample->pass;
    int64_t H = pass->hidden_size, O = pass->output_size;
    *part = pass_begin(sample->config, PASS_IDS, sample->n_tokens, pass->top_k);
    part->compute = pass->compute;
    part->x_dtype = pass->x_dtype;
    part->y_dtype = pass->y_dtype;
    part->weight_use = pass->weight_use;
    int code = rows_take(sample, pass->x, H * (int64_t)dtype_bytes(pass->x_dtype), &part->x);
    const int64_t x_scale_bytes = pass->compute == MOE4_COMPUTE_FP8 ? (int64_t)sizeof(float) : H / 32;
    if (!code && pass->x_scale) code = rows_take(sample, pass->x_scale, x_scale_bytes, &part->x_scale);
    if (!code && pass->addend)
        code = rows_take(sample, pass->addend, O * (int64_t)dtype_bytes(pass->y_dtype), &part->addend);
    if (!code) code = choices_take(sample, part);
    if (!code) code = pass_allocate(part, 0);
    return code;
}

static int check_layer(const struct sample *sample, const moe4_expert_source *source, int32_t n_threads,
                       struct verify_report *report)
{
    int64_t O = sample->pass->output_size, n = sample->n_tokens;
    double *got = NULL, *expected = NULL;
    struct pass part;
    int code = sample_pass(sample, &part);
    if (!code) code = oracle_forward(sample->config, source, n_threads, &part);
    if (!code) code = allocate(&got, n * O, sizeof *got, "sampled outputs");
    if (!code) code = allocate(&expected, n * O, sizeof *expected, "expected outputs");
    if (!code) {
        for (int64_t i = 0; i < n * O; ++i) {
            got[i] = ref_load(sample->pass->y, part.y_dtype, sample->tokens[i / O] * O + i % O);
            expected[i] = ref_load(part.y, part.y_dtype, i);
        }
        ref_compare(got, expected, n, O, &report->frobenius);
    }
    free(got);
    free(expected);
    pass_end(&part);
    return code;
}

int verify_pass(const moe4_layer_config *config, const moe4_expert_source *source, const struct machine *machine,
                const struct pass *pass, int64_t work, struct verify_report *report)
{
    const int32_t n_threads = machine->n_host_threads;
    struct sample sample = {.config = config, .pass = pass, .arithmetic = sample_arithmetic(pass, machine)};
    *report = (struct verify_report){0};
    for (int stage = 0; stage < VERIFY_STAGES; ++stage) report->stages[stage] = (ref_verdict)REF_VERDICT_INIT;
    sample_choose(&sample, work);
    report->n_tokens = sample.n_tokens;
    report->mode = oracle_mode(pass->compute);
    int code = check_routing(&sample, report);
    if (!code) code = check_experts(&sample, source, n_threads, report);
    if (!code) code = check_output(&sample, report);
    if (!code) code = check_layer(&sample, source, n_threads, report);
    return code;
}

/* ---- Reports ----------------------------------------------------------------------------------------------------- */

int verify_layer_is_close(const struct verify_report *report)
{
    ref_frobenius rows = report->frobenius;
    rows.worst_column =
        0; /* in a few tokens, one element that rounds the other way puts its column off by a whole step */
    return ref_close(&rows, report->mode);
}

int verify_is_good(const struct verify_report *report)
{
    int64_t n_outside = 0;
    for (int stage = 0; stage < VERIFY_STAGES; ++stage) n_outside += report->stages[stage].n_outside;
    return n_outside == 0 && verify_layer_is_close(report);
}

double verify_worst_ratio(const struct verify_report *report)
{
    double worst = 0;
    for (int stage = 0; stage < VERIFY_STAGES; ++stage)
        if (report->stages[stage].worst_ratio > worst) worst = report->stages[stage].worst_ratio;
    return worst;
}

json_t *verify_json(const struct verify_report *report)
{
    json_t *object = json_object();
    for (int stage = 0; stage < VERIFY_STAGES; ++stage)
        if (report->stages[stage].n_checked)
            json_put_real(object, verify_stage_name((verify_stage)stage), report->stages[stage].worst_ratio);
    json_put_real(object, "frobenius", report->frobenius.overall);
    json_put_integer(object, "tokens", report->n_tokens);
    json_put_truth(object, "ok", verify_is_good(report));
    return object;
}

void verify_print(const struct verify_report *report)
{
    report_field("check", "%s  %lld tokens against the oracle, whole layer off by %.2g (relative Frobenius)",
                 human_outcome(verify_is_good(report)).text, (long long)report->n_tokens, report->frobenius.overall);
    for (int stage = 0; stage < VERIFY_STAGES; ++stage) {
        const ref_verdict *verdict = &report->stages[stage];
        if (!verdict->n_checked) continue;
        printf("  %12s %-14s%s", "", verify_stage_name((verify_stage)stage), human_verdict(verdict->worst_ratio).text);
        if (verdict->n_outside)
            printf(", %lld of %lld outside; worst: row %lld column %lld is %.9g, allowed %.9g..%.9g",
                   (long long)verdict->n_outside, (long long)verdict->n_checked, (long long)verdict->worst_row,
                   (long long)verdict->worst_column, verdict->worst_got, verdict->worst_low, verdict->worst_high);
        printf("\n");
    }
}
