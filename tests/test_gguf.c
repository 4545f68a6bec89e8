/* The GGUF reader against files that lie: whatever they say, it reads inside them or refuses. */
#include "io_helpers.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- Files made by hand ------------------------------------------------------------------------------------------ */

struct bytes {
    unsigned char data[4096];
    size_t n;
};

static void put(struct bytes *bytes, const void *data, size_t n)
{
    assert_true(bytes->n + n <= sizeof bytes->data);
    memcpy(bytes->data + bytes->n, data, n);
    bytes->n += n;
}

static void put_u32(struct bytes *bytes, uint32_t value)
{
    put(bytes, &value, sizeof value);
}

static void put_u64(struct bytes *bytes, uint64_t value)
{
    put(bytes, &value, sizeof value);
}

static void put_string(struct bytes *bytes, const char *text)
{
    put_u64(bytes, strlen(text));
    put(bytes, text, strlen(text));
}

static void put_start(struct bytes *bytes, uint32_t version, uint64_t n_tensors, uint64_t n_pairs)
{
    bytes->n = 0;
    put(bytes, "GGUF", 4);
    put_u32(bytes, version);
    put_u64(bytes, n_tensors);
    put_u64(bytes, n_pairs);
}

/* A tensor's description with up to five dimensions, ended by 0. */
static void put_tensor(struct bytes *bytes, const char *name, const uint64_t *dimensions, uint32_t type,
                       uint64_t offset)
{
    uint32_t rank = 0;
    while (dimensions[rank]) rank++;
    put_string(bytes, name);
    put_u32(bytes, rank);
    put(bytes, dimensions, rank * sizeof *dimensions);
    put_u32(bytes, type);
    put_u64(bytes, offset);
}

/* Pads to `alignment` and adds n_bytes of data. */
static void put_data(struct bytes *bytes, size_t alignment, size_t n_bytes)
{
    while (bytes->n % alignment) put(bytes, "", 1);
    for (size_t i = 0; i < n_bytes; i++) put(bytes, &(unsigned char){(unsigned char)i}, 1);
}

static moe4_status open_bytes(struct fixture *fixture, const struct bytes *bytes, moe4_tensors **tensors)
{
    const char *path = scratch_write(&fixture->scratch, "x.gguf", bytes->data, bytes->n);
    return moe4_tensors_open(&fixture->test.context, path, tensors);
}

static void check_refused(struct fixture *fixture, const struct bytes *bytes, moe4_status expected, const char *message)
{
    moe4_tensors *tensors;
    moe4_status status = open_bytes(fixture, bytes, &tensors);
    if (status == MOE4_OK) fail_msg("accepted: %s", message);
    assert_refused(&fixture->test, status, expected, message);
    assert_null(tensors);
}

/* ---- What is read ------------------------------------------------------------------------------------------------ */

