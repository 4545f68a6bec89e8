/* Reading tensor files: what a good file gives, and that no bad one gets through or does harm. */
#include "io_helpers.h"

#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* Opens bytes as a file. */
static moe4_status open_bytes(struct fixture *fixture, const void *bytes, size_t n_bytes, moe4_tensors **tensors)
{
    const char *path = scratch_write(&fixture->scratch, "x.safetensors", bytes, n_bytes);
    return moe4_tensors_open(&fixture->test.context, path, tensors);
}

static moe4_status open_header(struct fixture *fixture, const char *header, size_t data_bytes, moe4_tensors **tensors)
{
    size_t n_bytes;
    unsigned char *file = make_file(header, data_bytes, &n_bytes);
    moe4_status status = open_bytes(fixture, file, n_bytes, tensors);
    free(file);
    return status;
}

static const char good_header[] = "{\"__metadata__\":{\"format\":\"pt\",\"note\":\"\\u00e9\"},"
                                  "\"b\":{\"dtype\":\"U8\",\"shape\":[2,3],\"data_offsets\":[4,10]},"
                                  "\"a\":{\"shape\":[],\"data_offsets\":[0,4],\"dtype\":\"F32\"},"
                                  "\"empty\":{\"dtype\":\"BF16\",\"shape\":[3,0],\"data_offsets\":[10,10]}}";
enum { GOOD_DATA = 10 };

/* ---- A good file ------------------------------------------------------------------------------------------------- */

static void test_good_file(void **state)
{
    struct fixture *fixture = *state;
    moe4_tensors *tensors;
    assert_int_equal(open_header(fixture, good_header, GOOD_DATA, &tensors), MOE4_OK);
    assert_int_equal(moe4_tensors_count(tensors), 3);

    const moe4_tensor *a = moe4_tensors_find(tensors, "a"), *b = moe4_tensors_find(tensors, "b");
    assert_ptr_equal(a, moe4_tensors_get(tensors, 0)); /* file order, not header order */
    assert_ptr_equal(b, moe4_tensors_get(tensors, 1));
    assert_string_equal(a->name, "a");
    assert_string_equal(a->dtype, "F32");
    assert_int_equal(a->rank, 0);
    assert_int_equal(a->n_bytes, 4);
    assert_int_equal(a->offset, 8 + sizeof good_header - 1);
    assert_int_equal(b->rank, 2);
    assert_int_equal(b->shape[0], 2);
    assert_int_equal(b->shape[1], 3);
    assert_int_equal(b->n_bytes, 6);
    assert_string_equal(b->file, scratch_path(&fixture->scratch, "x.safetensors"));
    assert_int_equal(moe4_tensors_get(tensors, 2)->n_bytes, 0);
    assert_null(moe4_tensors_get(tensors, 3));
    assert_null(moe4_tensors_get(tensors, -1));
    assert_null(moe4_tensors_find(tensors, "c"));
    assert_null(moe4_tensors_find(tensors, "__metadata__"));

    assert_string_equal(moe4_tensors_metadata(tensors, "format"), "pt");
    assert_string_equal(moe4_tensors_metadata(tensors, "note"), "\xc3\xa9");
    assert_null(moe4_tensors_metadata(tensors, "other"));
    moe4_tensors_close(tensors);
}

