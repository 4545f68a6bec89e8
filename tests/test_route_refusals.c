/* Routing: what is refused, in which words. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

#include "context.h"
#include "route_calls.h"

static void routings_are_judged(void **state)
{
    (void)state;
    const void *given = "only looked at as a pointer"; /* never read */
    const struct {
        moe4_routing routing;
        int32_t n_experts;
        const char *complaint; /* part of the message; NULL: fine */
    } cases[] = {
        {{.method = MOE4_ROUTING_NONE}, 8, NULL},
        {{.method = MOE4_ROUTING_NONE, .top_k = 4}, 8, NULL},
        {{.method = MOE4_ROUTING_NONE, .top_k = 9}, 8, "top_k is 9, expected 0..8"},
        {{.method = MOE4_ROUTING_NONE, .scaling_factor = 2.0f}, 8, "the routing method is not"},
        {{.method = MOE4_ROUTING_NONE, .correction_bias = given}, 8, "the routing method is not"},
        {{.method = 13, .top_k = 1}, 8, "routing method 13 is unknown"},
        {{.method = -1, .top_k = 1}, 8, "routing method -1 is unknown"},
        {{.method = MOE4_ROUTING_RENORMALIZE, .top_k = 4}, 0, "n_experts is 0, expected 1..32767"},
        {{.method = MOE4_ROUTING_RENORMALIZE, .top_k = 4}, 32768, "n_experts is 32768, expected 1..32767"},
        {{.method = MOE4_ROUTING_RENORMALIZE, .top_k = 128}, 32767, NULL},
        {{.method = MOE4_ROUTING_RENORMALIZE, .top_k = 129}, 32767, "top_k is 129, expected 1..128 (of 32767"},
        {{.method = MOE4_ROUTING_RENORMALIZE, .top_k = 0}, 8, "renormalize: top_k is 0, expected 1..8"},
        {{.method = MOE4_ROUTING_RENORMALIZE, .top_k = 9}, 8, "renormalize: top_k is 9, expected 1..8"},
        {{.method = MOE4_ROUTING_LLAMA4, .top_k = 2}, 8, "llama4: top_k is 2, expected 1..1"},
        {{.method = MOE4_ROUTING_MINIMAX2, .top_k = 2, .n_group = 1, .topk_group = 1}, 8, NULL},
        {{.method = MOE4_ROUTING_MINIMAX2, .top_k = 2, .n_group = 2, .topk_group = 1}, 8, "minimax2 has no groups"},
        {{.method = MOE4_ROUTING_DEFAULT, .top_k = 2, .topk_group = 2}, 8, "topk_group is 2, expected 0 or 1"},
        {{.method = MOE4_ROUTING_DEEPSEEK_V3, .top_k = 8, .n_group = 4, .topk_group = 4}, 8, NULL},
        {{.method = MOE4_ROUTING_DEEPSEEK_V3, .top_k = 4, .n_group = 4, .topk_group = 2}, 8, NULL},
        {{.method = MOE4_ROUTING_DEEPSEEK_V3, .top_k = 5, .n_group = 4, .topk_group = 2}, 8, "leave 4 experts"},
        {{.method = MOE4_ROUTING_DEEPSEEK_V3, .top_k = 2, .n_group = 3, .topk_group = 2},
         8,
         "n_group is 3, expected a"},
        {{.method = MOE4_ROUTING_DEEPSEEK_V3, .top_k = 2, .n_group = 8, .topk_group = 2},
         8,
         "n_group is 8, expected a"},
        {{.method = MOE4_ROUTING_DEEPSEEK_V3, .top_k = 2, .n_group = -2, .topk_group = 1}, 8, "n_group is -2"},
        {{.method = MOE4_ROUTING_DEEPSEEK_V3, .top_k = 2, .n_group = 4, .topk_group = 0},
         8,
         "topk_group is 0, expected"},
        {{.method = MOE4_ROUTING_DEEPSEEK_V3, .top_k = 2, .n_group = 4, .topk_group = 5},
         8,
         "topk_group is 5, expected"},
        {{.method = MOE4_ROUTING_DEEPSEEK_V3, .top_k = 2, .topk_group = -1}, 8, "topk_group is -1"},
        {{.method = MOE4_ROUTING_SQRT_SOFTPLUS,
          .top_k = 2,
          .correction_bias = given,
          .correction_bias_dtype = MOE4_DTYPE_F16},
         8,
         NULL},
        {{.method = MOE4_ROUTING_SQRT_SOFTPLUS, .top_k = 2, .correction_bias = given},
         8,
         "correction_bias_dtype is none"},
        {{.method = MOE4_ROUTING_MINIMAX2,
          .top_k = 2,
          .correction_bias = given,
          .correction_bias_dtype = MOE4_DTYPE_I32},
         8,
         "correction_bias_dtype is i32, expected f32, bf16 or f16"},
        {{.method = MOE4_ROUTING_RENORMALIZE,
          .top_k = 2,
          .correction_bias = given,
          .correction_bias_dtype = MOE4_DTYPE_F32},
         8,
         "renormalize: correction_bias is given"},
        {{.method = MOE4_ROUTING_SIGMOID_RENORM, .top_k = 2, .renormalize = MOE4_RENORMALIZE_NO}, 8, NULL},
        {{.method = MOE4_ROUTING_SIGMOID_RENORM, .top_k = 2, .renormalize = 2}, 8, "renormalize is 2"},
        {{.method = MOE4_ROUTING_RENORMALIZE, .top_k = 2, .renormalize = MOE4_RENORMALIZE_NO},
         8,
         "only sigmoid_renorm"},
        {{.method = MOE4_ROUTING_TOPK, .top_k = 2, .scaling_factor = -1.5f}, 8, NULL},
        {{.method = MOE4_ROUTING_TOPK, .top_k = 2, .scaling_factor = NAN}, 8, "scaling_factor is nan"},
        {{.method = MOE4_ROUTING_TOPK, .top_k = 2, .scaling_factor = INFINITY}, 8, "scaling_factor is inf"},
        {{.method = MOE4_ROUTING_HASH,
          .top_k = 2,
          .hash_table = given,
          .hash_table_dtype = MOE4_DTYPE_I64,
          .vocab_size = 1},
         8,
         NULL},
        {{.method = MOE4_ROUTING_HASH, .top_k = 2}, 8, "hash: hash_table is NULL"},
        {{.method = MOE4_ROUTING_HASH, .top_k = 2, .hash_table = given, .vocab_size = 9},
         8,
         "hash_table_dtype is none"},
        {{.method = MOE4_ROUTING_HASH, .top_k = 2, .hash_table = given, .hash_table_dtype = MOE4_DTYPE_I32},
         8,
         "vocab_size is 0, expected at least 1"},
        {{.method = MOE4_ROUTING_HASH, .top_k = 2, .correction_bias = given, .hash_table = given, .vocab_size = 9},
         8,
         "hash: correction_bias is given"},
        {{.method = MOE4_ROUTING_TOPK, .top_k = 2, .hash_table = given}, 8, "topk: hash_table is given"},
        {{.method = MOE4_ROUTING_TOPK, .top_k = 2, .vocab_size = 9}, 8, "topk: vocab_size is given"},
    };
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        moe4_context *context = route_context();
        moe4_status status = route_validate(context, &cases[c].routing, cases[c].n_experts);
        if (status != (cases[c].complaint ? MOE4_EINVAL : MOE4_OK) ||
            (cases[c].complaint && !strstr(context->message, cases[c].complaint)))
            fail_msg("case %zu: %s, \"%s\"", c, moe4_status_name(status), context->message);
    }
}

