#include "health.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "command.h"
#include "memory.h"
#include "message.h"
#include "parallel.h"
#include "progress.h"
#include "ref.h"

enum { BLOCK = 32, CODES = 16, NAN_SCALE = 0xFF };

/* What e5m2 holds of a tile's scales on a GPU (src/cuda/layout.h): 27 binades between bytes that leave sums room; and
 * of an expert's matrix 127. */
enum { TILE_ROWS = 64, TILE_SPAN = 26, LEAST_SCALE = 40, MOST_SCALE = 180, MATRIX_SPAN = 126 };

static const int32_t widest[N_FP8_FORMATS] = {11, 14, 26, 28};

/* ---- Rows -------------------------------------------------------------------------------------------------------- */

/* Whether a block's 32 codes are all zero, of either sign. */
static int block_is_zero(const uint8_t *codes)
{
    uint64_t halves[2];
    memcpy(halves, codes, sizeof halves);
    return !((halves[0] | halves[1]) & 0x7777777777777777u);
}

/* Scale bytes; low > high: there are none. */
struct scale_span {
    int low, high, has_nan;
};

static const struct scale_span no_span = {256, -1, 0};

static void span_add(struct scale_span *sum, const struct scale_span *span)
{
    sum->low = span->low < sum->low ? span->low : sum->low;
    sum->high = span->high > sum->high ? span->high : sum->high;
    sum->has_nan |= span->has_nan;
}

/* Blocks of zeros do not count in the span: they have no exponent. */
static struct scale_span row_scan(const uint8_t *codes, const uint8_t *scales, int64_t n_blocks,
                                  struct layer_health *sum)
{
    int low = 256, high = -1, has_nan = 0;
    for (int64_t b = 0; b < n_blocks; ++b) {
        ++sum->scales[scales[b]];
        has_nan |= scales[b] == NAN_SCALE;
        if (block_is_zero(codes + b * CODES)) {
            ++sum->n_zero_blocks;
        } else if (scales[b] != NAN_SCALE) {
            low = scales[b] < low ? scales[b] : low;
            high = scales[b] > high ? scales[b] : high;
        }
    }
    sum->n_blocks += n_blocks;
    ++sum->n_rows;
    sum->n_zero_rows += high < 0;
    for (int f = 0; f < N_FP8_FORMATS; ++f) sum->n_wide_rows[f] += high >= 0 && high - low > widest[f];
    return (struct scale_span){low, high, has_nan};
}

struct scan_task {
    const moe4_matrix *matrix;
    int64_t K, rows, part_rows;
    struct layer_health *parts;
    struct scale_span *spans; /* of every row */
};

static void scan_run(void *user, int64_t first, int64_t end)
{
    const struct scan_task *task = user;
    const moe4_matrix *matrix = task->matrix;
    int64_t codes_row = matrix->codes_row_bytes ? matrix->codes_row_bytes : task->K / 2;
    int64_t scales_row = matrix->scales_row_bytes ? matrix->scales_row_bytes : task->K / BLOCK;
    for (int64_t part = first; part < end; ++part) {
        int64_t last = (part + 1) * task->part_rows;
        for (int64_t r = part * task->part_rows; r < last && r < task->rows; ++r)
            task->spans[r] = row_scan(matrix->codes + r * codes_row, matrix->scales + r * scales_row, task->K / BLOCK,
                                      &task->parts[part]);
    }
}

static void health_add(struct layer_health *sum, const struct layer_health *part)
{
    for (int i = 0; i < 256; ++i) sum->scales[i] += part->scales[i];
    for (int f = 0; f < N_FP8_FORMATS; ++f) sum->n_wide_rows[f] += part->n_wide_rows[f];
    sum->n_blocks += part->n_blocks;
    sum->n_zero_blocks += part->n_zero_blocks;
    sum->n_rows += part->n_rows;
    sum->n_zero_rows += part->n_zero_rows;
}

