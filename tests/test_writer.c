/* Writing tensor files: what is written is read back, and nothing half-written is ever seen. */
#include "io_helpers.h"

#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

static const moe4_tensor two[] = {
    {.name = "z\"\\\n\xc3\xa9", .dtype = "U8", .rank = 2, .shape = {2, 3}},
    {.name = "a", .dtype = "BF16", .rank = 1, .shape = {4}},
};
static const char *const two_metadata[] = {"format", "pt", "moe4.\"rule\"", "even\t\x7f", NULL};

static const char *target(struct fixture *fixture)
{
    return scratch_path(&fixture->scratch, "out.safetensors");
}

static moe4_status create_two(struct fixture *fixture, moe4_writer **writer)
{
    return moe4_writer_create(&fixture->test.context, target(fixture), two, 2, two_metadata, writer);
}

static void write_two(struct fixture *fixture, moe4_writer *writer)
{
    moe4_context *context = &fixture->test.context;
    assert_int_equal(moe4_writer_write(context, writer, 1, 4, 4, "4567"), MOE4_OK);
    assert_int_equal(moe4_writer_write(context, writer, 0, 0, 6, "abcdef"), MOE4_OK);
    assert_int_equal(moe4_writer_write(context, writer, 1, 0, 4, "0123"), MOE4_OK);
    assert_int_equal(moe4_writer_write(context, writer, 1, 8, 0, NULL), MOE4_OK);
}

static void test_exact_bytes(void **state)
{
    static const char header[] =
        "{\"__metadata__\":{\"format\":\"pt\",\"moe4.\\\"rule\\\"\":\"even\\u0009\x7f\"},"
        "\"z\\\"\\\\\\u000a\xc3\xa9\":{\"dtype\":\"U8\",\"shape\":[2,3],\"data_offsets\":[0,6]},"
        "\"a\":{\"dtype\":\"BF16\",\"shape\":[4],\"data_offsets\":[6,14]}}";
    struct fixture *fixture = *state;
    moe4_writer *writer;
    size_t n_bytes, padded = (sizeof header - 1 + 7) / 8 * 8;
    assert_int_equal(create_two(fixture, &writer), MOE4_OK);
    write_two(fixture, writer);
    assert_int_equal(moe4_writer_commit(&fixture->test.context, writer), MOE4_OK);
    unsigned char *file = load_bytes(target(fixture), &n_bytes);
    assert_int_equal(n_bytes, 8 + padded + 14);
    assert_int_equal(file[0] | file[1] << 8, padded);
    assert_memory_equal(file + 2, "\0\0\0\0\0\0", 6);
    assert_memory_equal(file + 8, header, sizeof header - 1);
    for (size_t i = sizeof header - 1; i < padded; i++) assert_int_equal(file[8 + i], ' ');
    assert_memory_equal(file + 8 + padded, "abcdef01234567", 14);
    free(file);
    assert_int_equal(scratch_count(&fixture->scratch), 1);
}

static void test_read_back(void **state)
{
    struct fixture *fixture = *state;
    moe4_context *context = &fixture->test.context;
    moe4_writer *writer;
    moe4_tensors *tensors;
    char bytes[8];
    assert_int_equal(create_two(fixture, &writer), MOE4_OK);
    write_two(fixture, writer);
    assert_int_equal(moe4_writer_commit(context, writer), MOE4_OK);
    assert_int_equal(moe4_tensors_open(context, target(fixture), &tensors), MOE4_OK);
    assert_int_equal(moe4_tensors_count(tensors), 2);
    const moe4_tensor *z = moe4_tensors_find(tensors, two[0].name), *a = moe4_tensors_find(tensors, "a");
    assert_int_equal(z->offset % 8, 0);
    assert_int_equal(z->rank, 2);
    assert_int_equal(z->shape[1], 3);
    assert_int_equal(moe4_tensors_read(context, tensors, a, 0, 8, bytes), MOE4_OK);
    assert_memory_equal(bytes, "01234567", 8);
    assert_string_equal(moe4_tensors_metadata(tensors, "moe4.\"rule\""), "even\t\x7f");
    moe4_tensors_close(tensors);
}

