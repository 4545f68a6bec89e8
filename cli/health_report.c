/* What inspect says of the health of a checkpoint's weights. */
#include <string.h>

#include "health.h"
#include "report.h"

enum { NAN_SCALE = 0xFF, MOST_NAMED = 8 };

static const char *const format_keys[N_FP8_FORMATS] = {"e4m3_normal", "e4m3", "e5m2_normal", "e5m2"};
static const char *const reason_keys[N_RAW_REASONS] = {"nan", "extreme", "wide"};

/* The scale byte below which `share` of the blocks that are not NaN lie. */
static int scale_at(const struct layer_health *layer, double share)
{
    int64_t total = layer->n_blocks - layer->scales[NAN_SCALE], sum = 0;
    for (int byte = 0; byte < NAN_SCALE; ++byte) {
        sum += layer->scales[byte];
        if (sum > 0 && (double)sum >= share * (double)total) return byte;
    }
    return NAN_SCALE;
}

static int64_t odd_values(const struct layer_health *layer)
{
    return layer->router.n_odd + layer->router_bias.n_odd + layer->selection_bias.n_odd + layer->expert_bias.n_odd;
}

static double wide_share(const struct layer_health *layer, int format)
{
    return layer->n_rows ? (double)layer->n_wide_rows[format] / (double)layer->n_rows : 0;
}

static int64_t raw_tiles(const struct layer_health *layer)
{
    int64_t sum = 0;
    for (int r = 0; r < N_RAW_REASONS; ++r) sum += layer->n_raw_tiles[r];
    return sum;
}

/* ---- Text -------------------------------------------------------------------------------------------------------- */

/* Shares of blocks from the first to the last byte in use, as eight heights. */
static void report_histogram(const struct layer_health *layer)
{
    static const char *const heights[] = {" ",      "\u2581", "\u2582", "\u2583", "\u2584",
                                          "\u2585", "\u2586", "\u2587", "\u2588"};
    int first = 1, last = 254;
    int64_t most = 1;
    char text[256 * 3 + 1] = "";
    while (first < last && !layer->scales[first]) ++first;
    while (last > first && !layer->scales[last]) --last;
    for (int byte = first; byte <= last; ++byte) most = layer->scales[byte] > most ? layer->scales[byte] : most;
    for (int byte = first; byte <= last; ++byte) strcat(text, heights[(layer->scales[byte] * 8 + most - 1) / most]);
    report_field("scales", "2^%d |%s| 2^%d, median 2^%d", first - 127, text, last - 127, scale_at(layer, 0.5) - 127);
}

static void report_range(const char *label, const struct value_range *range)
{
    if (range->count) report_field(label, "%.4g to %.4g", range->low, range->high);
    if (range->n_odd) report_field(label, "%s NaN or infinite", human_plural(range->n_odd, "value").text);
}

void health_report_layer(const struct layer_health *layer)
{
    report_histogram(layer);
    if (layer->n_zero_blocks)
        report_field("zero blocks", "%lld of %lld", (long long)layer->n_zero_blocks, (long long)layer->n_blocks);
    report_field("fp8", "too wide for e4m3: %.3g%% of rows (%.3g%% without subnormals); for e5m2: %.3g%% (%.3g%%)",
                 100 * wide_share(layer, FP8_E4M3), 100 * wide_share(layer, FP8_E4M3_NORMAL),
                 100 * wide_share(layer, FP8_E5M2), 100 * wide_share(layer, FP8_E5M2_NORMAL));
    if (layer->n_raw_experts)
        report_field("fp8 on GPUs",
                     "%s in plain fp32, for %lld of %lld tiles: %lld too wide, %lld of extreme scales, %lld NaN",
                     human_plural(layer->n_raw_experts, "expert").text, (long long)raw_tiles(layer),
                     (long long)layer->n_tiles, (long long)layer->n_raw_tiles[RAW_WIDE],
                     (long long)layer->n_raw_tiles[RAW_EXTREME], (long long)layer->n_raw_tiles[RAW_NAN]);
    report_range("router bias", &layer->router_bias);
    report_range("selection bias", &layer->selection_bias);
    if (layer->scales[NAN_SCALE])
        report_field("UNHEALTHY", "%s (0xFF)", human_plural(layer->scales[NAN_SCALE], "NaN scale").text);
    if (layer->n_zero_experts)
        report_field("UNHEALTHY", "%s of zeros only", human_plural(layer->n_zero_experts, "expert").text);
    if (odd_values(layer))
        report_field("UNHEALTHY", "%s NaN or infinite", human_plural(odd_values(layer), "bias or router value").text);
}

