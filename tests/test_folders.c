/* Tensors of a folder of shards, with and without an index: what is found, and what is refused. */
#include "io_helpers.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAP(pairs)   "{\"metadata\":{\"total_size\":12345},\"weight_map\":{" pairs "}}"
#define TENSOR(name) "{\"" name "\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]}}"

static void write_shard(struct fixture *fixture, const char *name, const char *header, size_t data_bytes)
{
    size_t n_bytes;
    unsigned char *file = make_file(header, data_bytes, &n_bytes);
    scratch_write(&fixture->scratch, name, file, n_bytes);
    free(file);
}

static void write_index(struct fixture *fixture, const char *text)
{
    scratch_write(&fixture->scratch, "model.safetensors.index.json", text, strlen(text));
}

static void test_folder_without_index(void **state)
{
    struct fixture *fixture = *state;
    moe4_context *context = &fixture->test.context;
    moe4_tensors *tensors;
    assert_refused(&fixture->test, moe4_tensors_open(context, fixture->scratch.folder, &tensors), MOE4_EFORMAT,
                   "holds no *.safetensors");
    write_shard(fixture, "2.safetensors",
                "{\"__metadata__\":{\"k\":\"two\"},\"b\":{\"dtype\":\"U8\",\"shape\":[4],"
                "\"data_offsets\":[0,4]}}",
                4);
    write_shard(fixture, "1.safetensors",
                "{\"__metadata__\":{\"k\":\"one\"},\"c\":{\"dtype\":\"U8\",\"shape\":[4],"
                "\"data_offsets\":[0,4]}}",
                4);
    scratch_write(&fixture->scratch, ".hidden.safetensors", "no", 2);
    scratch_write(&fixture->scratch, "1.safetensors.123-0.tmp", "no", 2);
    scratch_write(&fixture->scratch, ".safetensors", "no", 2);
    assert_int_equal(moe4_tensors_open(context, fixture->scratch.folder, &tensors), MOE4_OK);
    assert_int_equal(moe4_tensors_count(tensors), 2);
    assert_string_equal(moe4_tensors_get(tensors, 0)->name, "c"); /* in order of file names */
    assert_string_equal(moe4_tensors_get(tensors, 1)->name, "b");
    assert_string_equal(moe4_tensors_metadata(tensors, "k"), "one");
    moe4_tensors_close(tensors);

    write_shard(fixture, "3.safetensors", TENSOR("b"), 4);
    assert_refused(&fixture->test, moe4_tensors_open(context, fixture->scratch.folder, &tensors), MOE4_EFORMAT,
                   "tensor \"b\" is in both 2.safetensors and 3.safetensors");
    write_shard(fixture, "model.safetensors", TENSOR("whole"), 4); /* then the others are something else */
    assert_int_equal(moe4_tensors_open(context, fixture->scratch.folder, &tensors), MOE4_OK);
    assert_int_equal(moe4_tensors_count(tensors), 1);
    assert_string_equal(moe4_tensors_get(tensors, 0)->name, "whole");
    moe4_tensors_close(tensors);
}

