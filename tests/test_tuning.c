/* Tuning: buckets, that a tactic changes no bit, and what a file must be to be believed. */
#include <setjmp.h>
#include <stdarg.h> /* for cmocka.h, as the next two */
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "call.h"
#include "moe4/tune.h"
#include "tuning.h"

enum { H = 96, I = 64, E = 5, A = 3 };

static char path[] = "/tmp/moe4-tuning-XXXXXX";

static int make_file(void **state)
{
    (void)state;
    int fd = mkstemp(path);
    return fd < 0 ? -1 : close(fd);
}

static int remove_file(void **state)
{
    (void)state;
    return unlink(path);
}

static void test_buckets(void **state)
{
    (void)state;
    static const int64_t rounded[][2] = {{-3, 1},       {0, 1},         {1, 1},        {2, 2},       {3, 4},
                                         {255, 256},    {256, 256},     {257, 512},    {513, 768},   {2048, 2048},
                                         {2049, 2560},  {4000, 4096},   {4096, 4096},  {4097, 8192}, {8192, 8192},
                                         {8193, 10000}, {10000, 10000}, {70000, 10000}};
    for (size_t i = 0; i < sizeof rounded / sizeof *rounded; i++)
        assert_int_equal(moe4_tuning_bucket(rounded[i][0], 10000), rounded[i][1]);
    assert_int_equal(moe4_tuning_bucket(3, 3), 3);
    assert_int_equal(moe4_tuning_bucket(5, 7), 7); /* 8 is above the most */
}

static void test_tactics_change_nothing(void **state)
{
    (void)state;
    static const moe4_tactic tactics[] = {{0, 0}, {4, 0}, {5, 1}, {6, 64}, {7, 2}, {8, 3}, {9, 0}, {11, 1}, {12, 5}};
    struct buffers buffers = {BUFFERS_PLAIN, NULL};
    moe4_layer_config config = layer_config(H, I, E, A);
    struct weight_plan weights = {.biases = BIAS_BOTH, .seed = 5};
    moe4_context *context = context_open(MOE4_ISA_AUTO, 3);
    moe4_layer *layer = layer_open(context, &config, weights_create(&buffers, &config, &weights));
    struct call_plan plan = {.n_tokens = 100, .top_k = A, .seed = 6};
    struct call expected = call_create(&buffers, &config, &plan);
    call_must_run(&buffers, context, layer, &expected);
    for (size_t i = 0; i < sizeof tactics / sizeof *tactics; i++) {
        moe4_tuning_entry entry = MOE4_TUNING_ENTRY_INIT;
        entry.hidden_size = H;
        entry.intermediate_size = I;
        entry.n_local_experts = E;
        entry.top_k = A;
        entry.n_tokens = 128;
        entry.tactic = tactics[i];
        assert_int_equal(tuning_put(context, &entry), MOE4_OK);
        assert_int_equal(tuning_find(context, layer, MOE4_COMPUTE_BF16, 100, A).tile_tokens, tactics[i].tile_tokens);
        assert_int_equal(tuning_find(context, layer, MOE4_COMPUTE_MXFP8, 100, A).tile_tokens, 0);
        struct call call = call_create(&buffers, &config, &plan);
        call_must_run(&buffers, context, layer, &call);
        call_compare(&expected, &call);
    }
    assert_int_equal(moe4_tuning_count(context), 1);
    moe4_layer_destroy(layer);
    moe4_context_destroy(context);
    buffers_release(&buffers);
}

static int count_buckets(void *user, const moe4_tuning_entry *entry, int32_t n_done, int32_t n_buckets)
{
    int *n = user;
    ++*n;
    assert_true(entry->ms > 0 && entry->ms <= entry->default_ms);
    assert_int_equal(n_done, *n);
    assert_int_equal(n_buckets, 5); /* 1 2 4 8 9 */
    return 0;
}

