#include "fuzz.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tuning.h"

/* What an input may make the library allocate at once: the largest ratio of a file that is what it claims to be is
 * about 30, of a JSON array of one-digit numbers; the constant is for buffers of a fixed size. */
enum { JUSTIFIED_FACTOR = 64, JUSTIFIED_BYTES = 1 << 20 };

/* In front of each block, so that a wrong size given back is seen. */
enum { FRONT = 64 };

static struct memory {
    int64_t n_blocks;
    size_t n_bytes, peak_bytes;
    int64_t n_calls;
    int64_t failing; /* the call that fails, from 1; 0 = none */
    size_t justified_bytes;
} memory;

void fuzz_fail(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
    fputc('\n', stderr);
    abort();
}

/* ---- Memory --------------------------------------------------------------------------------------------------------
 */

/* A block ends where its memory ends, so that a sanitizer sees the first byte beyond. */
static void *counted_allocate(void *user, size_t n_bytes, size_t alignment)
{
    void *block;
    (void)user;
    FUZZ_CHECK(n_bytes > 0 && alignment <= FRONT);
    if (++memory.n_calls == memory.failing) return NULL;
    if (n_bytes > memory.justified_bytes || memory.n_bytes + n_bytes > memory.justified_bytes)
        fuzz_fail("%zu bytes are wanted beside %zu, but the input justifies only %zu", n_bytes, memory.n_bytes,
                  memory.justified_bytes);
    if (posix_memalign(&block, FRONT, n_bytes + FRONT) != 0) fuzz_fail("out of memory: %zu bytes", n_bytes);
    memcpy(block, &n_bytes, sizeof n_bytes);
    memory.n_blocks++;
    memory.n_bytes += n_bytes;
    return (char *)block + FRONT;
}

static void counted_release(void *user, void *memory_, size_t n_bytes)
{
    char *block = (char *)memory_ - FRONT;
    size_t taken;
    (void)user;
    memcpy(&taken, block, sizeof taken);
    if (taken != n_bytes) fuzz_fail("%zu bytes taken, but %zu given back", taken, n_bytes);
    memory.n_blocks--;
    memory.n_bytes -= n_bytes;
    free(block);
}

void fuzz_justify(size_t n_bytes)
{
    memory.justified_bytes += JUSTIFIED_FACTOR * n_bytes;
}

/* ---- Runs ----------------------------------------------------------------------------------------------------------
 */

static moe4_context *context_of_process(void)
{
    static const moe4_allocator allocator = {counted_allocate, counted_release, NULL};
    static moe4_context *context;
    if (context) return context;
    moe4_context_config config = MOE4_CONTEXT_CONFIG_INIT;
    config.isa = MOE4_ISA_C;
    config.n_threads = 1;
    config.allocator = &allocator;
    memory.justified_bytes = JUSTIFIED_BYTES;
    if (moe4_context_create(&config, &context) != MOE4_OK) fuzz_fail("%s", moe4_context_message(context));
    strcpy(context->device_name, "fuzz");
    return context;
}

static void run_once(moe4_context *context, const uint8_t *data, size_t n_bytes, int64_t failing, fuzz_body *body)
{
    memory.n_calls = 0;
    memory.failing = failing;
    memory.justified_bytes = JUSTIFIED_BYTES + JUSTIFIED_FACTOR * n_bytes;
    int64_t n_blocks = memory.n_blocks;
    size_t live_bytes = memory.n_bytes;
    context->message[0] = '\0';
    body(context, data, n_bytes);
    tuning_release(context);
    if (memory.n_blocks != n_blocks || memory.n_bytes != live_bytes)
        fuzz_fail("%lld blocks of %zd bytes are left allocated", (long long)(memory.n_blocks - n_blocks),
                  (ssize_t)(memory.n_bytes - live_bytes));
    memory.failing = 0;
}

/* FNV-1a */
static uint64_t hash(const uint8_t *data, size_t n_bytes)
{
    uint64_t value = 0xCBF29CE484222325u;
    for (size_t i = 0; i < n_bytes; i++) value = (value ^ data[i]) * 0x100000001B3u;
    return value ^ value >> 32;
}

int fuzz_run(const uint8_t *data, size_t n_bytes, fuzz_body *body)
{
    moe4_context *context = context_of_process();
    if (!n_bytes) data = (const uint8_t *)""; /* never NULL */
    run_once(context, data, n_bytes, 0, body);
    if (memory.n_calls)
        run_once(context, data, n_bytes, 1 + (int64_t)(hash(data, n_bytes) % (uint64_t)memory.n_calls), body);
    return 0;
}

void fuzz_check_status(const moe4_context *context, moe4_status status)
{
    const char *message = moe4_context_message(context);
    if (getenv("FUZZ_VERBOSE"))
        printf("  %s%s%s\n", moe4_status_name(status), status ? ": " : "", status ? message : "");
    if (status == MOE4_ENOMEM && !(memory.failing && memory.n_calls >= memory.failing))
        fuzz_fail("out of memory, but no allocation failed: \"%s\"", message);
    if (status != MOE4_OK && !*message) fuzz_fail("%s without a message", moe4_status_name(status));
}

void fuzz_touch(const void *bytes, size_t n_bytes)
{
    static volatile uint64_t sink;
    sink = sink + hash(bytes, n_bytes);
}