static void test_folder_with_index(void **state)
{
    static const struct {
        const char *index, *message; /* NULL = accepted */
    } cases[] = {
        {MAP("\"a\":\"1.safetensors\",\"b\":\"2.safetensors\""), NULL},
        {MAP("\"b\":\"2.safetensors\",\"a\":\"1.safetensors\""), NULL},
        {"{\"weight_map\":{\"b\":\"2.safetensors\",\"a\":\"\\u0031.safetensors\"},\"x\":[1]}", NULL},
        {MAP("\"b\":\"2.safetensors\""), NULL},
        {MAP(""), NULL},
        {MAP("\"a\":\"1.safetensors\",\"c\":\"2.safetensors\""),
         "model.safetensors.index.json: tensor \"c\" is listed in 2.safetensors, but is in no shard"},
        {MAP("\"a\":\"1.safetensors\",\"b\":\"1.safetensors\""),
         "tensor \"b\" is listed in 1.safetensors, but is in no shard"},
        {MAP("\"a\":\"2.safetensors\",\"b\":\"1.safetensors\""),
         "tensor \"a\" is listed in 2.safetensors, but is in 1.safetensors"},
        {MAP("\"a\":\"1.safetensors\",\"a\":\"1.safetensors\""), "tensor \"a\" is listed twice"},
        {MAP("\"a\":\"1.safetensors\",\"b\":\"4.safetensors\""),
         "tensor \"b\" is in shard \"4.safetensors\", which is missing"},
        {MAP("\"a\":\"1.safetensors\",\"b\":\"2.safetensors\",\"b\":\"3.safetensors\""),
         "tensor \"b\" is in both 2.safetensors and 3.safetensors"},
        {MAP("\"a\":\"../x\""), "tensor \"a\": shard \"../x\" is not the plain name of a file"},
        {MAP("\"a\":\"..\\u002fx\""), "shard \"../x\" is not the plain name"},
        {MAP("\"a\":\"/etc/passwd\""), "is not the plain name"},
        {MAP("\"a\":\"sub/1.safetensors\""), "is not the plain name"},
        {MAP("\"a\":\"..\""), "is not the plain name"},
        {MAP("\"a\":\".\""), "is not the plain name"},
        {MAP("\"a\":\"\""), "is not the plain name"},
        {MAP("\"a\":\"a\\\\b\""), "is not the plain name"},
        {MAP("\"a\":1"), "expected a file name"},
        {"{}", "expected weight_map"},
        {"[]", "expected an object"},
        {"{\"weight_map\":[]}", "expected an object"},
        {"{\"weight_map\":{},\"weight_map\":{}}", "expected weight_map once"},
        {"{\"weight_map\":{}", "model.safetensors.index.json: byte 16: no ',' or '}'"},
        {"", "no value"},
        {"{\"metadata\":{\"a\":[}},\"weight_map\":{}}", "no value"},
    };
    struct fixture *fixture = *state;
    write_shard(fixture, "1.safetensors", TENSOR("a"), 4);
    write_shard(fixture, "2.safetensors", TENSOR("b"), 4);
    write_shard(fixture, "3.safetensors", TENSOR("b"), 4); /* not listed: not looked at */
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        moe4_tensors *tensors;
        write_index(fixture, cases[i].index);
        moe4_status status = moe4_tensors_open(&fixture->test.context, fixture->scratch.folder, &tensors);
        if (cases[i].message) {
            assert_null(tensors);
            if (status == MOE4_OK) fail_msg("%s accepted", cases[i].index);
            assert_refused(&fixture->test, status, MOE4_EFORMAT, cases[i].message);
            continue;
        }
        if (status != MOE4_OK) fail_msg("%s refused: %s", cases[i].index, fixture->test.context.message);
        if (strstr(cases[i].index, "\"b\"")) assert_non_null(moe4_tensors_find(tensors, "b"));
        moe4_tensors_close(tensors);
    }
}

/* A shard that came only in part, at every length: its own name, the tensor, where it should end and where the file
 * does. */
static void test_shard_in_part(void **state)
{
    struct fixture *fixture = *state;
    moe4_tensors *tensors;
    char message[96];
    write_index(fixture, MAP("\"a\":\"1.safetensors\",\"b\":\"2.safetensors\""));
    write_shard(fixture, "1.safetensors", TENSOR("a"), 4);
    for (int n = 0; n < 4; n++) {
        write_shard(fixture, "2.safetensors", TENSOR("b"), (size_t)n);
        snprintf(message, sizeof message, "2.safetensors: tensor \"b\": data ends at 4, but the file has %d", n);
        assert_refused(&fixture->test, moe4_tensors_open(&fixture->test.context, fixture->scratch.folder, &tensors),
                       MOE4_EFORMAT, message);
        assert_null(tensors);
    }
    scratch_write(&fixture->scratch, "2.safetensors", TENSOR("b"), 20); /* not even all of the header's length */
    assert_refused(&fixture->test, moe4_tensors_open(&fixture->test.context, fixture->scratch.folder, &tensors),
                   MOE4_EFORMAT, "2.safetensors: header of");
}