static void test_reads_bytes(void **state)
{
    struct fixture *fixture = *state;
    moe4_context *context = &fixture->test.context;
    moe4_tensors *tensors, *other;
    assert_int_equal(open_header(fixture, good_header, GOOD_DATA, &tensors), MOE4_OK);
    const moe4_tensor *b = moe4_tensors_find(tensors, "b");
    unsigned char bytes[8];
    memset(bytes, 0xEE, sizeof bytes);
    assert_int_equal(moe4_tensors_read(context, tensors, b, 0, 6, bytes), MOE4_OK);
    assert_memory_equal(bytes, "\4\5\6\7\10\11\xEE\xEE", 8);
    assert_int_equal(moe4_tensors_read(context, tensors, b, 2, 3, bytes), MOE4_OK);
    assert_memory_equal(bytes, "\6\7\10\7\10\11\xEE\xEE", 8);
    assert_int_equal(moe4_tensors_read(context, tensors, b, 6, 0, NULL), MOE4_OK);

    static const int64_t bad[][2] = {{0, 7}, {-1, 1}, {6, 1}, {7, 0}, {0, -1}, {1, INT64_MAX}, {INT64_MAX, 1}};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        assert_refused(&fixture->test, moe4_tensors_read(context, tensors, b, bad[i][0], bad[i][1], bytes), MOE4_EINVAL,
                       "x.safetensors: tensor \"b\"");
    assert_memory_equal(bytes, "\6\7\10\7\10\11\xEE\xEE", 8);

    assert_int_equal(open_header(fixture, good_header, GOOD_DATA, &other), MOE4_OK);
    assert_refused(&fixture->test, moe4_tensors_read(context, other, b, 0, 6, bytes), MOE4_EINVAL, "not one of");
    assert_int_equal(moe4_tensors_read(context, tensors, b, 0, 6, NULL), MOE4_EINVAL);
    assert_int_equal(moe4_tensors_read(context, NULL, b, 0, 6, bytes), MOE4_EINVAL);
    assert_int_equal(moe4_tensors_read(context, tensors, NULL, 0, 6, bytes), MOE4_EINVAL);
    moe4_tensors_close(other);
    moe4_tensors_close(tensors);
}

/* A tensor may begin at any byte: all header paddings from 0 to 7. */
static void test_any_alignment(void **state)
{
    struct fixture *fixture = *state;
    char header[sizeof good_header + 8];
    for (int padding = 0; padding < 8; padding++) {
        moe4_tensors *tensors;
        unsigned char bytes[6];
        snprintf(header, sizeof header, "%s%*s", good_header, padding, "");
        assert_int_equal(open_header(fixture, header, GOOD_DATA, &tensors), MOE4_OK);
        const moe4_tensor *b = moe4_tensors_find(tensors, "b");
        assert_int_equal(moe4_tensors_read(&fixture->test.context, tensors, b, 0, 6, bytes), MOE4_OK);
        assert_memory_equal(bytes, "\4\5\6\7\10\11", 6);
        moe4_tensors_close(tensors);
    }
}

static void test_every_dtype(void **state)
{
    static const struct {
        const char *name;
        int bits;
    } dtypes[] = {
        {"BOOL", 8},    {"F4", 4},      {"F6_E2M3", 6}, {"F6_E3M2", 6},     {"U8", 8},          {"I8", 8},
        {"F8_E5M2", 8}, {"F8_E4M3", 8}, {"F8_E8M0", 8}, {"F8_E4M3FNUZ", 8}, {"F8_E5M2FNUZ", 8}, {"I16", 16},
        {"U16", 16},    {"F16", 16},    {"BF16", 16},   {"I32", 32},        {"U32", 32},        {"F32", 32},
        {"C64", 64},    {"F64", 64},    {"I64", 64},    {"U64", 64},
    };
    struct fixture *fixture = *state;
    assert_int_equal(sizeof dtypes / sizeof *dtypes, 22);
    for (size_t i = 0; i < sizeof dtypes / sizeof *dtypes; i++) {
        char header[128];
        moe4_tensors *tensors;
        snprintf(header, sizeof header, "{\"t\":{\"dtype\":\"%s\",\"shape\":[3,4],\"data_offsets\":[0,%d]}}",
                 dtypes[i].name, dtypes[i].bits * 12 / 8);
        assert_int_equal(open_header(fixture, header, (size_t)dtypes[i].bits * 12 / 8, &tensors), MOE4_OK);
        assert_string_equal(moe4_tensors_get(tensors, 0)->dtype, dtypes[i].name);
        moe4_tensors_close(tensors);
    }
}

/* ---- Headers that are accepted or refused ------------------------------------------------------------------------ */

