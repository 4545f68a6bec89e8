/* Structs of callers that were compiled with older or newer headers than the library. */
#include <setjmp.h>
#include <stdarg.h> /* for cmocka.h, as the next two */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "fixture.h"

enum { H = 64, I = 96, E = 8, A = 2 };

static void test_given(void **state)
{
    (void)state;
    struct {
        moe4_query query;
        char later[16];
    } newer = {MOE4_QUERY_INIT, {0}};
    moe4_context *context = context_open(MOE4_ISA_AUTO, 1);
    moe4_layer_config config = layer_config(H, I, E, A);
    newer.query.config = &config;
    newer.query.size = sizeof newer;
    assert_int_equal(moe4_supports(context, &newer.query), MOE4_OK); /* new fields, all default */
    newer.later[15] = 1;
    assert_int_equal(moe4_supports(context, &newer.query), MOE4_EUNSUPPORTED);
    assert_non_null(strstr(moe4_context_message(context), "query uses a field"));

    /* An older caller's query ends before n_tokens: what lies behind it is not the library's to read. */
    newer.query.n_tokens = -1;
    newer.query.size = sizeof newer.query;
    assert_int_equal(moe4_supports(context, &newer.query), MOE4_EINVAL);
    newer.query.size = offsetof(moe4_query, n_tokens);
    assert_int_equal(moe4_supports(context, &newer.query), MOE4_OK);
    moe4_context_destroy(context);

    /* Nor is the allocator of a config that ends before it. */
    struct buffers buffers = {BUFFERS_GUARD_AFTER, NULL};
    moe4_context_config whole = MOE4_CONTEXT_CONFIG_INIT;
    whole.size = offsetof(moe4_context_config, pool);
    moe4_context_config *older = buffers_copy(&buffers, &whole, whole.size);
    assert_int_equal(moe4_context_create(older, &context), MOE4_OK);
    moe4_context_destroy(context);
    buffers_release(&buffers);
}

/* What a caller has filled: as much as it has room for, and no more than the library knows. */
static void test_filled(void **state)
{
    (void)state;
    struct {
        moe4_context_info info;
        char later[16];
    } newer = {MOE4_CONTEXT_INFO_INIT, "as it was"};
    moe4_context *context = context_open(MOE4_ISA_AUTO, 1);
    newer.info.size = sizeof newer;
    assert_int_equal(moe4_context_describe(context, &newer.info), MOE4_OK);
    assert_int_equal(newer.info.size, sizeof newer);
    assert_non_null(newer.info.isa_name);
    assert_string_equal(newer.later, "as it was");

    struct buffers buffers = {BUFFERS_GUARD_AFTER, NULL};
    moe4_context_info whole = MOE4_CONTEXT_INFO_INIT;
    whole.size = offsetof(moe4_context_info, isa_name);
    moe4_context_info *older = buffers_copy(&buffers, &whole, whole.size);
    assert_int_equal(moe4_context_describe(context, older), MOE4_OK);
    assert_int_equal(older->size, whole.size);
    assert_int_equal(older->isa, newer.info.isa);
    buffers_release(&buffers);
    moe4_context_destroy(context);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_given), cmocka_unit_test(test_filled)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