/* ---- Many tensors, little memory --------------------------------------------------------------------------------- */

static void test_many_tensors(void **state)
{
    enum { N_SHARDS = 4, N_EACH = 5000 };
    struct fixture *fixture = *state;
    moe4_tensors *tensors;
    char name[64], *header = malloc(N_EACH * 128), *index = malloc(N_SHARDS * N_EACH * 64), *i_at = index;
    i_at += sprintf(i_at, "{\"weight_map\":{");
    for (int s = 0; s < N_SHARDS; s++) {
        char *at = header;
        for (int i = 0; i < N_EACH; i++) {
            at += sprintf(at, "%c\"t.%d.%d\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[%d,%d]}", i ? ',' : '{',
                          s, i, i, i + 1);
            i_at += sprintf(i_at, "%s\"t.%d.%d\":\"%d.safetensors\"", s || i ? "," : "", s, i, s);
        }
        strcpy(at, "}");
        snprintf(name, sizeof name, "%d.safetensors", s);
        write_shard(fixture, name, header, N_EACH);
    }
    strcpy(i_at, "}}");
    write_index(fixture, index);
    assert_int_equal(moe4_tensors_open(&fixture->test.context, fixture->scratch.folder, &tensors), MOE4_OK);
    assert_int_equal(moe4_tensors_count(tensors), N_SHARDS * N_EACH);
    for (int64_t i = 0; i < N_SHARDS * N_EACH; i++) {
        const moe4_tensor *tensor = moe4_tensors_get(tensors, i);
        snprintf(name, sizeof name, "t.%" PRId64 ".%" PRId64, i / N_EACH, i % N_EACH);
        assert_string_equal(tensor->name, name);
        assert_ptr_equal(moe4_tensors_find(tensors, name), tensor);
    }
    assert_true(fixture->test.counter.live_bytes < 400 * N_SHARDS * N_EACH);
    moe4_tensors_close(tensors);
    free(header);
    free(index);
}

static void test_failing_allocations(void **state)
{
    struct fixture *fixture = *state;
    struct counter *counter = &fixture->test.counter;
    write_shard(fixture, "1.safetensors",
                "{\"__metadata__\":{\"format\":\"pt\"},\"b\":{\"dtype\":\"U8\",\"shape\":[6],\"data_offsets\":[4,10]},"
                "\"a\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[0,4]}}",
                10);
    write_shard(fixture, "2.safetensors", TENSOR("c"), 4);
    for (int indexed = 0; indexed < 2; indexed++) {
        if (indexed) write_index(fixture, MAP("\"a\":\"1.safetensors\",\"c\":\"2.safetensors\""));
        moe4_status status = MOE4_ENOMEM;
        for (counter->failing = 1; status == MOE4_ENOMEM; counter->failing++) {
            moe4_tensors *tensors;
            counter->n_calls = 0;
            status = moe4_tensors_open(&fixture->test.context, fixture->scratch.folder, &tensors);
            if (status == MOE4_ENOMEM) {
                assert_null(tensors);
                assert_message(&fixture->test, "out of memory");
            }
            moe4_tensors_close(tensors);
            assert_int_equal(counter->live, 0);
            fixture->test.context.message[0] = '\0';
        }
        assert_int_equal(status, MOE4_OK);
        assert_true(counter->failing > 10);
        counter->failing = 0;
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        FILE_TEST(test_folder_without_index), FILE_TEST(test_folder_with_index),   FILE_TEST(test_shard_in_part),
        FILE_TEST(test_many_tensors),         FILE_TEST(test_failing_allocations),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