/* Counts the tiles that e5m2 does not hold; whether there are any, or the matrix spans too much. */
static int tiles_scan(struct layer_health *sum, const struct scale_span *spans, int64_t rows, moe4_gate_up gate_up)
{
    const int has_halves = gate_up == MOE4_GATE_UP_GATE_FIRST || gate_up == MOE4_GATE_UP_UP_FIRST;
    const int64_t end = has_halves ? rows / 2 : rows, step = has_halves ? TILE_ROWS / 2 : TILE_ROWS;
    struct scale_span all = no_span;
    int is_raw = 0;
    for (int64_t first = 0; first < end; first += step, ++sum->n_tiles) {
        struct scale_span tile = no_span;
        for (int64_t r = first; r < first + step && r < end; ++r) {
            span_add(&tile, &spans[r]);
            if (has_halves) span_add(&tile, &spans[end + r]);
        }
        const int is_extreme = tile.high >= 0 && (tile.low < LEAST_SCALE || tile.high > MOST_SCALE);
        const int is_wide = tile.high - tile.low > TILE_SPAN;
        if (tile.has_nan || is_extreme || is_wide)
            ++sum->n_raw_tiles[tile.has_nan ? RAW_NAN : is_extreme ? RAW_EXTREME : RAW_WIDE], is_raw = 1;
        span_add(&all, &tile);
    }
    return is_raw || all.high - all.low > MATRIX_SPAN;
}

static int matrix_scan(struct layer_health *sum, const moe4_matrix *matrix, int64_t rows, int64_t K,
                       moe4_gate_up gate_up, int32_t n_threads, int *is_raw)
{
    struct scan_task task = {.matrix = matrix, .K = K, .rows = rows, .part_rows = (rows + n_threads - 1) / n_threads};
    int code = allocate(&task.parts, n_threads, sizeof *task.parts, "histograms");
    if (!code) code = allocate(&task.spans, rows, sizeof *task.spans, "rows' scales");
    if (!code) {
        parallel_for(n_threads, n_threads, scan_run, &task);
        for (int32_t t = 0; t < n_threads; ++t) health_add(sum, &task.parts[t]);
        *is_raw |= tiles_scan(sum, task.spans, rows, gate_up);
    }
    free(task.spans);
    free(task.parts);
    return code;
}

/* ---- Values ------------------------------------------------------------------------------------------------------ */

static void range_add(struct value_range *range, const void *values, moe4_dtype dtype, int64_t count)
{
    for (int64_t i = 0; values && i < count; ++i) {
        double value = ref_load(values, dtype, i);
        if (!isfinite(value)) {
            ++range->n_odd;
            continue;
        }
        if (!range->count || value < range->low) range->low = value;
        if (!range->count || value > range->high) range->high = value;
        ++range->count;
    }
}

static void router_scan(struct layer_health *layer, const moe4_layer_config *config)
{
    const moe4_router *router = &config->router;
    int64_t E = config->n_experts, width = router->hidden_size ? router->hidden_size : config->hidden_size;
    range_add(&layer->router, router->weight, router->weight_dtype, E * width);
    range_add(&layer->router_bias, router->bias, router->bias_dtype, E);
    range_add(&layer->selection_bias, config->routing.correction_bias, config->routing.correction_bias_dtype, E);
}

/* ---- Layers ------------------------------------------------------------------------------------------------------ */

static void matrix_hash(XXH3_state_t *hash, const moe4_matrix *matrix, int64_t rows, int64_t K)
{
    int64_t codes_row = matrix->codes_row_bytes ? matrix->codes_row_bytes : K / 2;
    int64_t scales_row = matrix->scales_row_bytes ? matrix->scales_row_bytes : K / BLOCK;
    for (int64_t r = 0; r < rows; ++r) {
        XXH3_128bits_update(hash, matrix->codes + r * codes_row, (size_t)(K / 2));
        XXH3_128bits_update(hash, matrix->scales + r * scales_row, (size_t)(K / BLOCK));
    }
}