struct verdict {
    int64_t n_nan, n_zero, n_odd, n_duplicates;
    int healthy;
};

static struct verdict verdict_of(const struct health *health)
{
    struct verdict verdict = {.n_duplicates = health->n_duplicates};
    for (int32_t i = 0; i < health->n_layers; ++i) {
        verdict.n_nan += health->layers[i].scales[NAN_SCALE];
        verdict.n_zero += health->layers[i].n_zero_experts;
        verdict.n_odd += odd_values(&health->layers[i]);
    }
    verdict.healthy = !verdict.n_nan && !verdict.n_zero && !verdict.n_odd && !verdict.n_duplicates;
    return verdict;
}

static int is_duplicate(const struct health *health, int64_t i)
{
    const struct expert_print *print = &health->prints[i];
    return i > 0 && !print->is_zero && !memcmp(print->hash, print[-1].hash, sizeof print->hash);
}

void health_report(const struct health *health)
{
    struct verdict verdict = verdict_of(health);
    int n_named = 0;
    for (int64_t i = 1; i < health->n_prints && n_named < MOST_NAMED; ++i)
        if (is_duplicate(health, i) && ++n_named)
            report_field("duplicate", "layer %d expert %d is layer %d expert %d", health->prints[i].layer,
                         health->prints[i].expert, health->prints[i - 1].layer, health->prints[i - 1].expert);
    if (verdict.healthy)
        report_field("health", "healthy");
    else
        report_field("health", "UNHEALTHY: NaN scales %lld, zero experts %lld, duplicate experts %lld, odd values %lld",
                     (long long)verdict.n_nan, (long long)verdict.n_zero, (long long)verdict.n_duplicates,
                     (long long)verdict.n_odd);
}

/* ---- JSON -------------------------------------------------------------------------------------------------------- */

static void put_range(json_t *object, const char *key, const struct value_range *range)
{
    if (range->count) json_object_set_new(object, key, json_pack("[f, f]", range->low, range->high));
}

json_t *health_layer_json(const struct layer_health *layer)
{
    json_t *object = json_object(), *scales = json_object(), *wide = json_object(), *raw = json_object();
    for (int byte = 0; byte < 256; ++byte) {
        char key[12];
        snprintf(key, sizeof key, "%d", byte);
        if (layer->scales[byte]) json_put_integer(scales, key, layer->scales[byte]);
    }
    for (int f = 0; f < N_FP8_FORMATS; ++f) json_put_real(wide, format_keys[f], wide_share(layer, f));
    json_object_set_new(object, "scales", scales);
    json_object_set_new(object, "wide_row_share", wide);
    json_put_integer(raw, "tiles", layer->n_tiles);
    for (int r = 0; r < N_RAW_REASONS; ++r) json_put_integer(raw, reason_keys[r], layer->n_raw_tiles[r]);
    json_put_integer(raw, "experts", layer->n_raw_experts);
    json_object_set_new(object, "fp8_raw", raw);
    json_put_integer(object, "weight_bytes", layer->weight_bytes);
    json_put_integer(object, "blocks", layer->n_blocks);
    json_put_integer(object, "zero_blocks", layer->n_zero_blocks);
    json_put_integer(object, "rows", layer->n_rows);
    json_put_integer(object, "zero_rows", layer->n_zero_rows);
    json_put_integer(object, "zero_experts", layer->n_zero_experts);
    json_put_integer(object, "nan_scales", layer->scales[NAN_SCALE]);
    json_put_integer(object, "odd_values", odd_values(layer));
    put_range(object, "router_range", &layer->router);
    put_range(object, "router_bias_range", &layer->router_bias);
    put_range(object, "selection_bias_range", &layer->selection_bias);
    put_range(object, "expert_bias_range", &layer->expert_bias);
    return object;
}

json_t *health_json(const struct health *health)
{
    struct verdict verdict = verdict_of(health);
    json_t *object = json_object(), *duplicates = json_array();
    json_put_truth(object, "healthy", verdict.healthy);
    json_put_integer(object, "nan_scales", verdict.n_nan);
    json_put_integer(object, "zero_experts", verdict.n_zero);
    json_put_integer(object, "duplicate_experts", verdict.n_duplicates);
    json_put_integer(object, "odd_values", verdict.n_odd);
    for (int64_t i = 1; i < health->n_prints; ++i)
        if (is_duplicate(health, i))
            json_array_append_new(duplicates, json_pack("[[i, i], [i, i]]", health->prints[i - 1].layer,
                                                        health->prints[i - 1].expert, health->prints[i].layer,
                                                        health->prints[i].expert));
    json_object_set_new(object, "duplicates", duplicates);
    return object;
}
