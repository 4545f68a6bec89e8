/* What the GPU packs: the host's bytes, in both arrangements, wherever the weights come from. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h> /* for cmocka.h, as the next two */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "backend.h"
#include "call.h"
#include "cuda/kernels.h"
#include "cuda/pack.h"
#include "cuda/prepared.h"
#include "test_cuda_host.h"

enum { H = 352, I = 96, E = 9, A = 3 }; /* five and a half steps of 64 */

/* ---- Against the host ---- */

struct host_copy {
    uint8_t *tiles, *is_exact, *tile_base; /* the last NULL in the bf16 arrangement */
    float *bias, *unit;
};

static void *download(moe4_context *context, const moe4_layer *layer, const struct layer_part *part)
{
    void *bytes = malloc((size_t)part->n_bytes);
    assert_int_equal(layer->backend->download_part(context, layer, bytes, *part->slot, (size_t)part->n_bytes), MOE4_OK);
    return bytes;
}

static uint32_t four_codes(const moe4_matrix *from, const struct cuda_matrix *matrix, int64_t row, int64_t k)
{
    const uint8_t *codes = from->codes + row * (matrix->K / 2) + k / 2;
    return row < 0 || k >= matrix->K ? 0 : codes[0] | (uint32_t)codes[1] << 8;
}

/* The words of a tile in the fp8 arrangement, over those of the other one. */
static void put_fp8_words(const moe4_matrix *from, const struct cuda_matrix *matrix, int64_t t, uint8_t *tile)
{
    for (int32_t i = 0; i < matrix->n_steps * 512; i++) {
        const int32_t step = i / 512, thread = i % 512 / 4, j = i % 4;
        const int64_t row = cuda_source_row(&matrix->order, t, fp8_word_row(thread, j));
        const int64_t k = step * CUDA_STEP_K + fp8_word_k(thread, j);
        const uint32_t word = fp8_join(four_codes(from, matrix, row, k) | four_codes(from, matrix, row, k + 16) << 16);
        memcpy(tile + (size_t)step * CUDA_STEP_BYTES + CUDA_STEP_SCALES + (size_t)(i % 512) * 4, &word, sizeof word);
    }
}

/* The least and largest scale of a tile's blocks that are not all zeros. */
static struct scale_range tile_range(const moe4_matrix *from, const struct cuda_matrix *matrix, int64_t t)
{
    struct scale_range range = {SCALE_NAN, 0, 0};
    for (int32_t r = 0; r < CUDA_TILE_ROWS; r++) {
        const int64_t row = cuda_source_row(&matrix->order, t, r), n_blocks = matrix->K / 32;
        for (int64_t b = row * n_blocks; row >= 0 && b < (row + 1) * n_blocks; b++) {
            int is_zero = from->scales[b] != SCALE_NAN;
            for (int i = 0; i < BLOCK_BYTES; i++) is_zero &= (from->codes[b * BLOCK_BYTES + i] & 0x77) == 0;
            if (!is_zero && from->scales[b] < range.least) range.least = from->scales[b];
            if (!is_zero && from->scales[b] > range.most) range.most = from->scales[b];
        }
    }
    return range;
}

static int is_wide(const moe4_matrix *from, const struct cuda_matrix *matrix)
{
    for (int32_t t = 0; t < matrix->n_tiles; t++) {
        const struct scale_range range = tile_range(from, matrix, t);
        if (!fp8_holds(range.least, range.most)) return 1;
    }
    return 0;
}

/* Matrix m of all experts, as the host packs it, against what the device has. */
static void check_matrix(const moe4_layer *layer, const moe4_expert *experts, int m, const struct host_copy *got)
{
    const struct cuda_prepared *prepared = layer->prepared;
    const struct cuda_matrix *matrices[2] = {&prepared->gate_up, &prepared->down}, *matrix = matrices[m];
    const size_t tile_bytes = (size_t)matrix->n_steps * CUDA_STEP_BYTES;
    uint8_t *tile = malloc(tile_bytes);
    for (int32_t l = 0; l < layer->L; l++) {
        const moe4_matrix *both[2] = {&experts[l].gate_up, &experts[l].down}, *from = both[m];
        int32_t bases[2], is_exact = 0;
        for (int i = 0; i < 2; i++) {
            bases[i] = cuda_scale_base(both[i], &matrices[i]->order, matrices[i]->K);
            is_exact |= bases[i] < 0 || (got->tile_base && is_wide(both[i], matrices[i]));
        }
        assert_int_equal(got->is_exact[l], is_exact);
        const int32_t base = is_exact ? CUDA_RAW_BASE : bases[m];
        assert_true(got->unit[l] == (is_exact ? 1.0f : ldexpf(1.0f, base)));
        for (int32_t t = 0; t < matrix->n_tiles; t++) {
            const int64_t index = (int64_t)l * matrix->n_tiles + t;
            float bias[CUDA_TILE_ROWS];
            cuda_pack_tile(from, matrix->K, &matrix->order, t, base, tile, bias);
            if (got->tile_base && !is_exact) put_fp8_words(from, matrix, t, tile);
            assert_memory_equal(tile, got->tiles + (size_t)index * tile_bytes, tile_bytes);
            assert_memory_equal(bias, got->bias + index * CUDA_TILE_ROWS, sizeof bias);
            if (!got->tile_base) continue;
            const struct scale_range range = tile_range(from, matrix, t);
            const int32_t least = range.most < range.least ? CUDA_FP8_MOST : range.least;
            assert_int_equal(got->tile_base[index], stored_scale((uint8_t)least, 0, base));
        }
    }
    free(tile);
}