static int expert_scan(struct health *health, struct layer_health *layer, const moe4_layer_config *config,
                       const moe4_expert *expert, int32_t number, int32_t n_threads)
{
    int64_t H = config->hidden_size, I = config->intermediate_size;
    int64_t rows = config->gate_up == MOE4_GATE_UP_NONE ? I : 2 * I;
    int64_t zeros = layer->n_zero_blocks, blocks = layer->n_blocks;
    int is_raw = 0, code = matrix_scan(layer, &expert->gate_up, rows, H, config->gate_up, n_threads, &is_raw);
    if (!code) code = matrix_scan(layer, &expert->down, H, I, MOE4_GATE_UP_NONE, n_threads, &is_raw);
    if (code) return code;
    layer->n_raw_experts += is_raw;
    XXH3_state_t hash;
    XXH3_128bits_reset(&hash);
    matrix_hash(&hash, &expert->gate_up, rows, H);
    matrix_hash(&hash, &expert->down, H, I);
    XXH128_hash_t digest = XXH3_128bits_digest(&hash);
    range_add(&layer->expert_bias, expert->gate_up.bias, expert->gate_up.bias_dtype, rows);
    range_add(&layer->expert_bias, expert->down.bias, expert->down.bias_dtype, H);
    int is_zero = layer->n_zero_blocks - zeros == layer->n_blocks - blocks;
    layer->n_zero_experts += is_zero;
    health->prints[health->n_prints++] =
        (struct expert_print){{digest.high64, digest.low64}, layer->layer, number, is_zero};
    return EXIT_OK;
}

/* Room for another layer of E experts. */
static int health_grow(struct health *health, int32_t E)
{
    struct layer_health *layers = reallocarray(health->layers, (size_t)health->n_layers + 1, sizeof *layers);
    if (layers) health->layers = layers;
    struct expert_print *prints = reallocarray(health->prints, (size_t)health->n_prints + (size_t)E, sizeof *prints);
    if (prints) health->prints = prints;
    return layers && prints ? EXIT_OK : fail("out of memory: findings of %d experts", E);
}

int health_scan(struct health *health, moe4_context *context, moe4_layer_reader *reader, int32_t number,
                int32_t n_threads)
{
    const moe4_layer_config *config = moe4_layer_reader_config(reader);
    int32_t E = config->n_experts;
    int code = health_grow(health, E);
    if (code) return code;
    struct layer_health *layer = &health->layers[health->n_layers];
    *layer = (struct layer_health){.layer = number, .n_experts = E};
    router_scan(layer, config);
    struct progress bar = progress_begin("reading");
    for (int32_t e = 0; !code && e < E; ++e) {
        moe4_expert expert;
        if (moe4_layer_reader_read(context, reader, e, &expert) != MOE4_OK)
            code = fail_library(context);
        else
            code = expert_scan(health, layer, config, &expert, e, n_threads);
        progress_update(&bar, e + 1, E);
    }
    progress_end(&bar);
    layer->weight_bytes = layer->n_blocks * (CODES + 1);
    if (!code) ++health->n_layers;
    return code;
}

static int print_compare(const void *a, const void *b)
{
    const struct expert_print *first = a, *second = b;
    int order = memcmp(first->hash, second->hash, sizeof first->hash);
    if (order) return order;
    if (first->layer != second->layer) return first->layer < second->layer ? -1 : 1;
    return first->expert < second->expert ? -1 : first->expert > second->expert;
}

/* Sorted, duplicates are neighbours; experts of zeros are found as such already. */
void health_finish(struct health *health)
{
    if (!health->n_prints) return;
    qsort(health->prints, (size_t)health->n_prints, sizeof *health->prints, print_compare);
    for (int64_t i = 1; i < health->n_prints; ++i) {
        const struct expert_print *print = &health->prints[i];
        health->n_duplicates += !print->is_zero && !memcmp(print->hash, print[-1].hash, sizeof print->hash);
    }
}

void health_release(struct health *health)
{
    free(health->layers);
    free(health->prints);
    *health = (struct health){0};
}
