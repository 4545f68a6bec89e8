/* What moe4 bench prints. */
#include <stdio.h>

#include <jansson.h>

#include "bench.h"
#include "commit.h"
#include "message.h"
#include "report.h"
#include "words.h"

/* What only a GPU has, in the units that people use of one. */
static void put_gpu(json_t *line, const struct bench *bench, const struct point_summary *point)
{
    const struct gpu *gpu = bench->machine.gpu;
    json_put_text(line, "gpu", gpu->name);
    json_put_integer(line, "multiprocessors", gpu->n_multiprocessors);
    json_put_real(line, "clock_ghz_highest", gpu->clock_ghz);
    json_put_real(line, "memory_clock_ghz_highest", gpu->memory_clock_ghz);
    json_put_integer(line, "layers", bench->n_layers);
    json_put_real(line, "tflops", 1e-3 * point->gflops);
    json_put_real(line, "copy_gbs_measured", bench->best.bandwidth_gbs);
    json_put_real(line, "bf16_tflops_measured", 1e-3 * bench->best.rate_gflops);
}

static void point_print_json(const struct bench *bench, const struct point_summary *point)
{
    const struct probe_result *best = &bench->best;
    const moe4_context_info *info = &bench->machine.info;
    json_t *line = json_object();
    json_put_text(line, "shape", bench->shape.name);
    json_put_integer(line, "tokens", point->n_tokens);
    json_put_text(line, "backend", machine_word(&bench->machine));
    json_put_text(line, "activation_dtype", compute_words[bench->compute]);
    json_put_integer(line, "threads", info->n_threads);
    json_put_text(line, "kernel", bench->layer_info.kernel);
    json_put_text(line, "isa", info->isa_name);
    json_put_text(line, "order", bench->layer_info.order);
    json_put_text(line, "routing", load_pattern_names[bench->pattern]);
    json_put_integer(line, "n_experts", bench->config.n_experts);
    json_put_integer(line, "top_k", bench->config.routing.top_k);
    json_put_integer(line, "hidden_size", bench->config.hidden_size);
    json_put_integer(line, "intermediate_size", bench->config.intermediate_size);
    json_put_integer(line, "repeat", bench->repeat);
    json_put_real(line, "experts_touched", point->n_touched);
    json_put_real(line, "ms_median", point->median);
    json_put_real(line, "ms_p10", point->p10);
    json_put_real(line, "ms_p90", point->p90);
    json_put_real(line, "gbs", point->gbs);
    json_put_real(line, "gflops", point->gflops);
    if (bench->machine.gpu) put_gpu(line, bench, point);
    json_put_real(line, "bandwidth_gbs_measured", best->bandwidth_gbs);
    json_put_real(line, "rate_gflops_measured", best->rate_gflops);
    json_put_text(line, "rate_instruction", best->instruction);
    if (!bench->machine.gpu) json_put_real(line, "rate_per_clock", best->rate_per_clock);
    json_put_real(line, "clock_ghz", best->clock_ghz);
    json_put_real(line, "floor_ms", point->floor_ms);
    json_put_real(line, "ratio_to_floor", point->ratio);
    json_put_real(line, "prepare_gbs", bench->prepare_gbs);
    json_put_real(line, "check_worst_ratio", point->worst_ratio);
    json_put_text(line, "commit", commit_id());
    json_put_text(line, "version", moe4_version());
    report_json(line);
}

void bench_print_point(const struct bench *bench, const struct point_summary *point)
{
    if (point->ratio < 0.95)
        note(
            "%lld tokens: faster than the machine was measured to be: something else ran meanwhile, or the weights fit "
            "into a cache",
            (long long)point->n_tokens);
    if (bench->json) {
        point_print_json(bench, point);
        return;
    }
    printf("%7lld %8.0f %10.4f %10.4f %10.4f %8.2f %9.1f %10.4f %7.3f\n", (long long)point->n_tokens, point->n_touched,
           point->median, point->p10, point->p90, point->gbs, point->gflops, point->floor_ms, point->ratio);
    fflush(stdout);
}

void bench_print_head(const struct bench *bench)
{
    report_title("%s: %d experts, %d a token, %lld x %lld", bench->shape.name, bench->config.n_experts,
                 bench->config.routing.top_k, (long long)bench->config.hidden_size,
                 (long long)bench->config.intermediate_size);
    report_field("kernel", "%s, order \"%s\"", bench->layer_info.kernel, bench->layer_info.order);
    report_field("machine", "%s", machine_show(&bench->machine).text);
    if (bench->machine.gpu)
        report_field("routing", "%s, several in a graph on %s; %lld replays", load_pattern_names[bench->pattern],
                     human_plural(bench->n_layers, "layer").text, (long long)bench->repeat);
    else
        report_field("routing", "%s, new at each of %lld repetitions", load_pattern_names[bench->pattern],
                     (long long)bench->repeat);
    printf("%7s %8s %10s %10s %10s %8s %9s %10s %7s\n", "tokens", "experts", "ms", "p10", "p90", "GB/s", "GFLOP/s",
           "floor ms", "ratio");
    fflush(stdout);
}

void bench_print_machine(const struct bench *bench)
{
    const struct probe_result *best = &bench->best;
    report_field("prepared", "at %.1f GB/s, read and written", bench->prepare_gbs);
    report_field("measured", "%.1f GB/s %s, %.0f GFLOP/s by %s", best->bandwidth_gbs,
                 bench->machine.gpu ? "copied (read and written)" : "read", best->rate_gflops, best->instruction);
    if (best->rate_per_clock > 0)
        report_field("", "%.2f instructions a clock and thread at %.2f GHz", best->rate_per_clock, best->clock_ghz);
    else if (best->clock_ghz > 0)
        report_field("", "at %.2f GHz", best->clock_ghz);
}
