/* moe4 bench: times whole layers against what the machine can do at best, measured in the same run. */
#include <stdlib.h>

#include "bench.h"
#include "command.h"
#include "message.h"
#include "model.h"
#include "packing.h"
#include "report.h"
#include "svg.h"
#include "words.h"

enum { ROTATED_BYTES = 2000000000 }; /* of weights that a GPU's calls take turns on: far more than any cache */

/* ---- A shape ----------------------------------------------------------------------------------------------------- */

static void shape_choose(struct bench *bench, int64_t index)
{
    bench->shape = *layer_shape_find(layer_shape_names[index]);
    if (bench->n_experts) bench->shape.n_experts = (int32_t)bench->n_experts;
    if (bench->H) bench->shape.hidden_size = bench->H;
    if (bench->I) bench->shape.intermediate_size = bench->I;
    bench->config = layer_shape_config(&bench->shape);
    bench->layer_info = (moe4_layer_info)MOE4_LAYER_INFO_INIT;
}

static int64_t most_tokens(const struct bench *bench)
{
    int64_t most = 0;
    for (int32_t i = 0; i < bench->tokens.count; ++i)
        if (bench->tokens.values[i] > most) most = bench->tokens.values[i];
    return most;
}

/* How many layers there are to be, and whether they and the largest batch fit: x, y, logits, ids and weights. */
static int shape_plan(struct bench *bench)
{
    const struct gpu *gpu = bench->machine.gpu;
    const double layer = bench_expert_bytes(bench) * bench->config.n_experts;
    int64_t wanted = gpu ? 1 + (int64_t)(ROTATED_BYTES / layer) : 1;
    bench->n_layers = (int32_t)(wanted < BENCH_MAX_LAYERS ? wanted : BENCH_MAX_LAYERS);
    double needed = 1.02 * (layer * bench->n_layers + bench_expert_bytes(bench));
    double available = gpu ? (double)gpu->free_bytes : (double)memory_available("");
    if (needed > available)
        return fail("%s: %d experts need %s of memory, %s are available; --experts makes it smaller", bench->shape.name,
                    bench->config.n_experts, human_bytes(needed).text, human_bytes(available).text);
    const double token =
        4.0 * (double)bench->config.hidden_size + 4.0 * bench->config.n_experts + 16.0 * bench->config.routing.top_k;
    const double batch = (double)most_tokens(bench) * token;
    if (needed + batch > available)
        return fail("%s: %lld tokens need %s of memory beside the weights' %s, %s are available", bench->shape.name,
                    (long long)most_tokens(bench), human_bytes(batch).text, human_bytes(needed).text,
                    human_bytes(available).text);
    return EXIT_OK;
}

static int shape_open(struct bench *bench)
{
    moe4_query query = MOE4_QUERY_INIT;
    bench->config.compute = (moe4_compute)bench->compute;
    query.config = &bench->config;
    query.compute = bench->config.compute;
    query.logits_dtype = MOE4_DTYPE_F32;
    int code = shape_plan(bench);
    if (!code && moe4_supports(bench->machine.context, &query) != MOE4_OK) code = fail_library(bench->machine.context);
    if (!code) code = workload_open(&bench->shape, bench->machine.n_host_threads, &bench->workload);
    moe4_expert_source source = workload_source(&bench->workload);
    if (!code) code = packing_measure(&bench->where, &bench->config, &source, &bench->prepare_gbs);
    for (int32_t i = 0; !code && i < bench->n_layers; ++i)
        if (moe4_layer_create_from(bench->machine.context, &bench->config, &source, &bench->layers[i]) != MOE4_OK)
            code = fail_library(bench->machine.context);
    if (!code)
        code =
            layer_describe(bench->machine.context, bench->layers[0], (moe4_compute)bench->compute, &bench->layer_info);
    if (!code && !bench->machine.gpu)
        code =
            probe_open(bench->machine.n_busy_threads, bench->layer_info.weight_bytes, &bench->weights, &bench->probe);
    return code;
}