/* Any number of tensors and any header length: data always begins at a multiple of 8. */
static void test_alignment(void **state)
{
    struct fixture *fixture = *state;
    moe4_context *context = &fixture->test.context;
    for (int n = 0; n < 9; n++) {
        char names[9][16];
        moe4_tensor tensors[9];
        moe4_writer *writer;
        moe4_tensors *read;
        for (int i = 0; i < n; i++) {
            snprintf(names[i], sizeof names[i], "%.*s", i + 1, "abcdefghij");
            tensors[i] = (moe4_tensor){.name = names[i], .dtype = i % 2 ? "U8" : "F64", .rank = i % 3, .shape = {0, 5}};
        }
        assert_int_equal(moe4_writer_create(context, target(fixture), tensors, n, NULL, &writer), MOE4_OK);
        for (int i = 0; i < n; i++)
            if (i % 3 == 0)
                assert_int_equal(moe4_writer_write(context, writer, i, 0, i % 2 ? 1 : 8, "12345678"), MOE4_OK);
        assert_int_equal(moe4_writer_commit(context, writer), MOE4_OK);
        assert_int_equal(moe4_tensors_open(context, target(fixture), &read), MOE4_OK);
        assert_int_equal(moe4_tensors_count(read), n);
        if (n) assert_int_equal(moe4_tensors_get(read, 0)->offset % 8, 0);
        moe4_tensors_close(read);
    }
}

static void test_refused_descriptions(void **state)
{
    static const struct {
        moe4_tensor tensor;
        const char *message;
    } cases[] = {
        {{.name = NULL, .dtype = "U8"}, "tensor name is NULL"},
        {{.name = "\xff", .dtype = "U8"}, "is not UTF-8"},
        {{.name = "__metadata__", .dtype = "U8"}, "cannot be named __metadata__"},
        {{.name = "t", .dtype = "U9"}, "out.safetensors: tensor \"t\": unknown dtype \"U9\""},
        {{.name = "t", .dtype = NULL}, "unknown dtype \"NULL\""},
        {{.name = "t", .dtype = "U8", .rank = 9}, "rank 9, expected 0 to 8"},
        {{.name = "t", .dtype = "U8", .rank = -1}, "rank -1, expected 0 to 8"},
        {{.name = "t", .dtype = "U8", .rank = 2, .shape = {3, -1}}, "U8 [3, -1] has a negative dimension"},
        {{.name = "t", .dtype = "F4", .rank = 1, .shape = {3}}, "F4 [3] does not fill whole bytes"},
        {{.name = "t", .dtype = "U8", .rank = 2, .shape = {INT64_MAX, 2}}, "more elements than 63 bits"},
        {{.name = "a", .dtype = "U8"}, "tensor \"a\" is given twice"},
    };
    static const char *const bad_metadata[][5] = {
        {"a", NULL}, {"a", "\xff", NULL}, {"\xff", "a", NULL}, {"a", "1", "a", "2", NULL}};
    struct fixture *fixture = *state;
    moe4_context *context = &fixture->test.context;
    moe4_writer *writer;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const moe4_tensor tensors[] = {two[1], cases[i].tensor};
        assert_refused(&fixture->test, moe4_writer_create(context, target(fixture), tensors, 2, NULL, &writer),
                       MOE4_EINVAL, cases[i].message);
        assert_null(writer);
    }
    for (size_t i = 0; i < sizeof bad_metadata / sizeof *bad_metadata; i++)
        assert_refused(&fixture->test, moe4_writer_create(context, target(fixture), two, 2, bad_metadata[i], &writer),
                       MOE4_EINVAL, "out.safetensors: metadata");
    assert_int_equal(moe4_writer_create(context, target(fixture), two, -1, NULL, &writer), MOE4_EINVAL);
    assert_int_equal(moe4_writer_create(context, target(fixture), NULL, 1, NULL, &writer), MOE4_EINVAL);
    assert_int_equal(moe4_writer_create(context, NULL, two, 2, NULL, &writer), MOE4_EINVAL);
    assert_int_equal(moe4_writer_create(context, target(fixture), two, 2, NULL, NULL), MOE4_EINVAL);
    assert_int_equal(moe4_writer_create(NULL, target(fixture), two, 2, NULL, &writer), MOE4_EINVAL);
    assert_int_equal(scratch_count(&fixture->scratch), 0);
}