static void bad_table_entries_are_found(void **state)
{
    (void)state;
    moe4_context *context = route_context();
    struct router router;
    int32_t copy[6];
    int64_t table[6] = {0, 1, 2, 3, 3, 0};
    moe4_routing routing = routing_of(MOE4_ROUTING_HASH, 2);
    routing.hash_table = table;
    routing.hash_table_dtype = MOE4_DTYPE_I64;
    routing.vocab_size = 3;
    assert_int_equal(route_init(context, &router, &routing, 4, copy), MOE4_OK);
    table[3] = 4;
    assert_int_equal(route_init(context, &router, &routing, 4, copy), MOE4_EINVAL);
    assert_string_equal(context->message, "hash_table[1][1] is 4, expected an expert, 0..3");
    table[3] = (INT64_C(1) << 32) + 1; /* 1 in its low half */
    assert_int_equal(route_init(context, &router, &routing, 4, copy), MOE4_EINVAL);
    table[3] = -1;
    assert_int_equal(route_init(context, &router, &routing, 4, copy), MOE4_EINVAL);
    size_t bytes = 1;
    routing.vocab_size = INT64_MAX;
    assert_int_equal(route_store_bytes(context, &routing, 4, &bytes), MOE4_EINVAL);
    assert_int_equal(bytes, 1);
}

static void bad_tokens_are_found(void **state)
{
    (void)state;
    moe4_context *context = route_context();
    struct router router;
    int32_t copy[6], token_ids[3] = {0, 2, 1};
    const int32_t table[6] = {0, 1, 2, 3, 3, 0};
    moe4_routing routing = routing_of(MOE4_ROUTING_HASH, 2);
    routing.hash_table = table;
    routing.hash_table_dtype = MOE4_DTYPE_I32;
    routing.vocab_size = 3;
    assert_int_equal(route_init(context, &router, &routing, 4, copy), MOE4_OK);
    assert_int_equal(route_check_tokens(context, &router, token_ids, 3), MOE4_OK);
    token_ids[2] = 3;
    assert_int_equal(route_check_tokens(context, &router, token_ids, 2), MOE4_OK);
    assert_int_equal(route_check_tokens(context, &router, token_ids, 3), MOE4_EINVAL);
    assert_string_equal(context->message, "token_ids[2] is 3, expected 0..2 (vocab_size)");
    token_ids[1] = -1;
    assert_int_equal(route_check_tokens(context, &router, token_ids, 3), MOE4_EINVAL);
    assert_int_equal(route_check_tokens(context, &router, NULL, 1), MOE4_EINVAL);
    assert_int_equal(route_check_tokens(context, &router, NULL, 0), MOE4_OK);
    routing = routing_of(MOE4_ROUTING_RENORMALIZE, 2);
    assert_int_equal(route_init(context, &router, &routing, 4, copy), MOE4_OK);
    assert_int_equal(route_check_tokens(context, &router, NULL, 3), MOE4_OK);
}

static void method_names(void **state)
{
    (void)state;
    static const char *const names[] = {"default",           "renormalize",  "deepseek_v3",    "llama4",
                                        "renormalize_naive", "topk",         "sigmoid_renorm", "minimax2",
                                        "sigmoid",           "topk_sigmoid", "sqrt_softplus",  "hash"};
    for (int m = MOE4_ROUTING_DEFAULT; m <= MOE4_ROUTING_HASH; m++)
        assert_string_equal(route_method_name((moe4_routing_method)m), names[m - 1]);
    assert_null(route_method_name(MOE4_ROUTING_NONE));
    assert_null(route_method_name((moe4_routing_method)(MOE4_ROUTING_HASH + 1)));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(routings_are_judged),
        cmocka_unit_test(bad_table_entries_are_found),
        cmocka_unit_test(bad_tokens_are_found),
        cmocka_unit_test(method_names),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
