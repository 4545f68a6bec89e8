#include "io_helpers.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* Before each block: its size, so that a wrong size given back is seen. */
enum { FRONT = 64 };

static void *counted_allocate(void *user, size_t bytes, size_t alignment)
{
    struct counter *counter = user;
    assert_true(bytes > 0 && alignment <= FRONT);
    if (++counter->n_calls == counter->failing) return NULL;
    void *memory; /* ends where the block ends, so that a sanitizer sees the first byte beyond */
    if (bytes > SIZE_MAX - FRONT || posix_memalign(&memory, FRONT, bytes + FRONT) != 0) return NULL;
    unsigned char *block = memory;
    memcpy(block, &bytes, sizeof bytes);
    memset(block + FRONT, 0xA5, bytes < 65536 ? bytes : 65536);
    counter->live++;
    counter->live_bytes += (int64_t)bytes;
    if (counter->live_bytes > counter->peak_bytes) counter->peak_bytes = counter->live_bytes;
    return block + FRONT;
}

static void counted_release(void *user, void *memory, size_t bytes)
{
    struct counter *counter = user;
    unsigned char *block = (unsigned char *)memory - FRONT;
    size_t taken;
    memcpy(&taken, block, sizeof taken);
    assert_int_equal(taken, bytes);
    counter->live--;
    counter->live_bytes -= (int64_t)bytes;
    free(block);
}

void context_start(struct test_context *test)
{
    memset(test, 0, sizeof *test);
    test->context.allocator = (moe4_allocator){counted_allocate, counted_release, &test->counter};
}

void context_end(struct test_context *test)
{
    assert_int_equal(test->counter.live, 0);
    assert_int_equal(test->counter.live_bytes, 0);
}

void assert_message(const struct test_context *test, const char *text)
{
    if (!strstr(test->context.message, text)) fail_msg("message \"%s\" lacks \"%s\"", test->context.message, text);
}

void assert_refused(const struct test_context *test, moe4_status status, moe4_status expected, const char *text)
{
    if (status != expected)
        fail_msg("%s instead of %s: \"%s\"", moe4_status_name(status), moe4_status_name(expected),
                 test->context.message);
    assert_message(test, text);
}

void scratch_create(struct scratch *scratch)
{
    const char *base = getenv("TMPDIR"), *memory = "/dev/shm"; /* where a flush costs nothing */
    if (!base) base = access(memory, W_OK) == 0 ? memory : "/tmp";
    snprintf(scratch->folder, sizeof scratch->folder, "%.40s/moe4-test-XXXXXX", base);
    assert_non_null(mkdtemp(scratch->folder));
}

void scratch_remove(struct scratch *scratch)
{
    DIR *folder = opendir(scratch->folder);
    assert_non_null(folder);
    for (const struct dirent *entry; (entry = readdir(folder));) {
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0) continue;
        assert_int_equal(remove(scratch_path(scratch, entry->d_name)), 0);
    }
    closedir(folder);
    assert_int_equal(rmdir(scratch->folder), 0);
}

const char *scratch_path(struct scratch *scratch, const char *name)
{
    snprintf(scratch->path, sizeof scratch->path, "%s/%.180s", scratch->folder, name);
    return scratch->path;
}

/* Over what is there: a file cut to nothing first would make some file systems flush it each time. */
const char *scratch_write(struct scratch *scratch, const char *name, const void *bytes, size_t n_bytes)
{
    int fd = open(scratch_path(scratch, name), O_WRONLY | O_CREAT, 0600);
    assert_true(fd >= 0);
    assert_int_equal(write(fd, bytes, n_bytes), n_bytes);
    assert_int_equal(ftruncate(fd, (off_t)n_bytes), 0);
    assert_int_equal(close(fd), 0);
    return scratch->path;
}

int scratch_count(const struct scratch *scratch)
{
    int count = 0;
    DIR *folder = opendir(scratch->folder);
    assert_non_null(folder);
    for (const struct dirent *entry; (entry = readdir(folder));)
        count += strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0;
    closedir(folder);
    return count;
}

int fixture_setup(void **state)
{
    struct fixture *fixture = calloc(1, sizeof *fixture);
    assert_non_null(fixture);
    context_start(&fixture->test);
    scratch_create(&fixture->scratch);
    *state = fixture;
    return 0;
}

int fixture_teardown(void **state)
{
    struct fixture *fixture = *state;
    context_end(&fixture->test);
    scratch_remove(&fixture->scratch);
    free(fixture);
    return 0;
}

unsigned char *load_bytes(const char *path, size_t *n_bytes)
{
    FILE *file = fopen(path, "rb");
    assert_non_null(file);
    assert_int_equal(fseek(file, 0, SEEK_END), 0);
    *n_bytes = (size_t)ftell(file);
    rewind(file);
    unsigned char *bytes = malloc(*n_bytes + 1);
    assert_non_null(bytes);
    assert_int_equal(fread(bytes, 1, *n_bytes, file), *n_bytes);
    fclose(file);
    return bytes;
}

unsigned char *make_file(const char *header, size_t data_bytes, size_t *n_bytes)
{
    size_t length = strlen(header);
    *n_bytes = 8 + length + data_bytes;
    unsigned char *file = malloc(*n_bytes);
    assert_non_null(file);
    for (int i = 0; i < 8; i++) file[i] = (unsigned char)(length >> 8 * i);
    memcpy(file + 8, header, length);
    for (size_t i = 0; i < data_bytes; i++) file[8 + length + i] = (unsigned char)(i % 251);
    return file;
}
