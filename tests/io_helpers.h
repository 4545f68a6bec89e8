/* What the tests of files share: a context whose memory is counted and can be made to fail, and a scratch folder. */
#ifndef IO_HELPERS_H
#define IO_HELPERS_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "context.h"
#include "moe4/io.h"

/* Everything given back must be what was taken: block, size, and none left over. */
struct counter {
    int64_t live; /* blocks */
    int64_t live_bytes;
    int64_t peak_bytes;
    int64_t n_calls;
    int64_t failing; /* the call that fails, from 1; 0 = none */
};

/* A context with nothing but a counting allocator. */
struct test_context {
    moe4_context context;
    struct counter counter;
};
void context_start(struct test_context *test);
/* Checks that nothing is left allocated. */
void context_end(struct test_context *test);

/* The message of the last failure must contain the text. */
void assert_message(const struct test_context *test, const char *text);
/* status must be `expected`, and the message must contain the text. */
void assert_refused(const struct test_context *test, moe4_status status, moe4_status expected, const char *text);

/* A fresh empty folder, removed with all its content by scratch_remove. */
struct scratch {
    char folder[64];
    char path[256]; /* of the last scratch_path */
};
void scratch_create(struct scratch *scratch);
void scratch_remove(struct scratch *scratch);
/* folder/name, valid until the next call. */
const char *scratch_path(struct scratch *scratch, const char *name);
/* Writes folder/name and returns its path. */
const char *scratch_write(struct scratch *scratch, const char *name, const void *bytes, size_t n_bytes);
/* The number of entries in the folder. */
int scratch_count(const struct scratch *scratch);

/* Both, as a test's state; what every test of files begins and ends with. */
struct fixture {
    struct test_context test;
    struct scratch scratch;
};
int fixture_setup(void **state);
int fixture_teardown(void **state);
#define FILE_TEST(name) cmocka_unit_test_setup_teardown(name, fixture_setup, fixture_teardown)

/* A whole file; free it. */
unsigned char *load_bytes(const char *path, size_t *n_bytes);

/* A safetensors file in memory: length, header as given, data_bytes bytes 0, 1, 2, ... (mod 251); free it. */
unsigned char *make_file(const char *header, size_t data_bytes, size_t *n_bytes);

#endif
