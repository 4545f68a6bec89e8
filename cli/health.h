/* Whether a checkpoint's weights look healthy: what inspect finds by reading all of them. */
#ifndef MOE4_CLI_HEALTH_H
#define MOE4_CLI_HEALTH_H

#include <jansson.h>

#include "moe4/io.h"

/* Binades that a row's block exponents may span for its weights to be exact in fp8: with normal numbers only, and with
 * subnormal ones too. */
enum fp8_format { FP8_E4M3_NORMAL, FP8_E4M3, FP8_E5M2_NORMAL, FP8_E5M2, N_FP8_FORMATS };

/* Why a tile of 64 rows, 32 gates and their ups where there are gates, keeps its expert off a GPU's fp8 tensor cores.
 */
enum raw_reason { RAW_NAN, RAW_EXTREME, RAW_WIDE, N_RAW_REASONS };

struct value_range {
    double low, high;
    int64_t count, n_odd; /* finite values; NaN and infinities */
};

struct layer_health {
    int32_t layer;
    int64_t weight_bytes;
    int64_t scales[256];             /* blocks with each scale byte */
    int64_t n_blocks, n_zero_blocks; /* whose codes are all zero */
    int64_t n_rows, n_zero_rows, n_wide_rows[N_FP8_FORMATS];
    int64_t n_tiles, n_raw_tiles[N_RAW_REASONS];
    int32_t n_experts, n_zero_experts, n_raw_experts;
    struct value_range router, router_bias, selection_bias, expert_bias;
};

/* The content of an expert, and which one it is. */
struct expert_print {
    uint64_t hash[2];
    int32_t layer, expert, is_zero;
};

struct health {
    struct layer_health *layers;
    int32_t n_layers;
    struct expert_print *prints;
    int64_t n_prints, n_duplicates; /* experts that equal one before them */
};

/* Reads all experts of a layer whose router has been read too, with a progress bar. */
int health_scan(struct health *health, moe4_context *context, moe4_layer_reader *reader, int32_t layer,
                int32_t n_threads);

/* After the last layer: finds duplicates. */
void health_finish(struct health *health);

/* One layer's findings. */
void health_report_layer(const struct layer_health *layer);
json_t *health_layer_json(const struct layer_health *layer);

/* The verdict on all layers. */
void health_report(const struct health *health);
json_t *health_json(const struct health *health);

/* Writes the scale histograms of all layers as an SVG picture. */
int health_plot(const struct health *health, const char *title, const char *path);

void health_release(struct health *health);

#endif
