/* One point of moe4 bench: checked, timed, and held against what the machine can do at best. */
#include <stdlib.h>
#include <string.h>

#include "bench.h"
#include "command.h"
#include "generate.h"
#include "message.h"
#include "pass.h"
#include "progress.h"
#include "timing.h"
#include "verify.h"

enum { MAX_VERIFIED_TOKENS = 256, MAX_SETS = 16, SET_TOKENS = 8192 };

double bench_expert_bytes(const struct bench *bench)
{
    return 3.0 * (double)bench->shape.hidden_size * (double)bench->shape.intermediate_size * 4.25 / 8;
}

/* A pass of n tokens with generated inputs, and logits of n_sets calls; the pass has those of the first. */
static int bench_pass(struct bench *bench, int64_t n_tokens, int32_t n_sets, int wants, struct pass *pass)
{
    const int64_t H = bench->config.hidden_size;
    float *logits = NULL;
    *pass = pass_begin(&bench->config, PASS_LOGITS, n_tokens, bench->config.routing.top_k);
    pass->compute = (moe4_compute)bench->compute;
    pass->mirror.gpu = bench->machine.gpu;
    const int64_t set = n_tokens * pass->n_experts;
    int code = allocate(&pass->x, n_tokens * H, sizeof(uint16_t), "inputs");
    if (!code) code = allocate(&logits, n_sets * set, sizeof *logits, "logits");
    pass->given_logits = logits;
    for (int32_t i = 0; !code && i < n_sets; ++i)
        code = workload_logits((load_pattern)bench->pattern, i, n_tokens, pass->n_experts, logits + i * set);
    if (!code) generate_inputs(generate_key(0, GENERATE_INPUT, 0), 0, n_tokens, H, pass->x);
    if (!code) code = pass_allocate(pass, wants);
    pass->n_logit_sets = n_sets;
    return code ? code : pass_prepare(pass, bench->machine.context, bench->layers[0]);
}

static int point_verify(struct bench *bench, struct point *point)
{
    int64_t n_tokens = point->n_tokens < MAX_VERIFIED_TOKENS ? point->n_tokens : MAX_VERIFIED_TOKENS;
    moe4_expert_source source = workload_source(&bench->workload);
    struct verify_report report = {0};
    struct pass pass;
    int code = bench_pass(bench, n_tokens, 1, PASS_STAGES, &pass);
    if (!code) code = pass_forward(&pass, bench->machine.context, bench->layers[0], FORWARD_ALL);
    if (!code) code = verify_pass(&bench->config, &source, &bench->machine, &pass, VERIFY_QUICK, &report);
    if (!code && !verify_is_good(&report))
        code = fail(
            "%s, %lld tokens: the results are wrong, so their time means nothing (worst ratio to a bound %g, whole "
            "layer off by %g)",
            bench->shape.name, (long long)n_tokens, verify_worst_ratio(&report), report.frobenius.overall);
    point->worst_ratio = verify_worst_ratio(&report);
    pass_end(&pass);
    return code;
}

/* ---- The CPU: call by call --------------------------------------------------------------------------------------- */

/* Times one call with routing of its own, so that its weights come from memory. */
static int point_repeat(struct bench *bench, struct point *point, struct pass *pass, int64_t repetition)
{
    int64_t n_touched, n_rows;
    int code =
        workload_logits((load_pattern)bench->pattern, repetition, pass->n_tokens, pass->n_experts, pass->given_logits);
    if (code) return code;
    double started = seconds_now();
    code = pass_enqueue(pass, bench->machine.context, bench->layers[0], FORWARD_OUTPUT);
    double ms = 1000 * (seconds_now() - started);
    int64_t i = repetition - BENCH_WARM_UPS;
    if (code || i < 0) return code;
    pass_count_local(pass, &bench->config, &n_touched, &n_rows);
    point->ms[i] = ms;
    point->n_touched[i] = (double)n_touched;
    return EXIT_OK;
}

static int time_cpu(struct bench *bench, struct point *point)
{
    struct pass pass;
    int code = bench_pass(bench, point->n_tokens, 1, 0, &pass);
    for (int64_t i = 0; !code && i < BENCH_WARM_UPS + bench->repeat; ++i) code = point_repeat(bench, point, &pass, i);
    pass_end(&pass);
    return code;
}

/* ---- A GPU: several calls in a graph, each with routing of its own ------------------------------------------------
 */

struct gpu_calls_made {
    struct bench *bench;
    struct pass *pass;
    float *logits; /* of the first */
};

/* Call i has logits and a layer of its own. */
static int call_enqueue(void *user, int32_t call)
{
    struct gpu_calls_made *self = user;
    struct bench *bench = self->bench;
    self->pass->given_logits = self->logits + call * self->pass->n_tokens * self->pass->n_experts;
    int code = pass_enqueue(self->pass, bench->machine.context, bench->layers[call % bench->n_layers], FORWARD_OUTPUT);
    self->pass->given_logits = self->logits;
    return code;
}