static void test_values(void **state)
{
    struct fixture *fixture = *state;
    struct bytes bytes;
    moe4_tensors *tensors;
    const float numbers[] = {1.5f, 0x1p-149f};
    const double wide = -2.25;
    put_start(&bytes, 2, 1, 11);
    put_string(&bytes, "a.u8"), put_u32(&bytes, 0), put(&bytes, "\xFE", 1);
    put_string(&bytes, "a.i8"), put_u32(&bytes, 1), put(&bytes, "\xFE", 1);
    put_string(&bytes, "a.u16"), put_u32(&bytes, 2), put(&bytes, "\xFE\xFF", 2);
    put_string(&bytes, "a.i16"), put_u32(&bytes, 3), put(&bytes, "\xFE\xFF", 2);
    put_string(&bytes, "a.i32"), put_u32(&bytes, 5), put_u32(&bytes, UINT32_MAX);
    put_string(&bytes, "a.f32"), put_u32(&bytes, 6), put(&bytes, numbers, 4);
    put_string(&bytes, "a.bool"), put_u32(&bytes, 7), put(&bytes, "\1", 1);
    put_string(&bytes, "a.string"), put_u32(&bytes, 8), put_string(&bytes, "text");
    put_string(&bytes, "a.array"), put_u32(&bytes, 9), put_u32(&bytes, 6), put_u64(&bytes, 2), put(&bytes, numbers, 8);
    put_string(&bytes, "a.u64"), put_u32(&bytes, 10), put_u64(&bytes, UINT64_MAX);
    put_string(&bytes, "a.f64"), put_u32(&bytes, 12), put(&bytes, &wide, 8);
    put_tensor(&bytes, "t", (uint64_t[]){32, 3, 2, 0}, 39, 0);
    put_data(&bytes, 32, 6 * 17);
    assert_int_equal(open_bytes(fixture, &bytes, &tensors), MOE4_OK);
    static const char *const texts[][2] = {
        {"a.u8", "254"},    {"a.i8", "-2"},
        {"a.u16", "65534"}, {"a.i16", "-2"},
        {"a.i32", "-1"},    {"a.f32", "1.5"},
        {"a.bool", "true"}, {"a.string", "text"},
        {"a.f64", "-2.25"}, {"a.u64", "18446744073709551615"},
    };
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++)
        assert_string_equal(moe4_tensors_metadata(tensors, texts[i][0]), texts[i][1]);
    assert_null(moe4_tensors_metadata(tensors, "a.array"));
    assert_null(moe4_tensors_metadata(tensors, "a.none"));
    const moe4_tensor *tensor = moe4_tensors_find(tensors, "t");
    assert_string_equal(tensor->dtype, "MXFP4");
    assert_int_equal(tensor->rank, 3);
    assert_int_equal(tensor->shape[0], 2); /* outermost first */
    assert_int_equal(tensor->shape[1], 3);
    assert_int_equal(tensor->shape[2], 32);
    assert_int_equal(tensor->n_bytes, 102);
    assert_int_equal(tensor->offset % 32, 0);
    unsigned char last;
    assert_int_equal(moe4_tensors_read(&fixture->test.context, tensors, tensor, 101, 1, &last), MOE4_OK);
    assert_int_equal(last, 101);
    moe4_tensors_close(tensors);
}

static void test_placement(void **state)
{
    struct fixture *fixture = *state;
    struct bytes bytes;
    moe4_tensors *tensors;
    put_start(&bytes, 3, 2, 1);
    put_string(&bytes, "general.alignment"), put_u32(&bytes, 4), put_u32(&bytes, 128);
    put_tensor(&bytes, "a", (uint64_t[]){3, 0}, 0, 0);
    put_tensor(&bytes, "b", (uint64_t[]){2, 0}, 24, 128);
    put_data(&bytes, 128, 130);
    assert_int_equal(open_bytes(fixture, &bytes, &tensors), MOE4_OK); /* the last one need not be padded */
    assert_int_equal(moe4_tensors_find(tensors, "b")->offset - moe4_tensors_find(tensors, "a")->offset, 128);
    assert_int_equal(moe4_tensors_find(tensors, "a")->offset % 128, 0);
    moe4_tensors_close(tensors);
    bytes.n--;
    check_refused(fixture, &bytes, MOE4_EFORMAT, "tensor \"b\": data ends at 130, but the file has 129 bytes of data");
    put_start(&bytes, 3, 0, 0);
    assert_int_equal(open_bytes(fixture, &bytes, &tensors), MOE4_OK); /* nothing is something too */
    assert_int_equal(moe4_tensors_count(tensors), 0);
    moe4_tensors_close(tensors);
}

/* ---- What is refused --------------------------------------------------------------------------------------------- */

static void test_starts(void **state)
{
    struct fixture *fixture = *state;
    struct bytes bytes;
    put_start(&bytes, 1, 0, 0);
    check_refused(fixture, &bytes, MOE4_EUNSUPPORTED, "version 1, expected 2 or 3");
    put_start(&bytes, 4, 0, 0);
    check_refused(fixture, &bytes, MOE4_EUNSUPPORTED, "version 4, expected 2 or 3");
    put_start(&bytes, 3u << 24, 0, 0);
    check_refused(fixture, &bytes, MOE4_EUNSUPPORTED, "big-endian");
    put_start(&bytes, 3, (uint64_t)1 << 60, 0);
    check_refused(fixture, &bytes, MOE4_EFORMAT, "1152921504606846976 tensors, but the file has 8 bytes left");
    put_start(&bytes, 3, 0, UINT64_MAX);
    check_refused(fixture, &bytes, MOE4_EFORMAT, "18446744073709551615 pairs of metadata, but the file has 0");
    put_start(&bytes, 3, 1, 0);
    check_refused(fixture, &bytes, MOE4_EFORMAT, "1 tensors, but");
    memcpy(bytes.data, "GGML", 4);
    check_refused(fixture, &bytes, MOE4_EFORMAT, "no \"GGUF\"");
}