static void check_layer(moe4_context *context, const moe4_layer *layer, const moe4_expert *experts)
{
    const int is_fp8 = layer->compute == MOE4_COMPUTE_FP8;
    struct layer_part parts[MAX_PARTS];
    int32_t n_parts;
    assert_int_equal(layer->backend->list_parts(context, layer, parts, &n_parts), MOE4_OK);
    assert_int_equal(n_parts, is_fp8 ? 9 : 7);
    for (int m = 0; m < 2; m++) {
        struct host_copy got = {.tiles = download(context, layer, &parts[m]),
                                .bias = download(context, layer, &parts[2 + m]),
                                .unit = download(context, layer, &parts[4 + m]),
                                .is_exact = download(context, layer, &parts[6]),
                                .tile_base = is_fp8 ? download(context, layer, &parts[7 + m]) : NULL};
        assert_int_equal(got.is_exact[4], 1);
        assert_int_equal(got.is_exact[5], 0);
        assert_int_equal(got.is_exact[6], is_fp8);
        check_matrix(layer, experts, m, &got);
        free(got.tiles);
        free(got.bias);
        free(got.unit);
        free(got.is_exact);
        free(got.tile_base);
    }
}

static void check_packed(moe4_gate_up order, moe4_activation activation, int64_t padding, moe4_compute compute)
{
    struct buffers buffers = {BUFFERS_PLAIN, NULL};
    moe4_layer_config config = layer_config(H, I, E, A);
    config.gate_up = order;
    config.activation = activation;
    config.compute = compute;
    config.alpha = config.beta = config.limit = (moe4_param)MOE4_PARAM_INIT;
    if (padding) config.stored_intermediate_size = I + padding;
    struct weight_plan weights = {.biases = BIAS_GATE_UP, .bias_dtype = MOE4_DTYPE_BF16, .seed = 8};
    moe4_expert *experts = weights_create(&buffers, &config, &weights);
    memset((uint8_t *)experts[2].down.scales, 140, (size_t)H * I / 32); /* a base of its own */
    ((uint8_t *)experts[4].gate_up.scales)[7] = 255;                    /* the exact kernel's */
    memset((uint8_t *)experts[5].gate_up.codes, 0x80, 16);              /* minus zeros: as good as any */
    ((uint8_t *)experts[5].gate_up.scales)[0] = 254;
    ((uint8_t *)experts[6].down.codes)[0] = 0x11;
    ((uint8_t *)experts[6].down.scales)[0] = 40; /* wide for fp8 */
    moe4_context *context = context_open(gpu_isa(), 1);
    moe4_layer *layer = layer_open(context, &config, experts);
    check_layer(context, layer, experts);
    moe4_layer_destroy(layer);
    moe4_context_destroy(context);
    buffers_release(&buffers);
}

static void test_packed_bytes(void **state)
{
    (void)state;
    for (int compute = MOE4_COMPUTE_BF16; compute < n_computes(); compute++) {
        if (compute == MOE4_COMPUTE_MXFP8) continue; /* the same bytes as bf16 */
        check_packed(MOE4_GATE_UP_INTERLEAVED, MOE4_ACTIVATION_SILU, 0, (moe4_compute)compute);
        check_packed(MOE4_GATE_UP_GATE_FIRST, MOE4_ACTIVATION_SILU, 32, (moe4_compute)compute);
        check_packed(MOE4_GATE_UP_UP_FIRST, MOE4_ACTIVATION_SILU, 8, (moe4_compute)compute);
        check_packed(MOE4_GATE_UP_NONE, MOE4_ACTIVATION_RELU2, 0, (moe4_compute)compute);
    }
}

/* ---- Where weights come from ---- */

/* The same matrix in memory that the copy engine cannot read, rows apart. */
static moe4_matrix spread_matrix(const moe4_matrix *from, int64_t rows, int64_t K)
{
    const size_t code_bytes = (size_t)K / 2, scale_bytes = (size_t)K / 32, gap = 24;
    uint8_t *codes = malloc((size_t)rows * (code_bytes + gap)), *scales = malloc((size_t)rows * (scale_bytes + gap));
    for (size_t row = 0; row < (size_t)rows; row++) {
        memcpy(codes + row * (code_bytes + gap), from->codes + row * code_bytes, code_bytes);
        memcpy(scales + row * (scale_bytes + gap), from->scales + row * scale_bytes, scale_bytes);
    }
    moe4_matrix matrix = *from;
    matrix.codes = codes;
    matrix.scales = scales;
    matrix.codes_row_bytes = (int64_t)(code_bytes + gap);
    matrix.scales_row_bytes = (int64_t)(scale_bytes + gap);
    return matrix;
}