/* Experts that a call touches, the mean of all. */
static int calls_count(struct gpu_calls_made *self, int32_t n_sets, double *n_touched)
{
    struct pass *pass = self->pass;
    int64_t sum = 0, n, n_rows;
    int code = EXIT_OK;
    for (int32_t i = 0; !code && i < n_sets; ++i) {
        code = call_enqueue(self, i);
        if (!code) code = mirror_download(&pass->mirror, pass->ids);
        pass_count_local(pass, &self->bench->config, &n, &n_rows);
        sum += n;
    }
    *n_touched = (double)sum / n_sets;
    return code;
}

static int time_gpu(struct bench *bench, struct point *point)
{
    const struct gpu_calls *calls = bench->machine.gpu->calls;
    int32_t n_sets = (int32_t)(SET_TOKENS / point->n_tokens);
    n_sets = n_sets < 2 ? 2 : n_sets > MAX_SETS ? MAX_SETS : n_sets;
    double n_touched = 0;
    struct pass pass;
    int code = bench_pass(bench, point->n_tokens, n_sets, 0, &pass);
    struct gpu_calls_made made = {bench, &pass, pass.given_logits};
    if (!code) code = calls_count(&made, n_sets, &n_touched);
    if (!code) code = calls->time(bench->machine.gpu, call_enqueue, &made, n_sets, bench->repeat, point->ms);
    for (int64_t i = 0; !code && i < bench->repeat; ++i) {
        point->ms[i] /= n_sets;
        point->n_touched[i] = n_touched;
    }
    pass_end(&pass);
    return code;
}

/* ---- Either ------------------------------------------------------------------------------------------------------ */

static int bench_probe(struct bench *bench)
{
    struct gpu *gpu = bench->machine.gpu;
    if (gpu) return gpu->calls->probe(gpu, &bench->best);
    probe_bandwidth(bench->probe, &bench->best);
    probe_rate(bench->probe, bench->machine.info.isa, (moe4_compute)bench->compute, &bench->best);
    return EXIT_OK;
}

/* floor = the longer of the time to read the experts that were touched and the time to multiply. */
static void point_judge(const struct bench *bench, struct point *point)
{
    for (int64_t i = 0; i < bench->repeat; ++i) {
        double bytes = point->n_touched[i] * bench_expert_bytes(bench);
        double reading = 1e-6 * bytes / bench->best.bandwidth_gbs;
        double multiplying = 1e-6 * point->flops / bench->best.rate_gflops;
        point->floor_ms[i] = reading > multiplying ? reading : multiplying;
        point->ratio[i] = point->ms[i] / point->floor_ms[i];
        point->gbs[i] = 1e-6 * bytes / point->ms[i];
    }
}

static struct point_summary point_summarize(const struct bench *bench, const struct point *point)
{
    const int64_t n = bench->repeat;
    const double median = quantile(point->ms, n, 0.5);
    return (struct point_summary){
        .n_tokens = point->n_tokens,
        .median = median,
        .p10 = quantile(point->ms, n, 0.1),
        .p90 = quantile(point->ms, n, 0.9),
        .n_touched = quantile(point->n_touched, n, 0.5),
        .gbs = quantile(point->gbs, n, 0.5),
        .gflops = 1e-6 * point->flops / median,
        .floor_ms = quantile(point->floor_ms, n, 0.5),
        .ratio = quantile(point->ratio, n, 0.5),
        .worst_ratio = point->worst_ratio,
    };
}

int bench_point(struct bench *bench, int64_t n_tokens, struct point_summary *summary)
{
    struct point point = {.n_tokens = n_tokens};
    double *values;
    int64_t n = bench->repeat;
    int code = allocate(&values, 5 * n, sizeof *values, "measurements");
    if (code) return code;
    point.ms = values;
    point.n_touched = values + n;
    point.floor_ms = values + 2 * n;
    point.ratio = values + 3 * n;
    point.gbs = values + 4 * n;
    point.flops = 2.0 * 3 * (double)(n_tokens * bench->config.routing.top_k) * (double)bench->config.hidden_size *
                  (double)bench->config.intermediate_size;
    code = point_verify(bench, &point);
    bench->best = (struct probe_result){0}; /* right before and right after; the better counts */
    if (!code) code = bench_probe(bench);
    if (!code) code = bench->machine.gpu ? time_gpu(bench, &point) : time_cpu(bench, &point);
    if (!code) code = bench_probe(bench);
    if (!code) {
        point_judge(bench, &point);
        *summary = point_summarize(bench, &point);
    }
    free(values);
    return code;
}
