/* Writing GGUF files: the bytes of one, that our reader finds everything in another, and what is refused. */
#include "io_helpers.h"

#include <stdlib.h>
#include <string.h>

static const moe4_tensor three[] = {
    {.name = "a", .dtype = "F32", .rank = 1, .shape = {3}},
    {.name = "blk.0.x", .dtype = "MXFP4", .rank = 3, .shape = {2, 1, 64}},
    {.name = "b", .dtype = "I32", .rank = 2, .shape = {1, 2}},
};
static const float limits[] = {7.0f, 0.5f};
static const moe4_gguf_value five[] = {
    {.key = "general.architecture", .type = MOE4_GGUF_STRING, .text = "x"},
    {.key = "x.count", .type = MOE4_GGUF_U32, .u32 = 3000000000u},
    {.key = "x.real", .type = MOE4_GGUF_F32, .f32 = 2.5f},
    {.key = "x.yes", .type = MOE4_GGUF_BOOL, .u32 = 1},
    {.key = "x.limits", .type = MOE4_GGUF_F32_ARRAY, .array = limits, .n_elements = 2},
};

static const char *target(struct fixture *fixture)
{
    return scratch_path(&fixture->scratch, "out.gguf");
}

static moe4_status create(struct fixture *fixture, const moe4_tensor *tensors, int32_t n_tensors,
                          const moe4_gguf_value *values, int32_t n_values, moe4_writer **writer)
{
    return moe4_gguf_writer_create(&fixture->test.context, target(fixture), tensors, n_tensors, values, n_values,
                                   writer);
}

static void test_exact_bytes(void **state)
{
    static const unsigned char wanted[128 + 64] =
        "GGUF\3\0\0\0\2\0\0\0\0\0\0\0\1\0\0\0\0\0\0\0"
        "\1\0\0\0\0\0\0\0k\4\0\0\0\2\1\0\0"
        "\1\0\0\0\0\0\0\0b\2\0\0\0\2\0\0\0\0\0\0\0\1\0\0\0\0\0\0\0\32\0\0\0\0\0\0\0\0\0\0\0"
        "\1\0\0\0\0\0\0\0a\1\0\0\0\3\0\0\0\0\0\0\0\0\0\0\0\40\0\0\0\0\0\0";
    static const moe4_gguf_value value = {.key = "k", .type = MOE4_GGUF_U32, .u32 = 258};
    struct fixture *fixture = *state;
    moe4_context *context = &fixture->test.context;
    const moe4_tensor tensors[] = {three[2], three[0]};
    moe4_writer *writer;
    size_t n_bytes;
    assert_int_equal(create(fixture, tensors, 2, &value, 1, &writer), MOE4_OK);
    assert_int_equal(moe4_writer_write(context, writer, 1, 0, 12, "abcdefghijkl"), MOE4_OK);
    assert_int_equal(moe4_writer_write(context, writer, 0, 0, 8, "ABCDEFGH"), MOE4_OK);
    assert_int_equal(moe4_writer_commit(context, writer), MOE4_OK);
    unsigned char *file = load_bytes(target(fixture), &n_bytes);
    assert_int_equal(n_bytes, 128 + 64);
    assert_memory_equal(file, wanted, 127);
    assert_memory_equal(file + 128, "ABCDEFGH\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0", 32);
    assert_memory_equal(file + 160, "abcdefghijkl\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0", 32);
    free(file);
    assert_int_equal(scratch_count(&fixture->scratch), 1);
}

static void test_reads_back(void **state)
{
    struct fixture *fixture = *state;
    moe4_context *context = &fixture->test.context;
    moe4_writer *writer;
    moe4_tensors *tensors;
    char data[68], back[68];
    for (int i = 0; i < 68; i++) data[i] = (char)(3 * i + 1);
    assert_int_equal(create(fixture, three, 3, five, 5, &writer), MOE4_OK);
    assert_int_equal(moe4_writer_write(context, writer, 1, 0, 68, data), MOE4_OK);
    assert_int_equal(moe4_writer_write(context, writer, 0, 0, 12, data), MOE4_OK);
    assert_int_equal(moe4_writer_write(context, writer, 2, 0, 8, data), MOE4_OK);
    assert_int_equal(moe4_writer_commit(context, writer), MOE4_OK);
    assert_int_equal(moe4_tensors_open(context, target(fixture), &tensors), MOE4_OK);
    assert_int_equal(moe4_tensors_count(tensors), 3);
    for (int i = 0; i < 3; i++) {
        const moe4_tensor *found = moe4_tensors_find(tensors, three[i].name);
        assert_non_null(found);
        assert_string_equal(found->dtype, three[i].dtype);
        assert_int_equal(found->rank, three[i].rank);
        assert_memory_equal(found->shape, three[i].shape, (size_t)found->rank * sizeof *found->shape);
        assert_int_equal(found->offset % 32, 0);
        assert_int_equal(moe4_tensors_read(context, tensors, found, 0, found->n_bytes, back), MOE4_OK);
        assert_memory_equal(back, data, (size_t)found->n_bytes);
    }
    assert_string_equal(moe4_tensors_metadata(tensors, "general.architecture"), "x");
    assert_string_equal(moe4_tensors_metadata(tensors, "x.count"), "3000000000");
    assert_string_equal(moe4_tensors_metadata(tensors, "x.real"), "2.5");
    assert_string_equal(moe4_tensors_metadata(tensors, "x.yes"), "true");
    moe4_tensors_close(tensors);
}

static void test_refusals(void **state)
{
    static const struct {
        moe4_tensor tensor;
        const char *message;
    } cases[] = {
        {{.name = "a", .dtype = "U8", .rank = 1, .shape = {3}}, "dtype \"U8\""},
        {{.name = "a", .dtype = "F32", .rank = 5, .shape = {1, 1, 1, 1, 1}}, "rank 5"},
        {{.name = "a", .dtype = "F32", .rank = 0}, "rank 0"},
        {{.name = "a", .dtype = "MXFP4", .rank = 2, .shape = {2, 48}}, "dimension of 48, expected a multiple of 32"},
        {{.name = "a", .dtype = "F32", .rank = 1, .shape = {-1}}, "dimension of -1"},
        {{.name = "a", .dtype = "F32", .rank = 2, .shape = {INT64_MAX / 2, 2}}, "fewer than 2^63 bytes"},
        {{.name = "a234567890123456789012345678901234567890123456789012345678901234",
          .dtype = "F32",
          .rank = 1,
          .shape = {1}},
         "64 bytes of name"},
    };
    static const moe4_gguf_value twice[] = {{.key = "k"}, {.key = "k"}},
                                 no_text = {.key = "k", .type = MOE4_GGUF_STRING};
    struct fixture *fixture = *state;
    moe4_writer *writer;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        assert_refused(&fixture->test, create(fixture, &cases[i].tensor, 1, NULL, 0, &writer), MOE4_EINVAL,
                       cases[i].message);
        assert_null(writer);
    }
    assert_refused(&fixture->test, create(fixture, three, 1, twice, 2, &writer), MOE4_EINVAL,
                   "key \"k\" is given twice");
    assert_refused(&fixture->test, create(fixture, three, 1, &no_text, 1, &writer), MOE4_EINVAL,
                   "metadata value is NULL");
    assert_refused(&fixture->test, create(fixture, (const moe4_tensor[]){three[0], three[0]}, 2, NULL, 0, &writer),
                   MOE4_EINVAL, "given twice");
    assert_int_equal(scratch_count(&fixture->scratch), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {FILE_TEST(test_exact_bytes), FILE_TEST(test_reads_back),
                                       FILE_TEST(test_refusals)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