static void shape_close(struct bench *bench)
{
    probe_close(bench->probe);
    bench->probe = NULL;
    for (int32_t i = 0; i < BENCH_MAX_LAYERS; ++i) {
        moe4_layer_destroy(bench->layers[i]);
        bench->layers[i] = NULL;
    }
    workload_close(&bench->workload);
}

static int shape_run(struct bench *bench, struct bench_series *series)
{
    int code = shape_open(bench);
    series->shape = bench->shape.name;
    if (!code && !bench->json) bench_print_head(bench);
    for (int32_t i = 0; !code && i < bench->tokens.count; ++i) {
        struct point_summary *point = &series->points[series->n_points];
        code = bench_point(bench, bench->tokens.values[i], point);
        if (code) break;
        ++series->n_points;
        bench_print_point(bench, point);
    }
    if (!code && !bench->json) bench_print_machine(bench);
    shape_close(bench);
    return code;
}

/* ---- Command ----------------------------------------------------------------------------------------------------- */

static int bench_run(struct bench *bench)
{
    const moe4_allocator recorder = memory_recorder(&bench->weights);
    struct bench_series *series;
    if (bench->where.device == MOE4_DEVICE_CPU) bench->where.allocator = &recorder;
    int code = bench->plot_file ? svg_check(bench->plot_file) : EXIT_OK;
    if (!code) code = machine_open(&bench->where, &bench->machine);
    if (code) return code;
    code = allocate(&series, bench->shapes.count, sizeof *series, "the points of each shape");
    for (int32_t i = 0; !code && i < bench->shapes.count; ++i) {
        shape_choose(bench, bench->shapes.values[i]);
        code = shape_run(bench, &series[i]);
    }
    if (!code && bench->plot_file)
        code = bench_plot(bench->plot_file, machine_show(&bench->machine).text, series, bench->shapes.count);
    free(series);
    machine_close(&bench->machine);
    return code;
}

int cmd_bench(int argc, char **argv)
{
    struct bench bench = {.repeat = 21, .tokens = {5, {1, 4, 16, 64, 512}}, .shapes = {1, {0}}};
    const struct option options[] = {
        option_words("--shape", layer_shape_names, &bench.shapes, "the layer, or several: oss20b,dsv3 (oss20b)"),
        option_integers("--tokens", "LIST", &bench.tokens, 1, 1 << 20, "batch sizes (1,4,16,64,512)"),
        option_word("--backend", backend_words, &bench.backend, "where it runs; cuda is GPU 0 (cpu)"),
        option_integer("--threads", "N", &bench.where.n_threads, 1, 1024, "threads (as many as the process may use)"),
        option_word("--isa", isa_words, &bench.where.isa,
                    "the highest instruction set to use (auto: the best there is)"),
        option_word("--activation-dtype", compute_words, &bench.compute, "activations' format in the GEMMs (bf16)"),
        option_word("--routing", load_pattern_names, &bench.pattern, "how tokens spread over experts (uniform)"),
        option_integer("--repeat", "N", &bench.repeat, 1, 10000, "timed calls a point (21)"),
        option_text("--tuning", "FILE", &bench.where.tuning, "what moe4 tune has measured on this machine"),
        option_text("--plot", "FILE", &bench.plot_file, "draw time against tokens, with the floors, as SVG"),
        option_integer("--experts", "E", &bench.n_experts, 1, 32767, "for small tests: other than the shape's"),
        option_integer("--hidden", "H", &bench.H, 32, 1 << 20, "the same"),
        option_integer("--intermediate", "I", &bench.I, 32, 1 << 20, "the same"),
        option_flag("--json", &bench.json, "report one JSON object a line and point"),
    };
    const struct usage usage = {"bench", "Times a layer against the bandwidth and the arithmetic of the machine.",
                                options, sizeof options / sizeof *options};
    int code;
    if (!options_parse(&usage, argc, argv, &code)) return code;
    bench.where.device = (moe4_device)bench.backend;
    return bench_run(&bench);
}