struct header_case {
    const char *header;
    size_t data_bytes;
    const char *message; /* NULL = accepted */
};

#define ONE(dtype, shape, offsets) "{\"t\":{\"dtype\":\"" dtype "\",\"shape\":" shape ",\"data_offsets\":" offsets "}}"
#define TWO(first, second)                                                                                             \
    "{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":" first "},"                                              \
    "\"b\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":" second "}}"

static const struct header_case header_cases[] = {
    {"{}", 0, NULL},
    {"{}        ", 0, NULL},
    {"{\"__metadata__\":{}}", 0, NULL},
    {"{\"__metadata__\":null}", 0, NULL},
    {ONE("U8", "[4]", "[0,4]"), 4, NULL},
    {"{ \"t\" :\n{ \"shape\" : [ 4 ] , \"dtype\" : \"U8\" , \"data_offsets\" : [ 0 , 4 ] } }\n", 4, NULL},
    {"{\"t\":{\"d\\u0074ype\":\"U\\u0038\",\"shape\":[4],\"data_offsets\":[0,4]}}", 4, NULL},
    {"{\"t\":{\"x\":[{\"y\":1.5e3}],\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]}}", 4, NULL},
    {"{\"\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]}}", 4, NULL},
    {ONE("U8", "[1,1,1,1,1,1,1,4]", "[0,4]"), 4, NULL},
    {ONE("U8", "[0]", "[0,0]"), 0, NULL},
    {ONE("F4", "[3,2]", "[0,3]"), 3, NULL},
    {TWO("[0,4]", "[4,8]"), 8, NULL},
    {TWO("[4,8]", "[0,4]"), 8, NULL},
    {ONE("U8", "[0,9223372036854775807,9223372036854775807]", "[0,0]"), 0, NULL},

    /* not a JSON object */
    {"", 0, "expected '{'"},
    {" {}", 0, "expected '{'"},
    {"[]", 0, "expected '{'"},
    {"\xef\xbb\xbf{}", 0, "expected '{'"},
    {"{", 0, "no key"},
    {"{}x", 0, "text after the end"},
    {"{\"a\xff\":1}", 0, "header byte 3: a string that is not UTF-8"},
    {"{\"\\u0000\":1}", 0, "NUL character"},
    {"{\"t\":[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[", 0, "expected a tensor's description"},
    {"{\"t\":{\"x\":[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[", 0, "nesting deeper than 64"},
    {"{\"t\":1}", 0, "expected a tensor's description"},

    /* fields */
    {"{\"t\":{\"shape\":[4],\"data_offsets\":[0,4]}}", 4, "expected dtype, shape and data_offsets"},
    {"{\"t\":{\"dtype\":\"U8\",\"data_offsets\":[0,4]}}", 4, "expected dtype, shape and data_offsets"},
    {"{\"t\":{\"dtype\":\"U8\",\"shape\":[4]}}", 4, "expected dtype, shape and data_offsets"},
    {"{\"t\":{\"dtype\":\"U8\",\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]}}", 4, "expected each field once"},
    {"{\"t\":{\"dtype\":8,\"shape\":[4],\"data_offsets\":[0,4]}}", 4, "expected a type name"},
    {ONE("U9", "[4]", "[0,4]"), 4, "x.safetensors: tensor \"t\": unknown dtype \"U9\""},
    {ONE("u8", "[4]", "[0,4]"), 4, "unknown dtype \"u8\""},
    {ONE("", "[4]", "[0,4]"), 4, "unknown dtype"},
    {ONE("U8", "4", "[0,4]"), 4, "expected an array"},
    {ONE("U8", "[-4]", "[0,4]"), 4, "expected a whole number"},
    {ONE("U8", "[4.0]", "[0,4]"), 4, "expected a whole number"},
    {ONE("U8", "[4e0]", "[0,4]"), 4, "expected a whole number"},
    {ONE("U8", "[\"4\"]", "[0,4]"), 4, "expected a whole number"},
    {ONE("U8", "[9223372036854775808]", "[0,4]"), 4, "expected a whole number"},
    {ONE("U8", "[18446744073709551620]", "[0,4]"), 4, "expected a whole number"},
    {ONE("U8", "[1,1,1,1,1,1,1,1,4]", "[0,4]"), 4, "tensor \"t\": 9 dimensions, at most 8"},
    {ONE("U8", "[4]", "[0]"), 4, "expected two offsets"},
    {ONE("U8", "[4]", "[0,4,4]"), 4, "expected two offsets"},
    {ONE("U8", "[4]", "[-1,4]"), 4, "expected a whole number"},
    {ONE("U8", "[4]", "{}"), 4, "expected an array"},

    /* sizes */
    {ONE("U8", "[4]", "[0,5]"), 5, "tensor \"t\": U8 [4] is 4 bytes, but its data has 5"},
    {ONE("F32", "[4]", "[0,4]"), 4, "tensor \"t\": F32 [4] is 16 bytes, but its data has 4"},
    {ONE("F4", "[3]", "[0,2]"), 2, "tensor \"t\": F4 [3] does not fill whole bytes"},
    {ONE("F6_E2M3", "[2]", "[0,2]"), 2, "does not fill whole bytes"},
    {ONE("U8", "[4294967296,4294967296]", "[0,4]"), 4, "has more elements than 63 bits count"},
    {ONE("U8", "[4294967296,4294967296,0]", "[0,0]"), 0, "has more elements than 63 bits count"},
    {ONE("F64", "[4611686018427387904]", "[0,4]"), 4, "is larger than 63 bits count"},
    {ONE("U8", "[2305843009213693952]", "[0,0]"), 0, "is larger than 63 bits count"},

    /* places */
    {ONE("U8", "[4]", "[4,0]"), 4, "tensor \"t\": data begins at 4 and ends at 0"},
    {ONE("U8", "[4]", "[1,5]"), 5, "tensor \"t\": data begins at 1, but the data before it ends at 0"},
    {ONE("U8", "[4]", "[0,4]"), 3, "tensor \"t\": data ends at 4, but the file has 3"},
    {ONE("U8", "[4]", "[0,4]"), 5, "the tensors take 4 bytes, but the file has 5"},
    {"{}", 1, "the tensors take 0 bytes, but the file has 1"},
    {TWO("[0,4]", "[5,9]"), 9, "tensor \"b\": data begins at 5, but the data before it ends at 4"},
    {TWO("[0,4]", "[3,7]"), 7, "tensor \"b\": data begins at 3, but the data before it ends at 4"},
    {TWO("[0,4]", "[0,4]"), 4, "tensor \"b\": data begins at 0, but the data before it ends at 4"},
    {TWO("[0,4]", "[9223372036854775803,9223372036854775807]"), 8, "tensor \"b\": data begins at 9223372036854775803"},
    {ONE("U8", "[1152921504606846975]", "[0,1152921504606846975]"), 4, "data ends at 1152921504606846975"},

    /* twice */
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]},"
     "\"\\u0061\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[4,8]}}",
     8, "x.safetensors: tensor \"a\" is there twice"},
    {"{\"__metadata__\":{\"a\":\"b\",\"a\":\"b\"}}", 0, "its metadata has \"a\" twice"},
    {"{\"__metadata__\":{},\"__metadata__\":{}}", 0, "expected __metadata__ once"},

    /* metadata */
    {"{\"__metadata__\":{\"a\":1}}", 0, "expected a string"},
    {"{\"__metadata__\":{\"a\":null}}", 0, "expected a string"},
    {"{\"__metadata__\":\"a\"}", 0, "expected an object of strings"},
};