static void test_huge_total_is_refused(void **state)
{
    struct fixture *fixture = *state;
    static const char *const names[9] = {"a", "b", "c", "d", "e", "f", "g", "h", "i"};
    moe4_tensor tensors[9];
    moe4_writer *writer;
    for (int i = 0; i < 9; i++)
        tensors[i] = (moe4_tensor){.name = names[i], .dtype = "U8", .rank = 1, .shape = {INT64_MAX / 8}};
    for (int n = 8; n <= 9; n++) /* 8 would fit, but not behind a header */
        assert_refused(&fixture->test,
                       moe4_writer_create(&fixture->test.context, target(fixture), tensors, n, NULL, &writer),
                       MOE4_EINVAL, "63 bits");
    assert_int_equal(scratch_count(&fixture->scratch), 0);
}

static void test_refused_writes(void **state)
{
    static const struct {
        int32_t index;
        int64_t first, n_bytes;
        const char *message;
    } cases[] = {
        {2, 0, 1, "tensor 2, but there are 2"},
        {-1, 0, 1, "tensor -1, but there are 2"},
        {1, 0, 9, "tensor \"a\": 9 bytes from 0, but it has 8"},
        {1, 8, 1, "tensor \"a\": 1 bytes from 8"},
        {1, -1, 1, "tensor \"a\": 1 bytes from -1"},
        {1, 1, INT64_MAX, "tensor \"a\""},
        {1, 0, -1, "tensor \"a\": -1 bytes"},
        {1, 0, 5, "tensor \"a\": bytes written twice"},
    };
    struct fixture *fixture = *state;
    moe4_context *context = &fixture->test.context;
    moe4_writer *writer;
    assert_int_equal(create_two(fixture, &writer), MOE4_OK);
    assert_int_equal(moe4_writer_write(context, writer, 1, 4, 4, "4567"), MOE4_OK);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        assert_refused(&fixture->test,
                       moe4_writer_write(context, writer, cases[i].index, cases[i].first, cases[i].n_bytes, "12345678"),
                       MOE4_EINVAL, cases[i].message);
    assert_int_equal(moe4_writer_write(context, NULL, 0, 0, 1, "x"), MOE4_EINVAL);
    assert_int_equal(moe4_writer_write(context, writer, 0, 0, 1, NULL), MOE4_EINVAL);
    moe4_writer_discard(writer);
}

/* Until the commit the old file stays as it is, and a failed or given-up one leaves it so. */
static void test_old_file_stays(void **state)
{
    struct fixture *fixture = *state;
    moe4_context *context = &fixture->test.context;
    moe4_writer *writer;
    size_t n_bytes;
    scratch_write(&fixture->scratch, "out.safetensors", "old", 3);
    for (int round = 0; round < 2; round++) {
        assert_int_equal(create_two(fixture, &writer), MOE4_OK);
        assert_int_equal(scratch_count(&fixture->scratch), 2);
        assert_int_equal(moe4_writer_write(context, writer, 0, 0, 6, "abcdef"), MOE4_OK);
        assert_int_equal(moe4_writer_write(context, writer, 1, 0, 7, "0123456"), MOE4_OK);
        if (round)
            moe4_writer_discard(writer);
        else
            assert_refused(&fixture->test, moe4_writer_commit(context, writer), MOE4_EINVAL,
                           "out.safetensors: tensor \"a\": 7 bytes written of 8");
        assert_int_equal(scratch_count(&fixture->scratch), 1);
        unsigned char *file = load_bytes(target(fixture), &n_bytes);
        assert_int_equal(n_bytes, 3);
        assert_memory_equal(file, "old", 3);
        free(file);
    }
    assert_int_equal(create_two(fixture, &writer), MOE4_OK);
    write_two(fixture, writer);
    unsigned char *file = load_bytes(target(fixture), &n_bytes);
    assert_memory_equal(file, "old", 3);
    free(file);
    assert_int_equal(moe4_writer_commit(context, writer), MOE4_OK);
    assert_int_equal(scratch_count(&fixture->scratch), 1);
    file = load_bytes(target(fixture), &n_bytes);
    assert_true(n_bytes > 100);
    free(file);
    assert_int_equal(moe4_writer_commit(context, NULL), MOE4_EINVAL);
    moe4_writer_discard(NULL);
}

static void test_permissions(void **state)
{
    struct fixture *fixture = *state;
    struct stat info;
    moe4_writer *writer;
    mode_t old = umask(027);
    assert_int_equal(create_two(fixture, &writer), MOE4_OK);
    write_two(fixture, writer);
    assert_int_equal(moe4_writer_commit(&fixture->test.context, writer), MOE4_OK);
    umask(old);
    assert_int_equal(stat(target(fixture), &info), 0);
    assert_int_equal(info.st_mode & 0777, 0640);
}

