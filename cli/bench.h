/* moe4 bench in parts: bench_measure.c times one point, bench_report.c prints it, bench_plot.c draws all of them. */
#ifndef MOE4_CLI_BENCH_H
#define MOE4_CLI_BENCH_H

#include "machine.h"
#include "memory.h"
#include "options.h"
#include "workload.h"

enum { BENCH_WARM_UPS = 2, BENCH_MAX_LAYERS = 8 };

struct bench {
    struct machine_choice where;
    int backend, compute, pattern, json;
    const char *plot_file;
    struct integer_list tokens, shapes;
    int64_t repeat, n_experts, H, I;

    struct machine machine;
    struct probe *probe; /* of the CPU */
    struct probe_result best;

    /* The shape at hand.  A GPU takes turns on several layers, so that its cache does not hold what a call needs. */
    struct layer_shape shape;
    moe4_layer_config config;
    struct workload workload;
    moe4_layer *layers[BENCH_MAX_LAYERS];
    int32_t n_layers;
    moe4_layer_info layer_info;
    double prepare_gbs;           /* read and written */
    struct memory_record weights; /* where the layer keeps most of them (CPU) */
};

/* One (shape, tokens) and what was measured. */
struct point {
    int64_t n_tokens;
    double *ms, *n_touched, *floor_ms, *ratio, *gbs; /* one a repetition; n_touched: experts */
    double flops;                                    /* of one call */
    double worst_ratio;                              /* of the check */
};

/* The same in short: medians but for p10 and p90. */
struct point_summary {
    int64_t n_tokens;
    double median, p10, p90; /* ms */
    double n_touched, gbs, gflops, floor_ms, ratio;
    double worst_ratio;
};

/* Checks a point against the oracle, times it and probes the machine right before and right after. */
int bench_point(struct bench *bench, int64_t n_tokens, struct point_summary *summary);

/* MXFP4 weights of one expert of the shape: 4.25 bits each. */
double bench_expert_bytes(const struct bench *bench);

void bench_print_head(const struct bench *bench);
void bench_print_point(const struct bench *bench, const struct point_summary *point);
void bench_print_machine(const struct bench *bench);

/* The points of one shape. */
struct bench_series {
    const char *shape;
    int32_t n_points;
    struct point_summary points[64];
};

/* Draws time against tokens, both logarithmic, with the floors: an SVG file that appears only when complete. */
int bench_plot(const char *path, const char *title, const struct bench_series *series, int32_t n_series);

#endif