static void test_metadata(void **state)
{
    static const struct {
        const char *key;
        const char *bytes; /* type and value */
        size_t n;
        moe4_status status;
        const char *message;
    } cases[] = {
        {"", "\4\0\0\0\0\0\0\0", 8, MOE4_EFORMAT, "a key of 0 bytes"},
        {"k", "\15\0\0\0\0\0\0\0", 8, MOE4_EFORMAT, "value type 13, expected 0 to 12"},
        {"k", "\10\0\0\0\xff\xff\xff\xff\0\0\0\0", 12, MOE4_EFORMAT, "4294967295 bytes in a string, but the file has"},
        {"k", "\10\0\0\0\0\0\0\0\0\0\0\x10", 12, MOE4_EFORMAT, "1152921504606846976 bytes in a string"},
        {"k", "\10\0\0\0\3\0\0\0\0\0\0\0a\0b", 15, MOE4_EFORMAT, "a NUL character"},
        {"k", "\11\0\0\0\11\0\0\0\1\0\0\0\0\0\0\0", 16, MOE4_EUNSUPPORTED, "\"k\" is an array of arrays"},
        {"k", "\11\0\0\0\77\0\0\0\1\0\0\0\0\0\0\0", 16, MOE4_EFORMAT, "value type 63"},
        {"k", "\11\0\0\0\4\0\0\0\0\0\0\0\0\0\0\x40", 16, MOE4_EFORMAT, "elements of an array, but the file has"},
        {"k", "\11\0\0\0\14\0\0\0\2\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0", 24, MOE4_EFORMAT, "2 elements of an array"},
        {"k", "\11\0\0\0\10\0\0\0\1\0\0\0\0\0\0\0\xff\0\0\0\0\0\0\0", 24, MOE4_EFORMAT, "255 bytes in a string"},
        {"k", "\7\0\0\0\2", 5, MOE4_EFORMAT, "a truth value of 2"},
        {"general.alignment", "\4\0\0\0\0\0\0\0", 8, MOE4_EFORMAT, "general.alignment is 0, expected"},
        {"general.alignment", "\4\0\0\0\60\0\0\0", 8, MOE4_EFORMAT, "general.alignment is 48, expected"},
        {"general.alignment", "\4\0\0\0\0\0\0\x80", 8, MOE4_EFORMAT, "general.alignment is 2147483648"},
        {"general.alignment", "\12\0\0\0\40\0\0\0\0\0\0\0", 12, MOE4_EFORMAT, "expected a 32-bit power of two"},
        {"general.alignment",
         "\10\0\0\0\2\0\0\0\0\0\0\0"
         "64",
         14, MOE4_EFORMAT, "is of value type 8, expected a"},
        {"split.count", "\2\0\0\0\2\0", 6, MOE4_EFORMAT, "split.count is 2, expected a name like"},
    };
    struct fixture *fixture = *state;
    struct bytes bytes;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        put_start(&bytes, 3, 0, 1);
        put_string(&bytes, cases[i].key);
        put(&bytes, cases[i].bytes, cases[i].n);
        check_refused(fixture, &bytes, cases[i].status, cases[i].message);
    }
    put_start(&bytes, 3, 0, 2);
    for (int i = 0; i < 2; i++) put_string(&bytes, "twice"), put_u32(&bytes, 0), put(&bytes, "a", 1);
    check_refused(fixture, &bytes, MOE4_EFORMAT, "has \"twice\" twice");
}

