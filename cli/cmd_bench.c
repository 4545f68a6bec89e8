/* moe4 bench: times a whole layer against what the machine can do at best, measured in the same run. */
#include <stdio.h>
#include <stdlib.h>

#include <jansson.h>

#include "command.h"
#include "commit.h"
#include "generate.h"
#include "memory.h"
#include "message.h"
#include "model.h"
#include "moe4/tune.h"
#include "options.h"
#include "packing.h"
#include "pass.h"
#include "probe.h"
#include "progress.h"
#include "report.h"
#include "timing.h"
#include "verify.h"
#include "words.h"
#include "workload.h"

enum { WARM_UPS = 2, MAX_VERIFIED_TOKENS = 256 };

static const char *const backend_words[] = {"cpu", NULL};

struct bench {
    int shape_index, isa, backend, compute, pattern, json;
    const char *tuning_file;
    struct integer_list tokens;
    int64_t n_threads, repeat, n_experts, H, I;

    struct layer_shape shape;
    moe4_layer_config config;
    moe4_context *context;
    moe4_context_info info;
    struct workload workload;
    moe4_layer *layer;
    moe4_layer_info layer_info;
    double prepare_gbs;           /* read and written */
    struct memory_record weights; /* where the layer keeps most of them */
    struct probe *probe;
    struct probe_result machine;
};

/* One (shape, tokens) and what was measured. */
struct point {
    int64_t n_tokens;
    double *ms, *n_touched, *floor_ms, *ratio, *gbs; /* one a repetition; n_touched: experts */
    double flops;                                    /* of one call */
    double worst_ratio;                              /* of the check */
};

/* ---- Set-up ------------------------------------------------------------------------------------------------------ */

/* MXFP4 weights of one expert: 4.25 bits each. */
static double expert_bytes(const struct bench *bench)
{
    return 3.0 * (double)bench->shape.hidden_size * (double)bench->shape.intermediate_size * 4.25 / 8;
}

static int bench_prepare(struct bench *bench)
{
    double needed = 1.02 * expert_bytes(bench) * (bench->config.n_experts + 1);
    double available = (double)memory_available();
    if (needed > available)
        return fail("%s: %d experts need %s of memory, %s are available; --experts makes it smaller", bench->shape.name,
                    bench->config.n_experts, human_bytes(needed).text, human_bytes(available).text);
    moe4_query query = MOE4_QUERY_INIT;
    query.config = &bench->config;
    query.compute = (moe4_compute)bench->compute;
    query.logits_dtype = MOE4_DTYPE_F32;
    if (moe4_supports(bench->context, &query) != MOE4_OK) return fail_library(bench->context);
    int code = workload_open(&bench->shape, bench->info.n_threads, &bench->workload);
    if (code) return code;
    moe4_expert_source source = workload_source(&bench->workload);
    code = packing_measure((moe4_isa)bench->isa, bench->n_threads, &bench->config, &source, &bench->prepare_gbs);
    if (code) return code;
    if (moe4_layer_create_from(bench->context, &bench->config, &source, &bench->layer) != MOE4_OK)
        return fail_library(bench->context);
    code = layer_describe(bench->context, bench->layer, (moe4_compute)bench->compute, &bench->layer_info);
    return code ? code
                : probe_open(bench->info.n_threads, bench->layer_info.weight_bytes, &bench->weights, &bench->probe);
}

/* A pass of n tokens with generated inputs and room for logits. */
static int bench_pass(struct bench *bench, int64_t n_tokens, int wants, struct pass *pass)
{
    int64_t H = bench->config.hidden_size;
    *pass = pass_begin(&bench->config, PASS_LOGITS, n_tokens, bench->config.routing.top_k);
    pass->compute = (moe4_compute)bench->compute;
    int code = allocate(&pass->x, n_tokens * H, sizeof(uint16_t), "inputs");
    if (!code) code = allocate(&pass->given_logits, n_tokens * pass->n_experts, sizeof(float), "logits");
    if (!code) code = pass_allocate(pass, wants);
    if (!code) code = pass_prepare(pass, bench->context, bench->layer);
    if (!code) generate_inputs(generate_key(0, GENERATE_INPUT, 0), 0, n_tokens, H, pass->x);
    return code;
}