static void test_impossible_places(void **state)
{
    struct fixture *fixture = *state;
    moe4_context *context = &fixture->test.context;
    moe4_writer *writer;
    const char *path = scratch_path(&fixture->scratch, "missing/out.safetensors");
    assert_refused(&fixture->test, moe4_writer_create(context, path, two, 2, NULL, &writer), MOE4_EIO, "No such file");
    assert_null(writer);
    /* A file takes the place of a file, never of a device or a folder. */
    assert_refused(&fixture->test, moe4_writer_create(context, "/dev/null", two, 2, NULL, &writer), MOE4_EIO,
                   "/dev/null: is there, and not a regular file");
    assert_int_equal(create_two(fixture, &writer), MOE4_OK);
    write_two(fixture, writer);
    assert_int_equal(mkdir(target(fixture), 0700), 0);
    moe4_writer *other;
    assert_refused(&fixture->test, create_two(fixture, &other), MOE4_EIO, "is there, and not a regular file");
    assert_refused(&fixture->test, moe4_writer_commit(context, writer), MOE4_EIO, "cannot rename");
    assert_int_equal(scratch_count(&fixture->scratch), 1);
}

/* A limit on file sizes stands for a full disk: the write that crosses it is cut short, the next one fails. */
static void test_full_disk(void **state)
{
    struct fixture *fixture = *state;
    moe4_context *context = &fixture->test.context;
    moe4_writer *writer;
    struct rlimit old, small;
    const moe4_tensor large = {.name = "t", .dtype = "U8", .rank = 1, .shape = {10000}};
    char *bytes = calloc(1, 10000);
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &old), 0);
    small = old;
    void (*old_handler)(int) = signal(SIGXFSZ, SIG_IGN);
    for (rlim_t limit = 10; limit < 10000; limit += 4000) {
        small.rlim_cur = limit;
        assert_int_equal(setrlimit(RLIMIT_FSIZE, &small), 0);
        moe4_status created = moe4_writer_create(context, target(fixture), &large, 1, NULL, &writer);
        moe4_status written = created ? created : moe4_writer_write(context, writer, 0, 0, 10000, bytes);
        int n_entries = scratch_count(&fixture->scratch);
        moe4_status committed = created ? created : moe4_writer_commit(context, writer);
        assert_int_equal(setrlimit(RLIMIT_FSIZE, &old), 0);
        assert_int_equal(created, limit == 10 ? MOE4_EIO : MOE4_OK); /* not even the header fits */
        assert_int_equal(written, MOE4_EIO);
        assert_int_equal(n_entries, limit == 10 ? 0 : 1);
        assert_int_equal(committed, limit == 10 ? MOE4_EIO : MOE4_EINVAL); /* it knows what is missing */
        assert_int_equal(scratch_count(&fixture->scratch), 0);
    }
    signal(SIGXFSZ, old_handler);
    free(bytes);
}

static void test_failing_allocations(void **state)
{
    struct fixture *fixture = *state;
    struct counter *counter = &fixture->test.counter;
    moe4_status status = MOE4_ENOMEM;
    for (counter->failing = 1; status == MOE4_ENOMEM; counter->failing++) {
        moe4_writer *writer;
        counter->n_calls = 0;
        status = create_two(fixture, &writer);
        if (status == MOE4_ENOMEM) {
            assert_null(writer);
            assert_message(&fixture->test, "out of memory");
            assert_int_equal(scratch_count(&fixture->scratch), 0);
        }
        moe4_writer_discard(writer);
        assert_int_equal(counter->live, 0);
        fixture->test.context.message[0] = '\0';
    }
    assert_int_equal(status, MOE4_OK);
    assert_true(counter->failing > 8);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        FILE_TEST(test_exact_bytes),
        FILE_TEST(test_read_back),
        FILE_TEST(test_alignment),
        FILE_TEST(test_refused_descriptions),
        FILE_TEST(test_huge_total_is_refused),
        FILE_TEST(test_refused_writes),
        FILE_TEST(test_old_file_stays),
        FILE_TEST(test_permissions),
        FILE_TEST(test_impossible_places),
        FILE_TEST(test_full_disk),
        FILE_TEST(test_failing_allocations),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