static void free_matrix(const moe4_matrix *matrix)
{
    free((void *)matrix->codes);
    free((void *)matrix->scales);
}

static void expect_equal_parts(moe4_context *context, const moe4_layer *first, const moe4_layer *second)
{
    struct layer_part parts[2][MAX_PARTS];
    int32_t n_parts;
    assert_int_equal(first->backend->list_parts(context, first, parts[0], &n_parts), MOE4_OK);
    assert_int_equal(second->backend->list_parts(context, second, parts[1], &n_parts), MOE4_OK);
    for (int32_t i = 0; i < n_parts; i++) {
        void *a = download(context, first, &parts[0][i]), *b = download(context, second, &parts[1][i]);
        assert_memory_equal(a, b, (size_t)parts[0][i].n_bytes);
        free(a);
        free(b);
    }
}

/* Experts that are copied by whatever thread asks, up to one that fails. */
struct experts {
    const moe4_expert *experts;
    int32_t n_good;
};

static moe4_status describe(void *user, int32_t l, moe4_expert *expert)
{
    static const uint8_t something;
    const struct experts *self = user;
    *expert = self->experts[l];
    expert->gate_up.codes = expert->gate_up.scales = expert->down.codes = expert->down.scales = &something;
    return MOE4_OK;
}

static moe4_status copy(void *user, int32_t l, moe4_part part, int64_t first, int64_t n_bytes, void *to)
{
    const struct experts *self = user;
    const moe4_expert *expert = &self->experts[l];
    const void *parts[] = {
        [MOE4_PART_GATE_UP_CODES] = expert->gate_up.codes, [MOE4_PART_GATE_UP_SCALES] = expert->gate_up.scales,
        [MOE4_PART_GATE_UP_BIAS] = expert->gate_up.bias,   [MOE4_PART_DOWN_CODES] = expert->down.codes,
        [MOE4_PART_DOWN_SCALES] = expert->down.scales,     [MOE4_PART_DOWN_BIAS] = expert->down.bias};
    if (l >= self->n_good) return MOE4_EIO;
    memcpy(to, (const char *)parts[part] + first, (size_t)n_bytes);
    return MOE4_OK;
}

static moe4_status no_read(void *user, int32_t l, moe4_expert *expert)
{
    (void)user;
    (void)l;
    (void)expert;
    return MOE4_EINVAL;
}

static void check_copies(moe4_context *context, const moe4_layer_config *config, const moe4_expert *experts,
                         const moe4_layer *expected)
{
    struct experts user = {experts, expected->L};
    const moe4_expert_source source = {no_read, &user, describe, copy};
    moe4_layer *layer;
    assert_int_equal(moe4_layer_create_from(context, config, &source, &layer), MOE4_OK);
    expect_equal_parts(context, expected, layer);
    moe4_layer_destroy(layer);
    user.n_good = 1;
    assert_int_equal(moe4_layer_create_from(context, config, &source, &layer), MOE4_EIO);
    assert_string_equal(moe4_context_message(context), "expert 1: its source failed");
}

/* Weights of several pieces of the ring, memory of both kinds and a source that copies: equal bytes. */
static void test_sources(void **state)
{
    (void)state;
    enum { LARGE_H = 2880, LARGE_I = 3104, FEW = 4 };
    struct buffers buffers = {BUFFERS_PLAIN, NULL};
    moe4_layer_config config = layer_config(LARGE_H, LARGE_I, FEW, 1);
    struct weight_plan weights = {.biases = BIAS_BOTH, .seed = 9};
    moe4_expert *pinned = weights_create(&buffers, &config, &weights), pageable[FEW];
    for (int l = 0; l < FEW; l++)
        pageable[l] = (moe4_expert){spread_matrix(&pinned[l].gate_up, 2 * LARGE_I, LARGE_H),
                                    spread_matrix(&pinned[l].down, LARGE_H, LARGE_I)};
    moe4_context *context = context_open(MOE4_ISA_AUTO, 1);
    moe4_layer *first = layer_open(context, &config, pinned), *second = layer_open(context, &config, pageable);
    expect_equal_parts(context, first, second);
    check_copies(context, &config, pinned, first);
    moe4_layer_destroy(second);
    moe4_layer_destroy(first);
    moe4_context_destroy(context);
    for (int l = 0; l < FEW; l++) {
        free_matrix(&pageable[l].gate_up);
        free_matrix(&pageable[l].down);
    }
    buffers_release(&buffers);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_packed_bytes),
        cmocka_unit_test(test_sources),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