static void test_header_cases(void **state)
{
    struct fixture *fixture = *state;
    for (size_t i = 0; i < sizeof header_cases / sizeof *header_cases; i++) {
        const struct header_case *header = &header_cases[i];
        moe4_tensors *tensors;
        moe4_status status = open_header(fixture, header->header, header->data_bytes, &tensors);
        if (!header->message && status != MOE4_OK)
            fail_msg("%s refused: %s", header->header, fixture->test.context.message);
        if (!header->message) {
            moe4_tensors_close(tensors);
            continue;
        }
        moe4_status expected = strstr(header->message, "dimensions") ? MOE4_EUNSUPPORTED : MOE4_EFORMAT;
        if (status != expected) fail_msg("%s accepted (%s)", header->header, moe4_status_name(status));
        assert_null(tensors);
        assert_message(&fixture->test, header->message);
        assert_message(&fixture->test, "x.safetensors: ");
    }
}

/* ---- Lengths ----------------------------------------------------------------------------------------------------- */

static void test_length_field(void **state)
{
    static const struct {
        uint64_t length;
        int64_t file_bytes;
        const char *message;
    } cases[] = {
        {0, 7, "7 bytes, a safetensors file has at least 8"},
        {0, 0, "0 bytes"},
        {1, 8, "header of 1 bytes, but the file has 0 left"},
        {93, 100, "header of 93 bytes, but the file has 92 left"},
        {(uint64_t)1 << 63, 100, "header of 9223372036854775808 bytes, at most 100000000"},
        {UINT64_MAX, 100, "header of 18446744073709551615 bytes, at most 100000000"},
        {UINT64_MAX - 7, 100, "at most 100000000"},
        {100000001, 200000000, "header of 100000001 bytes, at most 100000000"},
        {100000000, 100000007, "header of 100000000 bytes, but the file has 99999999 left"},
    };
    struct fixture *fixture = *state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        moe4_tensors *tensors;
        unsigned char bytes[8];
        for (int b = 0; b < 8; b++) bytes[b] = (unsigned char)(cases[i].length >> 8 * b);
        const char *path = scratch_write(&fixture->scratch, "x.safetensors", bytes, 8);
        assert_int_equal(truncate(path, cases[i].file_bytes), 0); /* the rest is a hole */
        fixture->test.counter.peak_bytes = fixture->test.counter.live_bytes;
        assert_refused(&fixture->test, moe4_tensors_open(&fixture->test.context, path, &tensors), MOE4_EFORMAT,
                       cases[i].message);
        assert_true(fixture->test.counter.peak_bytes < 65536); /* nothing of that size was allocated */
    }
}

