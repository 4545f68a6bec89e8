/* How `moe4 quantize` reads and encodes matrices: every f16, rows and columns of every type, and that threads change
 * neither bytes nor the report. */
#include "io_helpers.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "encode.h"
#include "ref.h"

enum { ROWS = 37, K = 96, N_TYPES = 3 };

static const struct {
    const char *word;
    moe4_dtype dtype;
    size_t bytes;
} types[N_TYPES] = {{"BF16", MOE4_DTYPE_BF16, 2}, {"F16", MOE4_DTYPE_F16, 2}, {"F32", MOE4_DTYPE_F32, 4}};

/* Opens a file with one tensor [rows, columns] of these bytes. */
static moe4_tensors *open_matrix(struct fixture *fixture, int type, int rows, int columns, const void *values)
{
    char header[128];
    size_t n_header, n_values = (size_t)rows * (size_t)columns * types[type].bytes;
    moe4_tensors *tensors;
    snprintf(header, sizeof header, "{\"t\":{\"dtype\":\"%s\",\"shape\":[%d,%d],\"data_offsets\":[0,%zu]}}",
             types[type].word, rows, columns, n_values);
    unsigned char *file = make_file(header, n_values, &n_header);
    memcpy(file + n_header - n_values, values, n_values);
    const char *path = scratch_write(&fixture->scratch, "x.safetensors", file, n_header);
    free(file);
    assert_int_equal(moe4_tensors_open(&fixture->test.context, path, &tensors), MOE4_OK);
    return tensors;
}

static double slab_value(const struct slab *slab, int64_t i)
{
    return ref_load(slab->data, slab->is_bf16 ? MOE4_DTYPE_BF16 : MOE4_DTYPE_F32, i);
}

static void test_every_f16(void **state)
{
    enum { N = 1 << 16 };
    static uint16_t values[N];
    struct fixture *fixture = *state;
    struct slab slab = {0};
    for (int i = 0; i < N; i++) values[i] = (uint16_t)i;
    moe4_tensors *tensors = open_matrix(fixture, 1, N / 32, 32, values);
    const struct dense_matrix matrix = {tensors, moe4_tensors_get(tensors, 0), 0, N / 32, 32, 0};
    assert_int_equal(slab_read(&fixture->test.context, &matrix, 0, N / 32, &slab), 0);
    for (int i = 0; i < N; i++) {
        double wanted = ref_f16((uint16_t)i), got = slab_value(&slab, i);
        if (isnan(wanted) ? !isnan(got) : got != wanted || signbit(got) != signbit(wanted))
            fail_msg("f16 %04x is %g, not %g", (unsigned)i, got, wanted);
    }
    slab_release(&slab);
    moe4_tensors_close(tensors);
}

/* Element (row, k) is a number of its own in every type. */
static void fill(int type, int is_transposed, void *values)
{
    for (int row = 0; row < ROWS; row++)
        for (int k = 0; k < K; k++) {
            const int at = is_transposed ? k * ROWS + row : row * K + k;
            float value = (float)(row * 7 % 32 * 8 + k % 8) * (k % 2 ? -0.125f : 0.125f);
            uint16_t half = type ? (uint16_t)ref_to_f16((double)value) : ref_to_bf16((double)value);
            if (type == 2)
                memcpy((char *)values + 4 * at, &value, 4);
            else
                memcpy((char *)values + 2 * at, &half, 2);
        }
}

static void test_rows_and_columns(void **state)
{
    static char values[ROWS * K * 4];
    struct fixture *fixture = *state;
    for (int i = 0; i < 2 * N_TYPES; i++) {
        struct slab slab = {0};
        const int is_transposed = i % 2, first = is_transposed ? 0 : 5, rows = is_transposed ? ROWS : 9;
        fill(i / 2, is_transposed, values);
        moe4_tensors *tensors = open_matrix(fixture, i / 2, ROWS, K, values);
        const struct dense_matrix matrix = {tensors, moe4_tensors_get(tensors, 0), 0, ROWS, K, is_transposed};
        assert_int_equal(slab_read(&fixture->test.context, &matrix, first, rows, &slab), 0);
        assert_int_equal(slab.rows, rows);
        for (int row = 0; row < rows; row++)
            for (int k = 0; k < K; k++) {
                double wanted = ((row + first) * 7 % 32 * 8 + k % 8) * (k % 2 ? -0.125 : 0.125);
                assert_true(slab_value(&slab, row * K + k) == wanted);
            }
        slab_release(&slab);
        moe4_tensors_close(tensors);
    }
}

static void test_threads(void **state)
{
    static const int threads[] = {1, 2, 3, 64};
    static const int checked[] = {0, 1, 2, 16, 100};
    static char values[ROWS * K * 4];
    static uint8_t codes[2][ROWS * K / 2], scales[2][ROWS * K / 32];
    struct fixture *fixture = *state;
    for (int is_transposed = 0; is_transposed < 2; is_transposed++) {
        moe4_mxfp4_loss first;
        fill(0, is_transposed, values);
        moe4_tensors *tensors = open_matrix(fixture, 0, ROWS, K, values);
        const struct dense_matrix matrix = {tensors, moe4_tensors_get(tensors, 0), 0, ROWS, K, is_transposed};
        for (int i = 0; i < 20; i++) {
            const int now = i > 0, n_checked = checked[i % 5];
            struct encoder encoder = {
                .rule = MOE4_SCALE_FLOOR, .n_threads = threads[i / 5], .n_checked_rows = n_checked};
            assert_int_equal(encode_matrix(&encoder, &matrix, codes[now], scales[now]), 0);
            assert_int_equal(encoder.n_entries, 1);
            assert_int_equal(encoder.n_rows_checked, n_checked < ROWS ? n_checked : ROWS);
            if (!now) first = encoder.entries[0].loss;
            assert_memory_equal(&encoder.entries[0].loss, &first, sizeof first);
            assert_memory_equal(codes[now], codes[0], sizeof codes[0]);
            assert_memory_equal(scales[now], scales[0], sizeof scales[0]);
            assert_int_equal(encode_matrix(&encoder, &matrix, codes[now], scales[now]), 0);
            assert_int_equal(encoder.n_entries, 1); /* another part of the same tensor */
            assert_int_equal(encoder.entries[0].loss.n_blocks, 2 * first.n_blocks);
            assert_int_equal(encoder.entries[0].loss.n_saturated, 2 * first.n_saturated);
            encoder_release(&encoder);
        }
        assert_int_equal(first.n_blocks, ROWS * K / 32);
        assert_true(first.squared_error > 0 && first.n_saturated > 0);
        moe4_tensors_close(tensors);
    }
}

/* A file that has become shorter fails every thread that comes to its end. */
static void test_shrinking_file(void **state)
{
    static uint16_t values[ROWS * K];
    static uint8_t codes[ROWS * K / 2], scales[ROWS * K / 32];
    struct fixture *fixture = *state;
    moe4_tensors *tensors = open_matrix(fixture, 0, ROWS, K, values);
    const struct dense_matrix matrix = {tensors, moe4_tensors_get(tensors, 0), 0, ROWS, K, 0};
    struct encoder encoder = {.n_threads = 4};
    scratch_write(&fixture->scratch, "x.safetensors", "gone", 4);
    assert_int_not_equal(encode_matrix(&encoder, &matrix, codes, scales), 0);
    encoder_release(&encoder);
    moe4_tensors_close(tensors);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        FILE_TEST(test_every_f16),
        FILE_TEST(test_rows_and_columns),
        FILE_TEST(test_threads),
        FILE_TEST(test_shrinking_file),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