static void test_tensors(void **state)
{
    static const char long_name[] = "0123456789012345678901234567890123456789012345678901234567890123";
    static const struct {
        const char *name;
        uint64_t dimensions[6];
        uint32_t type;
        uint64_t offset;
        const char *message;
    } cases[] = {
        {"", {32}, 39, 0, "name of 0 bytes"},
        {long_name, {32}, 39, 0, "name of 64 bytes, expected 1 to 63"},
        {"t", {0}, 39, 0, "tensor \"t\": dimensions: 0, expected 1 to 4"},
        {"t", {32, 1, 1, 1, 1}, 39, 0, "dimensions: 5"},
        {"t", {(uint64_t)1 << 63}, 0, 0, "a dimension of -9223372036854775808, expected 1 or more"},
        {"t", {31}, 39, 0, "rows of 31, expected whole blocks"},
        {"t", {((uint64_t)1 << 42) + 1}, 39, 0, "rows of 4398046511105, expected whole blocks"},
        {"t", {((uint64_t)1 << 42) + 1}, 0, 0, "17592186044420 bytes of data from 0, but the file has"},
        {"t", {(uint64_t)1 << 42, (uint64_t)1 << 42}, 39, 0, "expected a size that 63 bits count"},
        {"t", {(uint64_t)1 << 62}, 0, 0, "expected a size that 63 bits count"},
        {"t", {32}, 38, 0, "type 38, expected one that is known"},
        {"t", {32}, 353, 0, "type 353, expected one that is known"},
        {"t", {32}, 39, 32, "data begins at 32, but the data before it ends at 0"},
        {"t", {32}, 39, UINT64_MAX - 31, "data begins at 18446744073709551584"},
    };
    struct fixture *fixture = *state;
    struct bytes bytes;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        put_start(&bytes, 3, 1, 0);
        put_tensor(&bytes, cases[i].name, cases[i].dimensions, cases[i].type, cases[i].offset);
        put_data(&bytes, 32, 64);
        check_refused(fixture, &bytes, MOE4_EFORMAT, cases[i].message);
    }
    put_start(&bytes, 3, 1, 0); /* a dimension of 0 among others */
    put_string(&bytes, "t"), put_u32(&bytes, 2), put_u64(&bytes, 32), put_u64(&bytes, 0);
    put_u32(&bytes, 0), put_u64(&bytes, 0), put_data(&bytes, 32, 64);
    check_refused(fixture, &bytes, MOE4_EFORMAT, "a dimension of 0, expected 1 or more");
    put_start(&bytes, 3, 2, 0);
    for (uint64_t i = 0; i < 2; i++) put_tensor(&bytes, "same", (uint64_t[]){8, 0}, 0, 32 * i);
    put_data(&bytes, 32, 64);
    check_refused(fixture, &bytes, MOE4_EFORMAT, "tensor \"same\" is there twice");
}

/* ---- Whole checkpoints ------------------------------------------------------------------------------------------- */

static unsigned char *load_family(const char *name, size_t *n_bytes)
{
    char path[512];
    snprintf(path, sizeof path, "%s/families/gguf/%s", TEST_DATA, name);
    return load_bytes(path, n_bytes);
}

/* Opens the checkpoint in the scratch folder and reads all that it lists. */
static moe4_status read_everything(struct fixture *fixture, const char *path)
{
    moe4_context *context = &fixture->test.context;
    moe4_checkpoint *checkpoint;
    moe4_status status = moe4_checkpoint_open(context, path, &checkpoint);
    for (int32_t i = 0; status == MOE4_OK && moe4_checkpoint_layer_number(checkpoint, i) >= 0; i++) {
        moe4_layer_reader *reader = NULL;
        moe4_expert expert;
        status =
            moe4_layer_reader_open(context, checkpoint, moe4_checkpoint_layer_number(checkpoint, i), NULL, &reader);
        if (status == MOE4_OK) assert_int_equal(moe4_layer_reader_read(context, reader, 0, &expert), MOE4_OK);
        moe4_layer_reader_close(reader);
    }
    moe4_checkpoint_close(checkpoint);
    assert_int_equal(fixture->test.counter.live, 0);
    return status;
}

static void test_truncation(void **state)
{
    struct fixture *fixture = *state;
    size_t n_bytes;
    unsigned char *file = load_family("gpt-oss.gguf", &n_bytes);
    const char *path = scratch_write(&fixture->scratch, "x.gguf", file, n_bytes);
    assert_int_equal(read_everything(fixture, path), MOE4_OK);
    size_t padding = 16; /* of the last tensor, 4 F32 */
    while (n_bytes--) {
        assert_int_equal(truncate(path, (off_t)n_bytes), 0);
        moe4_status status = read_everything(fixture, path);
        if (padding) {
            assert_int_equal(status, MOE4_OK);
            padding--;
        } else {
            assert_int_equal(status, MOE4_EFORMAT);
        }
    }
    free(file);
}