/* ---- Every cut, every bit ---------------------------------------------------------------------------------------- */

/* Everything that an opened object says must hold together, and all of it must be readable. */
static void check_consistent(struct fixture *fixture, const moe4_tensors *tensors, size_t file_bytes)
{
    unsigned char buffer[64];
    for (int64_t i = 0; i < moe4_tensors_count(tensors); i++) {
        const moe4_tensor *tensor = moe4_tensors_get(tensors, i);
        assert_ptr_equal(moe4_tensors_find(tensors, tensor->name), tensor);
        assert_in_range(tensor->rank, 0, MOE4_TENSOR_MAX_RANK);
        assert_true(tensor->n_bytes >= 0 && tensor->offset >= 8);
        assert_true((size_t)(tensor->offset + tensor->n_bytes) <= file_bytes);
        assert_true(tensor->n_bytes <= (int64_t)sizeof buffer);
        assert_int_equal(moe4_tensors_read(&fixture->test.context, tensors, tensor, 0, tensor->n_bytes, buffer),
                         MOE4_OK);
    }
}

static void test_every_cut(void **state)
{
    struct fixture *fixture = *state;
    size_t n_bytes;
    moe4_tensors *tensors;
    unsigned char *file = make_file(good_header, GOOD_DATA, &n_bytes);
    for (size_t cut = 0; cut < n_bytes; cut++) {
        assert_int_equal(open_bytes(fixture, file, cut, &tensors), MOE4_EFORMAT);
        assert_null(tensors);
        assert_message(&fixture->test, "x.safetensors: ");
    }
    assert_int_equal(open_bytes(fixture, file, n_bytes, &tensors), MOE4_OK);
    check_consistent(fixture, tensors, n_bytes);
    moe4_tensors_close(tensors);
    free(file);
}