/* ---- One point --------------------------------------------------------------------------------------------------- */

static int point_verify(struct bench *bench, struct point *point)
{
    int64_t n_tokens = point->n_tokens < MAX_VERIFIED_TOKENS ? point->n_tokens : MAX_VERIFIED_TOKENS;
    moe4_expert_source source = workload_source(&bench->workload);
    struct verify_report report = {0};
    struct pass pass;
    int code = bench_pass(bench, n_tokens, PASS_STAGES, &pass);
    if (!code) code = workload_logits((load_pattern)bench->pattern, 0, n_tokens, pass.n_experts, pass.given_logits);
    if (!code && pass_forward(&pass, bench->context, bench->layer, FORWARD_ALL) != MOE4_OK)
        code = fail_library(bench->context);
    if (!code) code = verify_pass(&bench->config, &source, &bench->info, &pass, VERIFY_QUICK, &report);
    if (!code && !verify_is_good(&report))
        code = fail(
            "%s, %lld tokens: the results are wrong, so their time means nothing (worst ratio to a bound %g, whole "
            "layer off by %g)",
            bench->shape.name, (long long)n_tokens, verify_worst_ratio(&report), report.frobenius.overall);
    point->worst_ratio = verify_worst_ratio(&report);
    pass_end(&pass);
    return code;
}

/* Times one call with routing of its own, so that its weights come from memory. */
static int point_repeat(struct bench *bench, struct point *point, struct pass *pass, int64_t repetition)
{
    int64_t n_touched, n_rows;
    int code =
        workload_logits((load_pattern)bench->pattern, repetition, pass->n_tokens, pass->n_experts, pass->given_logits);
    if (code) return code;
    double started = seconds_now();
    moe4_status status = pass_forward(pass, bench->context, bench->layer, FORWARD_OUTPUT);
    double ms = 1000 * (seconds_now() - started);
    if (status != MOE4_OK) return fail_library(bench->context);
    int64_t i = repetition - WARM_UPS;
    if (i < 0) return EXIT_OK;
    pass_count_local(pass, &bench->config, &n_touched, &n_rows);
    point->ms[i] = ms;
    point->n_touched[i] = (double)n_touched;
    return EXIT_OK;
}

static int point_time(struct bench *bench, struct point *point)
{
    struct pass pass;
    int code = bench_pass(bench, point->n_tokens, 0, &pass);
    for (int64_t i = 0; !code && i < WARM_UPS + bench->repeat; ++i) code = point_repeat(bench, point, &pass, i);
    pass_end(&pass);
    point->flops = 2.0 * 3 * (double)(point->n_tokens * bench->config.routing.top_k) *
                   (double)bench->config.hidden_size * (double)bench->config.intermediate_size;
    return code;
}

/* floor = the longer of the time to read the experts that were touched and the time to multiply. */
static void point_judge(const struct bench *bench, struct point *point)
{
    for (int64_t i = 0; i < bench->repeat; ++i) {
        double bytes = point->n_touched[i] * expert_bytes(bench);
        double reading = 1e-6 * bytes / bench->machine.bandwidth_gbs;
        double multiplying = 1e-6 * point->flops / bench->machine.rate_gflops;
        point->floor_ms[i] = reading > multiplying ? reading : multiplying;
        point->ratio[i] = point->ms[i] / point->floor_ms[i];
        point->gbs[i] = 1e-6 * bytes / point->ms[i];
    }
}

struct point_summary {
    double median, p10, p90; /* ms */
    double n_touched, gbs, gflops, floor_ms, ratio;
};

static struct point_summary point_summarize(const struct bench *bench, const struct point *point)
{
    int64_t n = bench->repeat;
    double median = quantile(point->ms, n, 0.5);
    return (struct point_summary){
        .median = median,
        .p10 = quantile(point->ms, n, 0.1),
        .p90 = quantile(point->ms, n, 0.9),
        .n_touched = quantile(point->n_touched, n, 0.5),
        .gbs = quantile(point->gbs, n, 0.5),
        .gflops = 1e-6 * point->flops / median,
        .floor_ms = quantile(point->floor_ms, n, 0.5),
        .ratio = quantile(point->ratio, n, 0.5),
    };
}