/* Every bit of the header: a refusal, or a file that can be read. */
static void test_every_bit(void **state)
{
    struct fixture *fixture = *state;
    static const char *const names[] = {"gpt-oss.gguf", "deepseek4.gguf"};
    for (size_t f = 0; f < sizeof names / sizeof *names; f++) {
        size_t n_bytes, n_refused = 0;
        unsigned char *file = load_family(names[f], &n_bytes);
        moe4_tensors *tensors;
        const char *path = scratch_write(&fixture->scratch, "x.gguf", file, n_bytes);
        assert_int_equal(moe4_tensors_open(&fixture->test.context, path, &tensors), MOE4_OK);
        size_t header = (size_t)moe4_tensors_get(tensors, 0)->offset;
        moe4_tensors_close(tensors);
        for (size_t bit = 0; bit < 8 * header; bit++) {
            file[bit / 8] ^= (unsigned char)(1 << bit % 8);
            scratch_write(&fixture->scratch, "x.gguf", file, n_bytes);
            n_refused += read_everything(fixture, path) != MOE4_OK;
            file[bit / 8] ^= (unsigned char)(1 << bit % 8);
        }
        assert_true(n_refused > 2 * header);
        free(file);
    }
}

static void test_failing_allocations(void **state)
{
    struct fixture *fixture = *state;
    moe4_status status = MOE4_ENOMEM;
    struct counter *counter = &fixture->test.counter;
    char path[512];
    snprintf(path, sizeof path, "%s/families/gguf/deepseek4.gguf", TEST_DATA);
    for (counter->failing = 1; status == MOE4_ENOMEM; counter->failing++) {
        counter->n_calls = 0;
        status = read_everything(fixture, path);
    }
    assert_int_equal(status, MOE4_OK);
    assert_true(counter->failing > 20);
}

static void test_splits(void **state)
{
    struct fixture *fixture = *state;
    moe4_context *context = &fixture->test.context;
    static const char first_name[] = "k-00001-of-00002.gguf", second_name[] = "k-00002-of-00002.gguf";
    size_t first_bytes, second_bytes;
    unsigned char *first = load_family("kimi-k3-00001-of-00002.gguf", &first_bytes);
    unsigned char *second = load_family("kimi-k3-00002-of-00002.gguf", &second_bytes);
    moe4_checkpoint *checkpoint;
    const char *folder = fixture->scratch.folder;
    scratch_write(&fixture->scratch, first_name, first, first_bytes);
    assert_refused(&fixture->test, moe4_checkpoint_open(context, folder, &checkpoint), MOE4_EUNSUPPORTED,
                   "holds 1 *.gguf files that are not one model");
    assert_refused(&fixture->test,
                   moe4_checkpoint_open(context, scratch_path(&fixture->scratch, first_name), &checkpoint),
                   MOE4_EFORMAT, "k-00002-of-00002.gguf is missing, of the 2 files");
    scratch_write(&fixture->scratch, second_name, second, second_bytes);
    assert_int_equal(read_everything(fixture, folder), MOE4_OK);
    static const char key[] = "split.no"; /* followed by a type and the number, 16 bits */
    unsigned char *number = memmem(second, second_bytes, key, sizeof key - 1);
    assert_non_null(number);
    number[sizeof key - 1 + 4] = 7;
    scratch_write(&fixture->scratch, second_name, second, second_bytes);
    number[sizeof key - 1 + 4] = 1;
    assert_refused(&fixture->test, moe4_checkpoint_open(context, folder, &checkpoint), MOE4_EFORMAT,
                   "split.no is 7 and split.count 2, expected 1 and 2");
    scratch_write(&fixture->scratch, second_name, second, second_bytes);
    scratch_write(&fixture->scratch, "other.gguf", second, second_bytes);
    assert_refused(&fixture->test, moe4_checkpoint_open(context, folder, &checkpoint), MOE4_EUNSUPPORTED,
                   "holds 3 *.gguf files");
    free(first);
    free(second);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        FILE_TEST(test_values),    FILE_TEST(test_placement), FILE_TEST(test_starts),
        FILE_TEST(test_metadata),  FILE_TEST(test_tensors),   FILE_TEST(test_truncation),
        FILE_TEST(test_every_bit), FILE_TEST(test_splits),    FILE_TEST(test_failing_allocations),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