/* Measures, saves, and loads into another context of the same machine. */
static void test_tune_save_load(void **state)
{
    (void)state;
    int n = 0;
    struct buffers buffers = {BUFFERS_PLAIN, NULL};
    moe4_layer_config config = layer_config(H, I, E, A);
    struct weight_plan weights = {.biases = BIAS_BOTH, .seed = 5};
    moe4_context *context = context_open(MOE4_ISA_AUTO, 2), *other = context_open(MOE4_ISA_AUTO, 2);
    moe4_layer *layer = layer_open(context, &config, weights_create(&buffers, &config, &weights));
    moe4_tune_options options = MOE4_TUNE_OPTIONS_INIT;
    options.max_tokens = 9;
    options.ms_a_choice = 0.2;
    options.progress = count_buckets;
    options.user = &n;
    assert_int_equal(moe4_tune(context, layer, &options), MOE4_OK);
    assert_int_equal(n, 5);
    assert_int_equal(moe4_tuning_save(context, path), MOE4_OK);
    assert_int_equal(moe4_tuning_load(other, path), MOE4_OK);
    assert_int_equal(moe4_tuning_count(other), 5);
    for (int32_t i = 0; i < 5; i++) {
        moe4_tuning_entry a, b;
        assert_int_equal(moe4_tuning_get(context, i, &a), MOE4_OK);
        assert_int_equal(moe4_tuning_get(other, i, &b), MOE4_OK);
        assert_int_equal(a.n_tokens, b.n_tokens);
        assert_memory_equal(&a.tactic, &b.tactic, sizeof a.tactic);
    }
    assert_int_equal(moe4_tuning_load(other, path), MOE4_OK); /* replaced, not doubled */
    assert_int_equal(moe4_tuning_count(other), 5);
    moe4_layer_destroy(layer);
    moe4_context_destroy(other);
    moe4_context_destroy(context);
    buffers_release(&buffers);
}

static void write_file(const char *text)
{
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    fputs(text, file);
    assert_int_equal(fclose(file), 0);
}

/* The file of test_tune_save_load's kind with one thing replaced. */
static void expect_refusal(const char *what, const char *with, const char *message)
{
    char text[4096], changed[4200];
    moe4_context *context = context_open(MOE4_ISA_AUTO, 2);
    moe4_tuning_entry entry = MOE4_TUNING_ENTRY_INIT;
    entry.hidden_size = H;
    entry.n_tokens = 16;
    entry.tactic = (moe4_tactic){6, 2};
    assert_int_equal(tuning_put(context, &entry), MOE4_OK);
    assert_int_equal(moe4_tuning_save(context, path), MOE4_OK);
    FILE *file = fopen(path, "r");
    text[fread(text, 1, sizeof text - 1, file)] = '\0';
    fclose(file);
    char *at = strstr(text, what);
    assert_non_null(at);
    snprintf(changed, sizeof changed, "%.*s%s%s", (int)(at - text), text, with, at + strlen(what));
    write_file(changed);
    moe4_context_destroy(context);

    context = context_open(MOE4_ISA_AUTO, 2);
    assert_int_equal(moe4_tuning_load(context, path), MOE4_EFORMAT);
    if (!strstr(moe4_context_message(context), message))
        fail_msg("\"%s\" does not say \"%s\"", moe4_context_message(context), message);
    assert_int_equal(moe4_tuning_count(context), 0);
    moe4_context_destroy(context);
}

static void test_files_of_others(void **state)
{
    (void)state;
    expect_refusal("\"library\": \"", "\"library\": \"9.", "library is \"9.");
    expect_refusal("\"device\": \"", "\"device\": \"Other ", "device is \"Other ");
    expect_refusal("\"isa\": \"", "\"isa\": \"x", "isa is \"x");
    expect_refusal("\"threads\": 2", "\"threads\": 3", "threads is 3, expected 2");
    expect_refusal("version 1", "version 2", "format is ");
    expect_refusal("\"tile_tokens\": 6", "\"tile_tokens\": 13", "tactic (13, 2)");
    expect_refusal("\"tile_tokens\": 6", "\"tile_tokens\": -6", "tile_tokens");
    expect_refusal("\"claim_share\": 2", "\"claim_share\": 4294967298", "claim_share");
    expect_refusal("\"n_tokens\": 16", "\"n_tokens\": 0", "0 tokens");
    expect_refusal("\"entries\": [", "\"entries\": [[], ", "entry 0");
    expect_refusal("\"entries\"", "\"others\"", "entries");
    expect_refusal("{", "", "byte");
}

static void test_missing_file(void **state)
{
    (void)state;
    moe4_context *context = context_open(MOE4_ISA_AUTO, 1);
    assert_int_equal(moe4_tuning_load(context, "/nowhere/tuning.json"), MOE4_EIO);
    assert_int_equal(moe4_tuning_save(context, "/nowhere/tuning.json"), MOE4_EIO);
    assert_int_equal(moe4_tune(context, NULL, NULL), MOE4_EINVAL);
    moe4_context_destroy(context);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_buckets),        cmocka_unit_test(test_tactics_change_nothing),
        cmocka_unit_test(test_tune_save_load), cmocka_unit_test(test_files_of_others),
        cmocka_unit_test(test_missing_file),
    };
    return cmocka_run_group_tests(tests, make_file, remove_file);
}