static void point_print_json(const struct bench *bench, const struct point *point, const struct point_summary *summary)
{
    const struct probe_result *machine = &bench->machine;
    json_t *line = json_object();
    json_put_text(line, "shape", bench->shape.name);
    json_put_integer(line, "tokens", point->n_tokens);
    json_put_text(line, "backend", backend_words[bench->backend]);
    json_put_text(line, "activation_dtype", compute_words[bench->compute]);
    json_put_integer(line, "threads", bench->info.n_threads);
    json_put_text(line, "kernel", bench->layer_info.kernel);
    json_put_text(line, "isa", bench->info.isa_name);
    json_put_text(line, "order", bench->layer_info.order);
    json_put_text(line, "routing", load_pattern_names[bench->pattern]);
    json_put_integer(line, "n_experts", bench->config.n_experts);
    json_put_integer(line, "top_k", bench->config.routing.top_k);
    json_put_integer(line, "hidden_size", bench->config.hidden_size);
    json_put_integer(line, "intermediate_size", bench->config.intermediate_size);
    json_put_integer(line, "repeat", bench->repeat);
    json_put_real(line, "experts_touched", summary->n_touched);
    json_put_real(line, "ms_median", summary->median);
    json_put_real(line, "ms_p10", summary->p10);
    json_put_real(line, "ms_p90", summary->p90);
    json_put_real(line, "gbs", summary->gbs);
    json_put_real(line, "gflops", summary->gflops);
    json_put_real(line, "bandwidth_gbs_measured", machine->bandwidth_gbs);
    json_put_real(line, "rate_gflops_measured", machine->rate_gflops);
    json_put_text(line, "rate_instruction", machine->instruction);
    json_put_real(line, "rate_per_clock", machine->rate_per_clock);
    json_put_real(line, "clock_ghz", machine->clock_ghz);
    json_put_real(line, "floor_ms", summary->floor_ms);
    json_put_real(line, "ratio_to_floor", summary->ratio);
    json_put_real(line, "prepare_gbs", bench->prepare_gbs);
    json_put_real(line, "check_worst_ratio", point->worst_ratio);
    json_put_text(line, "commit", commit_id());
    json_put_text(line, "version", moe4_version());
    report_json(line);
}

static void point_print(const struct bench *bench, const struct point *point)
{
    const struct point_summary summary = point_summarize(bench, point);
    if (summary.ratio < 0.95)
        note(
            "%lld tokens: faster than the machine was measured to be: something else ran meanwhile, or the weights fit "
            "into a cache",
            (long long)point->n_tokens);
    if (bench->json) {
        point_print_json(bench, point, &summary);
        return;
    }
    printf("%7lld %8.0f %10.4f %10.4f %10.4f %8.2f %9.1f %10.4f %7.3f\n", (long long)point->n_tokens, summary.n_touched,
           summary.median, summary.p10, summary.p90, summary.gbs, summary.gflops, summary.floor_ms, summary.ratio);
    fflush(stdout);
}

static int bench_point(struct bench *bench, int64_t n_tokens)
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
    code = point_verify(bench, &point);
    if (!code) {
        bench->machine = (struct probe_result){0}; /* right before and right after; the better counts */
        probe_bandwidth(bench->probe, &bench->machine);
        probe_rate(bench->probe, bench->info.isa, (moe4_compute)bench->compute, &bench->machine);
        code = point_time(bench, &point);
    }
    if (!code) {
        probe_bandwidth(bench->probe, &bench->machine);
        probe_rate(bench->probe, bench->info.isa, (moe4_compute)bench->compute, &bench->machine);
        point_judge(bench, &point);
        point_print(bench, &point);
    }
    free(values);
    return code;
}

/* ---- Command ----------------------------------------------------------------------------------------------------- */