static void test_every_bit(void **state)
{
    struct fixture *fixture = *state;
    size_t n_bytes, n_accepted = 0;
    unsigned char *file = make_file(good_header, GOOD_DATA, &n_bytes);
    size_t header_bytes = n_bytes - GOOD_DATA;
    for (size_t bit = 0; bit < 8 * header_bytes; bit++) {
        moe4_tensors *tensors;
        file[bit / 8] ^= (unsigned char)(1 << bit % 8);
        if (open_bytes(fixture, file, n_bytes, &tensors) == MOE4_OK) {
            check_consistent(fixture, tensors, n_bytes);
            moe4_tensors_close(tensors);
            n_accepted++;
        }
        file[bit / 8] ^= (unsigned char)(1 << bit % 8);
    }
    assert_true(n_accepted > 0 && n_accepted < header_bytes * 2); /* names, and metadata, may change; little else */
    free(file);
}

/* ---- The system -------------------------------------------------------------------------------------------------- */

static void test_shrinking_file(void **state)
{
    struct fixture *fixture = *state;
    moe4_context *context = &fixture->test.context;
    moe4_tensors *tensors;
    unsigned char bytes[6];
    assert_int_equal(open_header(fixture, good_header, GOOD_DATA, &tensors), MOE4_OK);
    const moe4_tensor *b = moe4_tensors_find(tensors, "b");
    assert_int_equal(truncate(scratch_path(&fixture->scratch, "x.safetensors"), b->offset + 5), 0);
    assert_int_equal(moe4_tensors_read(context, tensors, b, 0, 5, bytes), MOE4_OK);
    assert_refused(&fixture->test, moe4_tensors_read(context, tensors, b, 0, 6, bytes), MOE4_EIO,
                   "x.safetensors: ends at byte");
    moe4_tensors_close(tensors);
}

static void test_not_a_file(void **state)
{
    struct fixture *fixture = *state;
    moe4_context *context = &fixture->test.context;
    moe4_tensors *tensors;
    const char *path = scratch_path(&fixture->scratch, "missing.safetensors");
    assert_refused(&fixture->test, moe4_tensors_open(context, path, &tensors), MOE4_EIO, "No such file");
    path = scratch_path(&fixture->scratch, "pipe.safetensors");
    assert_int_equal(mkfifo(path, 0600), 0);
    assert_refused(&fixture->test, moe4_tensors_open(context, path, &tensors), MOE4_EIO, "not a regular file");
    assert_refused(&fixture->test, moe4_tensors_open(context, "/dev/zero", &tensors), MOE4_EIO, "not a regular file");
    assert_int_equal(moe4_tensors_open(context, NULL, &tensors), MOE4_EINVAL);
    assert_int_equal(moe4_tensors_open(context, path, NULL), MOE4_EINVAL);
    assert_int_equal(moe4_tensors_open(NULL, path, &tensors), MOE4_EINVAL);
    moe4_tensors_close(NULL);
}

/* A name from a file can neither fill a message nor act on a terminal. */
static void test_hostile_names_in_messages(void **state)
{
    struct fixture *fixture = *state;
    char header[1000];
    moe4_tensors *tensors;
    snprintf(header, sizeof header, "{\"\\u001b[31m%0400d\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,5]}}",
             0);
    assert_refused(&fixture->test, open_header(fixture, header, 5, &tensors), MOE4_EFORMAT,
                   "U8 [4] is 4 bytes, but its data has 5");
    assert_message(&fixture->test, "tensor \"?[31m000");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        FILE_TEST(test_good_file),
        FILE_TEST(test_reads_bytes),
        FILE_TEST(test_any_alignment),
        FILE_TEST(test_every_dtype),
        FILE_TEST(test_header_cases),
        FILE_TEST(test_length_field),
        FILE_TEST(test_every_cut),
        FILE_TEST(test_every_bit),
        FILE_TEST(test_shrinking_file),
        FILE_TEST(test_not_a_file),
        FILE_TEST(test_hostile_names_in_messages),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
