/* forward allocates nothing, whatever the call: neither the library nor what it calls of libc. */
#include <setjmp.h>
#include <stdarg.h> /* for cmocka.h, as the next two */
#include <errno.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include <cmocka.h>

#include "call.h"

static _Atomic int64_t n_allocations; /* by any thread, since the process began */

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define HAS_SANITIZER 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define HAS_SANITIZER 1
#endif
#endif

#if defined(HAS_SANITIZER)
int __sanitizer_install_malloc_and_free_hooks(void (*allocated)(const volatile void *, size_t),
                                              void (*released)(const volatile void *));

static void count_allocated(const volatile void *memory, size_t bytes)
{
    (void)memory, (void)bytes;
    n_allocations++;
}

static void ignore_released(const volatile void *memory)
{
    (void)memory;
}

static void count_from_here(void)
{
    assert_true(__sanitizer_install_malloc_and_free_hooks(count_allocated, ignore_released));
}
#else
/* The program's own malloc and its like, which libc's functions call, too. */
void *__libc_malloc(size_t bytes);
void *__libc_calloc(size_t count, size_t bytes);
void *__libc_realloc(void *memory, size_t bytes);
void *__libc_memalign(size_t alignment, size_t bytes);

void *malloc(size_t bytes)
{
    n_allocations++;
    return __libc_malloc(bytes);
}

void *calloc(size_t count, size_t bytes)
{
    n_allocations++;
    return __libc_calloc(count, bytes);
}

void *realloc(void *memory, size_t bytes)
{
    n_allocations++;
    return __libc_realloc(memory, bytes);
}

void *aligned_alloc(size_t alignment, size_t bytes)
{
    n_allocations++;
    return __libc_memalign(alignment, bytes);
}

int posix_memalign(void **memory, size_t alignment, size_t bytes)
{
    n_allocations++;
    *memory = __libc_memalign(alignment, bytes);
    return *memory ? 0 : ENOMEM;
}

static void count_from_here(void) {}
#endif

static void check_call(moe4_context *context, const moe4_layer *layer, const moe4_layer_config *config,
                       const struct call_plan *plan)
{
    struct buffers buffers = {BUFFERS_PLAIN, NULL};
    struct call call = call_create(&buffers, config, plan);
    call_must_run(&buffers, context, layer, &call); /* makes the workspace */
    int64_t before = n_allocations;
    moe4_status status = plan->routing == ROUTE_IDS_PACKED
                             ? moe4_forward_experts(context, layer, &call.batch, &call.topk, &call.result)
                             : moe4_forward_router(context, layer, &call.batch, &call.logits, &call.result);
    int64_t after = n_allocations;
    assert_int_equal(status, MOE4_OK);
    assert_int_equal(after, before);
    buffers_release(&buffers);
}

static void test_forward_allocates_nothing(void **state)
{
    (void)state;
    static const enum route_source sources[] = {ROUTE_LOGITS_F32, ROUTE_IDS_PACKED};
    static const int64_t n_tokens[] = {1, 5, 65, 1100}; /* the last is grouped by several threads */
    struct buffers buffers = {BUFFERS_PLAIN, NULL};
    moe4_layer_config config = layer_config(64, 64, 160, 2); /* experts enough that qsort would want memory */
    struct weight_plan weights = {.biases = BIAS_BOTH, .seed = 5};
    moe4_expert *experts = weights_create(&buffers, &config, &weights);
    for (int32_t n_threads = 1; n_threads <= 3; n_threads++) {
        moe4_context *context = context_open(MOE4_ISA_AUTO, n_threads);
        moe4_layer *layer = layer_open(context, &config, experts);
        for (int i = 0; i < 32; i++) {
            struct call_plan plan = {.n_tokens = n_tokens[i % 4],
                                     .top_k = 2,
                                     .routing = sources[i / 4 % 2],
                                     .compute = (moe4_compute)(i / 8),
                                     .seed = (uint64_t)i};
            check_call(context, layer, &config, &plan);
        }
        moe4_layer_destroy(layer);
        moe4_context_destroy(context);
    }
    buffers_release(&buffers);
}

/* That allocations are counted at all. */
static void test_allocations_are_seen(void **state)
{
    (void)state;
    int64_t before = n_allocations;
    void *volatile memory = malloc(100);
    free(memory);
    assert_int_equal(n_allocations, before + 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_allocations_are_seen),
        cmocka_unit_test(test_forward_allocates_nothing),
    };
    count_from_here();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