static void bench_print_head(const struct bench *bench)
{
    report_title("%s: %d experts, %d a token, %lld x %lld", bench->shape.name, bench->config.n_experts,
                 bench->config.routing.top_k, (long long)bench->config.hidden_size,
                 (long long)bench->config.intermediate_size);
    report_field("kernel", "%s, order \"%s\"", bench->layer_info.kernel, bench->layer_info.order);
    report_field("machine", "%s, %s, %d threads", bench->info.device_name, bench->info.isa_name, bench->info.n_threads);
    report_field("routing", "%s, new at each of %lld repetitions", load_pattern_names[bench->pattern],
                 (long long)bench->repeat);
    printf("%7s %8s %10s %10s %10s %8s %9s %10s %7s\n", "tokens", "experts", "ms", "p10", "p90", "GB/s", "GFLOP/s",
           "floor ms", "ratio");
    fflush(stdout);
}

static void bench_print_machine(const struct bench *bench)
{
    const struct probe_result *machine = &bench->machine;
    report_field("prepared", "at %.1f GB/s, read and written", bench->prepare_gbs);
    report_field("measured", "%.1f GB/s read, %.0f GFLOP/s by %s", machine->bandwidth_gbs, machine->rate_gflops,
                 machine->instruction);
    if (machine->rate_per_clock > 0)
        report_field("", "%.2f instructions a clock and thread at %.2f GHz", machine->rate_per_clock,
                     machine->clock_ghz);
}

static int bench_run(struct bench *bench)
{
    const moe4_allocator allocator = memory_recorder(&bench->weights);
    int code = context_open((moe4_isa)bench->isa, bench->n_threads, &allocator, &bench->context, &bench->info);
    if (!code && bench->tuning_file && moe4_tuning_load(bench->context, bench->tuning_file) != MOE4_OK)
        code = fail_library(bench->context);
    if (!code) code = bench_prepare(bench);
    if (!code && !bench->json) bench_print_head(bench);
    for (int32_t i = 0; !code && i < bench->tokens.count; ++i) code = bench_point(bench, bench->tokens.values[i]);
    if (!code && !bench->json) bench_print_machine(bench);
    return code;
}

int cmd_bench(int argc, char **argv)
{
    struct bench bench = {
        .repeat = 21,
        .tokens = {5, {1, 4, 16, 64, 512}},
        .info = MOE4_CONTEXT_INFO_INIT,
        .layer_info = MOE4_LAYER_INFO_INIT,
    };
    const struct option options[] = {
        option_word("--shape", layer_shape_names, &bench.shape_index, "the layer (oss20b)"),
        option_integers("--tokens", "LIST", &bench.tokens, 1, 1 << 20, "batch sizes (1,4,16,64,512)"),
        option_word("--backend", backend_words, &bench.backend, "where it runs (cpu)"),
        option_integer("--threads", "N", &bench.n_threads, 1, 1024, "threads (as many as the process may use)"),
        option_word("--isa", isa_words, &bench.isa, "the highest instruction set to use (auto: the best there is)"),
        option_word("--activation-dtype", compute_words, &bench.compute, "activations' format in the GEMMs (bf16)"),
        option_word("--routing", load_pattern_names, &bench.pattern, "how tokens spread over experts (uniform)"),
        option_integer("--repeat", "N", &bench.repeat, 1, 10000, "timed calls a point (21)"),
        option_text("--tuning", "FILE", &bench.tuning_file, "what moe4 tune has measured on this machine"),
        option_integer("--experts", "E", &bench.n_experts, 1, 32767, "for small tests: other than the shape's"),
        option_integer("--hidden", "H", &bench.H, 32, 1 << 20, "the same"),
        option_integer("--intermediate", "I", &bench.I, 32, 1 << 20, "the same"),
        option_flag("--json", &bench.json, "report one JSON object a line and point"),
    };
    const struct usage usage = {"bench", "Times a layer against the bandwidth and the arithmetic of the machine.",
                                options, sizeof options / sizeof *options};
    int code;
    if (!options_parse(&usage, argc, argv, &code)) return code;
    bench.shape = *layer_shape_find(layer_shape_names[bench.shape_index]);
    if (bench.n_experts) bench.shape.n_experts = (int32_t)bench.n_experts;
    if (bench.H) bench.shape.hidden_size = bench.H;
    if (bench.I) bench.shape.intermediate_size = bench.I;
    bench.config = layer_shape_config(&bench.shape);
    code = bench_run(&bench);
    probe_close(bench.probe);
    moe4_layer_destroy(bench.layer);
    workload_close(&bench.workload);
    moe4_context_destroy(bench.context);
    return code;
}
