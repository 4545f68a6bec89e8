/* Checkpoints: the golden gpt-oss layers read from one file, from shards and in part. */
#include "checkpoint_copy.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void test_single_file(void **state)
{
    for (int g = 0; g < N_GOLDENS; g++) {
        char folder[512];
        golden_path(&goldens[g], "", folder, sizeof folder);
        check_layer(*state, &goldens[g], folder);
    }
}

static void test_shards(void **state)
{
    struct fixture *fixture = *state;
    for (int g = 0; g < N_GOLDENS; g++) {
        char index[4096] = "{\"metadata\": {\"total_size\": 1}, \"weight_map\": {";
        moe4_tensors *source = open_golden(fixture, &goldens[g]);
        copy_config(fixture, &goldens[g], "{", "{");
        for (int part = 0; part < 3; part++) {
            char name[64];
            snprintf(name, sizeof name, "model-%05d-of-00003.safetensors", part + 1);
            write_copy(fixture, source, name, part, 3, NULL);
        }
        unlink(scratch_path(&fixture->scratch, "model.safetensors.index.json"));
        check_layer(fixture, &goldens[g], fixture->scratch.folder); /* no index: every shard */
        for (int64_t i = 0; i < moe4_tensors_count(source); i++) {
            size_t length = strlen(index);
            snprintf(index + length, sizeof index - length, "%s\"%s\": \"model-%05d-of-00003.safetensors\"",
                     i ? ", " : "", moe4_tensors_get(source, i)->name, (int)(i % 3) + 1);
        }
        strcat(index, "}}");
        scratch_write(&fixture->scratch, "model.safetensors.index.json", index, strlen(index));
        check_layer(fixture, &goldens[g], fixture->scratch.folder);
        moe4_tensors_close(source);
    }
    assert_int_equal(unlink(scratch_path(&fixture->scratch, "model-00002-of-00003.safetensors")), 0);
    moe4_checkpoint *checkpoint;
    assert_refused(&fixture->test, moe4_checkpoint_open(&fixture->test.context, fixture->scratch.folder, &checkpoint),
                   MOE4_EFORMAT, "which is missing");
    assert_null(checkpoint);
}

/* The same bytes by other types and shapes. */
static void test_equivalent_forms(void **state)
{
    static const struct change forms[] = {
        {"gate_up_proj_blocks", {.dtype = "U8", .rank = 3, .shape = {8, 192, 32}}},
        {"gate_up_proj_blocks", {.dtype = "I8", .rank = 3, .shape = {8, 192, 32}}},
        {"gate_up_proj_blocks", {.dtype = "I8", .rank = 4, .shape = {8, 192, 2, 16}}},
        {"gate_up_proj_blocks", {.dtype = "U32", .rank = 3, .shape = {8, 192, 8}}},
        {"down_proj_blocks", {.dtype = "U32", .rank = 4, .shape = {8, 64, 3, 4}}},
        {"down_proj_blocks", {.dtype = "F4", .rank = 3, .shape = {8, 64, 96}}},
        {"down_proj_blocks", {.dtype = "F4", .rank = 4, .shape = {8, 64, 3, 32}}},
        {"down_proj_scales", {.dtype = "F8_E8M0", .rank = 3, .shape = {8, 64, 3}}},
        {"gate_up_proj_scales", {.dtype = "I8", .rank = 3, .shape = {8, 192, 2}}},
    };
    struct fixture *fixture = *state;
    moe4_tensors *source = open_golden(fixture, SMALL);
    copy_config(fixture, SMALL, "{", "{");
    for (size_t i = 0; i < sizeof forms / sizeof *forms; i++) {
        write_copy(fixture, source, "model.safetensors", 0, 1, &forms[i]);
        check_layer(fixture, SMALL, fixture->scratch.folder);
    }
    moe4_tensors_close(source);
}

/* What a config may leave out or say differently. */
static void test_config_variants(void **state)
{
    static const struct {
        const char *old, *replacement;
        float limit;
    } cases[] = {
        {"\"swiglu_limit\": 7.0,", "", 7.0f},
        {"7.0", "3.5e0", 3.5f},
        {"\"num_experts_per_tok\": 4,", "", 7.0f},
        {"\"experts_per_token\": 4,", "", 7.0f},
        {"\"mxfp4\"", "\"mxfp4\", \"modules_to_not_convert\": [\"a\", {\"b\": []}]", 7.0f},
    };
    struct fixture *fixture = *state;
    moe4_context *context = &fixture->test.context;
    moe4_tensors *source = open_golden(fixture, SMALL);
    write_copy(fixture, source, "model.safetensors", 0, 1, NULL);
    moe4_tensors_close(source);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        moe4_checkpoint *checkpoint;
        moe4_layer_reader *reader;
        copy_config(fixture, SMALL, cases[i].old, cases[i].replacement);
        assert_int_equal(moe4_checkpoint_open(context, fixture->scratch.folder, &checkpoint), MOE4_OK);
        assert_int_equal(moe4_layer_reader_open(context, checkpoint, 0, NULL, &reader), MOE4_OK);
        assert_true(moe4_layer_reader_config(reader)->limit.value == cases[i].limit);
        assert_int_equal(moe4_layer_reader_config(reader)->routing.top_k, 4);
        moe4_layer_reader_close(reader);
        moe4_checkpoint_close(checkpoint);
    }
}

/* A part of a model: only the layers whose tensors are here are listed. */
static void test_part_of_a_model(void **state)
{
    struct fixture *fixture = *state;
    moe4_context *context = &fixture->test.context;
    moe4_tensors *source = open_golden(fixture, SMALL);
    const struct change third = {
        NULL, {.name = "model.layers.22.mlp.experts.down_proj_bias", .dtype = "BF16", .rank = 2, .shape = {8, 64}}};
    moe4_checkpoint *checkpoint;
    moe4_checkpoint_info info = MOE4_CHECKPOINT_INFO_INIT;
    moe4_layer_reader *reader;
    copy_config(fixture, SMALL, "\"num_hidden_layers\": 1", "\"num_hidden_layers\": 24");
    write_copy(fixture, source, "model.safetensors", 0, 1, &third);
    moe4_tensors_close(source);
    assert_int_equal(moe4_checkpoint_open(context, fixture->scratch.folder, &checkpoint), MOE4_OK);
    assert_int_equal(moe4_checkpoint_describe(checkpoint, &info), MOE4_OK);
    assert_int_equal(info.n_model_layers, 24);
    assert_int_equal(info.n_moe_layers, 2);
    assert_int_equal(moe4_checkpoint_layer_number(checkpoint, 0), 0);
    assert_int_equal(moe4_checkpoint_layer_number(checkpoint, 1), 22);
    assert_int_equal(moe4_checkpoint_layer_number(checkpoint, 2), -1);
    assert_int_equal(moe4_layer_reader_open(context, checkpoint, 0, NULL, &reader), MOE4_OK);
    moe4_layer_reader_close(reader);
    assert_refused(&fixture->test, moe4_layer_reader_open(context, checkpoint, 22, NULL, &reader), MOE4_EFORMAT,
                   "model.layers.22.mlp.router.weight\" is missing");
    assert_refused(&fixture->test, moe4_layer_reader_open(context, checkpoint, 1, NULL, &reader), MOE4_EINVAL,
                   "layer 1 is not here: there are 2 MoE layers, 0 to 22");
    assert_null(reader);
    moe4_checkpoint_close(checkpoint);
}

static void test_no_layer(void **state)
{
    struct fixture *fixture = *state;
    moe4_context *context = &fixture->test.context;
    moe4_checkpoint *checkpoint;
    moe4_layer_reader *reader;
    copy_config(fixture, SMALL, "{", "{");
    scratch_write(&fixture->scratch, "model.safetensors", "\2\0\0\0\0\0\0\0{}", 10);
    assert_int_equal(moe4_checkpoint_open(context, fixture->scratch.folder, &checkpoint), MOE4_OK);
    assert_int_equal(moe4_checkpoint_layer_number(checkpoint, 0), -1);
    assert_refused(&fixture->test, moe4_layer_reader_open(context, checkpoint, 0, NULL, &reader), MOE4_EINVAL,
                   "no MoE layer");
    moe4_checkpoint_close(checkpoint);
}

/* ---- Reading ----------------------------------------------------------------------------------------------------- */

struct progress {
    int n_calls, stop_at;
    int64_t done, total;
};

static int note_progress(void *user, int64_t done, int64_t total)
{
    struct progress *progress = user;
    progress->done = done;
    progress->total = total;
    return ++progress->n_calls == progress->stop_at;
}

static moe4_checkpoint *open_small(struct fixture *fixture)
{
    char folder[512];
    moe4_checkpoint *checkpoint;
    golden_path(SMALL, "", folder, sizeof folder);
    assert_int_equal(moe4_checkpoint_open(&fixture->test.context, folder, &checkpoint), MOE4_OK);
    return checkpoint;
}

static void test_local_range(void **state)
{
    static const struct {
        int32_t first, count, local;
        const char *message;
    } cases[] = {
        {0, 0, 8, NULL},
        {2, 3, 3, NULL},
        {7, 1, 1, NULL},
        {5, 0, 3, NULL},
        {0, 8, 8, NULL},
        {8, 0, 0, "first_expert is 8, expected 0 to 7"},
        {-1, 0, 0, "first_expert is -1, expected 0 to 7"},
        {5, 4, 0, "n_experts is 4, expected 0 to 3 from expert 5"},
        {0, -1, 0, "n_experts is -1, expected 0 to 8"},
    };
    struct fixture *fixture = *state;
    moe4_context *context = &fixture->test.context;
    moe4_checkpoint *checkpoint = open_small(fixture);
    size_t n_bytes;
    unsigned char *file = golden_bytes(SMALL, "model.safetensors", &n_bytes);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        moe4_reader_options options = MOE4_READER_OPTIONS_INIT;
        moe4_layer_reader *reader;
        moe4_expert expert;
        options.first_expert = cases[i].first;
        options.n_experts = cases[i].count;
        moe4_status status = moe4_layer_reader_open(context, checkpoint, 0, &options, &reader);
        if (cases[i].message) {
            assert_refused(&fixture->test, status, MOE4_EINVAL, cases[i].message);
            continue;
        }
        assert_int_equal(status, MOE4_OK);
        assert_int_equal(moe4_layer_reader_config(reader)->first_expert, cases[i].first);
        assert_int_equal(moe4_layer_reader_config(reader)->n_local_experts, cases[i].local);
        assert_int_equal(moe4_layer_reader_config(reader)->n_experts, 8);
        for (int32_t l = 0; l < cases[i].local; l++) {
            assert_int_equal(moe4_layer_reader_read(context, reader, l, &expert), MOE4_OK);
            check_expert(SMALL, file, cases[i].first + l, &expert);
        }
        assert_refused(&fixture->test, moe4_layer_reader_read(context, reader, cases[i].local, &expert), MOE4_EINVAL,
                       "local expert");
        assert_int_equal(moe4_layer_reader_read(context, reader, -1, &expert), MOE4_EINVAL);
        moe4_layer_reader_close(reader);
    }
    moe4_checkpoint_close(checkpoint);
    free(file);
}

/* Config and router without experts: nothing of these is read or held, not even of a layer that lacks them. */
static void test_skipped_experts(void **state)
{
    struct fixture *fixture = *state;
    moe4_context *context = &fixture->test.context;
    moe4_tensors *source = open_golden(fixture, SMALL);
    const struct change change = {"down_proj_blocks", {0}};
    moe4_reader_options options = MOE4_READER_OPTIONS_INIT;
    moe4_checkpoint *checkpoint;
    moe4_layer_reader *whole, *reader;
    moe4_expert expert;
    copy_config(fixture, SMALL, "{", "{");
    write_copy(fixture, source, "model.safetensors", 0, 1, &change);
    checkpoint = open_small(fixture);
    assert_int_equal(moe4_layer_reader_open(context, checkpoint, 0, NULL, &whole), MOE4_OK);
    const moe4_layer_config *expected = moe4_layer_reader_config(whole);
    options.experts = MOE4_EXPERTS_SKIP;
    moe4_checkpoint *copy;
    assert_int_equal(moe4_checkpoint_open(context, fixture->scratch.folder, &copy), MOE4_OK);
    int64_t before = fixture->test.counter.live_bytes;
    assert_int_equal(moe4_layer_reader_open(context, copy, 0, &options, &reader), MOE4_OK);
    const moe4_layer_config *config = moe4_layer_reader_config(reader);
    assert_true(fixture->test.counter.live_bytes - before < 8 * 64 * 2 + 8 * 2 + 8192);
    assert_int_equal(config->activation, expected->activation);
    assert_int_equal(config->routing.method, expected->routing.method);
    assert_memory_equal(config->router.weight, expected->router.weight, 8 * 64 * 2);
    assert_refused(&fixture->test, moe4_layer_reader_read(context, reader, 0, &expert), MOE4_EINVAL, "skip experts");
    moe4_layer_reader_close(reader);
    assert_refused(&fixture->test, moe4_layer_reader_open(context, copy, 1, &options, &reader), MOE4_EINVAL,
                   "layer 1 is not here");
    assert_refused(&fixture->test, moe4_layer_reader_open(context, copy, -1, &options, &reader), MOE4_EINVAL,
                   "layer -1 is not here");
    moe4_layer_reader_close(whole);
    moe4_checkpoint_close(copy);
    moe4_checkpoint_close(checkpoint);
    moe4_tensors_close(source);
}

static void test_progress(void **state)
{
    struct fixture *fixture = *state;
    moe4_context *context = &fixture->test.context;
    moe4_checkpoint *checkpoint = open_small(fixture);
    struct progress progress = {.stop_at = 4};
    moe4_reader_options options = MOE4_READER_OPTIONS_INIT;
    moe4_layer_reader *reader;
    moe4_expert expert;
    int64_t expert_bytes = (2 * 96 * 64 + 64 * 96) * 17 / 32 + (2 * 96 + 64) * 2;
    options.n_experts = 3;
    options.progress = note_progress;
    options.user = &progress;
    assert_int_equal(moe4_layer_reader_open(context, checkpoint, 0, &options, &reader), MOE4_OK);
    assert_int_equal(progress.n_calls, 0);
    for (int32_t l = 0; l < 3; l++) {
        assert_int_equal(moe4_layer_reader_read(context, reader, l, &expert), MOE4_OK);
        assert_int_equal(progress.n_calls, l + 1);
        assert_int_equal(progress.done, (l + 1) * expert_bytes);
        assert_int_equal(progress.total, 3 * expert_bytes);
    }
    assert_refused(&fixture->test, moe4_layer_reader_read(context, reader, 0, &expert), MOE4_EIO, "cancelled");
    assert_int_equal(progress.done, progress.total); /* never more than all */
    moe4_layer_reader_close(reader);
    moe4_layer_reader_close(NULL);
    moe4_checkpoint_close(checkpoint);
}

/* One expert's memory, whatever the number of experts. */
static void test_memory_is_bounded(void **state)
{
    struct fixture *fixture = *state;
    moe4_context *context = &fixture->test.context;
    moe4_checkpoint *checkpoint = open_small(fixture);
    moe4_layer_reader *reader;
    moe4_expert expert;
    int64_t expert_bytes = (2 * 96 * 64 + 64 * 96) * 17 / 32 + (2 * 96 + 64) * 2, router_bytes = 8 * 64 * 2 + 8 * 2;
    int64_t before = fixture->test.counter.live_bytes;
    fixture->test.counter.peak_bytes = before;
    assert_int_equal(moe4_layer_reader_open(context, checkpoint, 0, NULL, &reader), MOE4_OK);
    for (int32_t l = 0; l < 8; l++) assert_int_equal(moe4_layer_reader_read(context, reader, l, &expert), MOE4_OK);
    assert_true(fixture->test.counter.peak_bytes - before < expert_bytes + router_bytes + 8192);
    moe4_layer_reader_close(reader);
    moe4_checkpoint_close(checkpoint);
}

static void test_shrinking_file(void **state)
{
    struct fixture *fixture = *state;
    moe4_context *context = &fixture->test.context;
    moe4_tensors *source = open_golden(fixture, SMALL);
    moe4_checkpoint *checkpoint;
    moe4_layer_reader *reader;
    moe4_expert expert;
    copy_config(fixture, SMALL, "{", "{");
    write_copy(fixture, source, "model.safetensors", 0, 1, NULL);
    moe4_tensors_close(source);
    assert_int_equal(moe4_checkpoint_open(context, fixture->scratch.folder, &checkpoint), MOE4_OK);
    assert_int_equal(moe4_layer_reader_open(context, checkpoint, 0, NULL, &reader), MOE4_OK);
    assert_int_equal(truncate(scratch_path(&fixture->scratch, "model.safetensors"), 84000), 0);
    memset(&expert, 0x55, sizeof expert);
    assert_int_equal(moe4_layer_reader_read(context, reader, 0, &expert), MOE4_OK);
    memset(&expert, 0x55, sizeof expert);
    assert_refused(&fixture->test, moe4_layer_reader_read(context, reader, 7, &expert), MOE4_EIO,
                   "model.safetensors: ends at byte 84000");
    assert_int_equal(*(unsigned char *)&expert.gate_up.codes, 0x55); /* untouched */
    const moe4_expert_source pieces = moe4_layer_reader_source(context, reader);
    uint8_t scales[192 * 2];
    assert_int_equal(pieces.describe(pieces.user, 7, &expert), MOE4_OK);
    assert_refused(&fixture->test, pieces.copy(pieces.user, 7, MOE4_PART_GATE_UP_SCALES, 0, sizeof scales, scales),
                   MOE4_EIO, "model.safetensors: ends at byte 84000");
    context->message[0] = '\0'; /* one thread says why, the others nothing */
    assert_int_equal(pieces.copy(pieces.user, 7, MOE4_PART_GATE_UP_SCALES, 0, sizeof scales, scales), MOE4_EIO);
    assert_string_equal(context->message, "");
    assert_int_equal(truncate(scratch_path(&fixture->scratch, "model.safetensors"), 2000), 0);
    moe4_layer_reader *second;
    assert_refused(&fixture->test, moe4_layer_reader_open(context, checkpoint, 0, NULL, &second), MOE4_EIO, "ends at");
    assert_null(second);
    moe4_layer_reader_close(reader);
    moe4_checkpoint_close(checkpoint);
}

static void test_failing_allocations(void **state)
{
    struct fixture *fixture = *state;
    moe4_context *context = &fixture->test.context;
    struct counter *counter = &fixture->test.counter;
    char folder[512];
    golden_path(SMALL, "", folder, sizeof folder);
    moe4_status status = MOE4_ENOMEM;
    for (counter->failing = 1; status == MOE4_ENOMEM; counter->failing++) {
        moe4_checkpoint *checkpoint;
        moe4_layer_reader *reader = NULL;
        moe4_expert expert;
        counter->n_calls = 0;
        context->message[0] = '\0';
        status = moe4_checkpoint_open(context, folder, &checkpoint);
        if (status == MOE4_OK) status = moe4_layer_reader_open(context, checkpoint, 0, NULL, &reader);
        if (status == MOE4_OK) status = moe4_layer_reader_read(context, reader, 3, &expert);
        if (status == MOE4_ENOMEM) assert_message(&fixture->test, "out of memory");
        moe4_layer_reader_close(reader);
        moe4_checkpoint_close(checkpoint);
        assert_int_equal(counter->live, 0);
    }
    assert_int_equal(status, MOE4_OK);
    assert_true(counter->failing > 15);
}

/* ---- Loading ----------------------------------------------------------------------------------------------------- */

/* A real context whose memory the fixture counts. */
static moe4_context *create_context(struct fixture *fixture)
{
    moe4_context_config config = MOE4_CONTEXT_CONFIG_INIT;
    moe4_context *context;
    config.n_threads = 1;
    config.allocator = &fixture->test.context.allocator;
    assert_int_equal(moe4_context_create(&config, &context), MOE4_OK);
    return context;
}

static void test_load(void **state)
{
    struct fixture *fixture = *state;
    moe4_context *context = create_context(fixture);
    moe4_checkpoint *checkpoint = open_small(fixture);
    struct progress progress = {.stop_at = 0};
    moe4_reader_options options = MOE4_READER_OPTIONS_INIT;
    moe4_layer_info info = MOE4_LAYER_INFO_INIT;
    moe4_layer *layer;
    options.first_expert = 3;
    options.n_experts = 4;
    options.progress = note_progress;
    options.user = &progress;
    assert_int_equal(moe4_checkpoint_load(context, checkpoint, 0, &options, &layer), MOE4_OK);
    assert_int_equal(progress.n_calls, 4);
    assert_int_equal(progress.done, progress.total);
    moe4_checkpoint_close(checkpoint); /* the layer needs nothing of it */
    assert_int_equal(moe4_layer_describe(layer, &info), MOE4_OK);
    assert_int_equal(info.hidden_size, SMALL->H);
    assert_int_equal(info.intermediate_size, SMALL->I);
    assert_int_equal(info.n_experts, SMALL->E);
    assert_int_equal(info.first_expert, 3);
    assert_int_equal(info.n_local_experts, 4);
    assert_int_equal(info.top_k, SMALL->A);
    moe4_layer_destroy(layer);
    moe4_context_destroy(context);
}

static void test_load_is_refused(void **state)
{
    struct fixture *fixture = *state;
    moe4_context *context = create_context(fixture);
    moe4_checkpoint *checkpoint = open_small(fixture);
    struct progress progress = {.stop_at = 2};
    moe4_reader_options options = MOE4_READER_OPTIONS_INIT;
    moe4_layer *layer;
    options.progress = note_progress;
    options.user = &progress;
    assert_int_equal(moe4_checkpoint_load(context, checkpoint, 0, &options, &layer), MOE4_EIO);
    assert_non_null(strstr(moe4_context_message(context), "cancelled after"));
    assert_null(layer);
    assert_int_equal(moe4_checkpoint_load(context, checkpoint, 1, NULL, &layer), MOE4_EINVAL);
    assert_null(layer);
    options.size = 3;
    assert_int_equal(moe4_checkpoint_load(context, checkpoint, 0, &options, &layer), MOE4_EINVAL);
    assert_int_equal(moe4_checkpoint_load(context, NULL, 0, NULL, &layer), MOE4_EINVAL);
    assert_int_equal(moe4_checkpoint_load(context, checkpoint, 0, NULL, NULL), MOE4_EINVAL);
    assert_int_equal(moe4_checkpoint_load(NULL, checkpoint, 0, NULL, &layer), MOE4_EINVAL);
    moe4_checkpoint_close(checkpoint);
    moe4_context_destroy(context);
}

static void test_load_with_failing_allocations(void **state)
{
    struct fixture *fixture = *state;
    struct counter *counter = &fixture->test.counter;
    moe4_context *context = create_context(fixture);
    moe4_checkpoint *checkpoint = open_small(fixture);
    int64_t live = counter->live;
    moe4_status status = MOE4_ENOMEM;
    for (counter->failing = 1; status == MOE4_ENOMEM; counter->failing++) {
        moe4_layer *layer;
        counter->n_calls = 0;
        status = moe4_checkpoint_load(context, checkpoint, 0, NULL, &layer);
        if (status == MOE4_ENOMEM) assert_null(layer);
        moe4_layer_destroy(layer);
        assert_int_equal(counter->live, live);
    }
    assert_int_equal(status, MOE4_OK);
    assert_true(counter->failing > 5);
    moe4_checkpoint_close(checkpoint);
    moe4_context_destroy(context);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        FILE_TEST(test_single_file),
        FILE_TEST(test_shards),
        FILE_TEST(test_equivalent_forms),
        FILE_TEST(test_config_variants),
        FILE_TEST(test_part_of_a_model),
        FILE_TEST(test_no_layer),
        FILE_TEST(test_local_range),
        FILE_TEST(test_progress),
        FILE_TEST(test_skipped_experts),
        FILE_TEST(test_memory_is_bounded),
        FILE_TEST(test_shrinking_file),
        FILE_TEST(test_failing_allocations),
        FILE_TEST(test_load),
        FILE_TEST(test_load_is_refused),
        FILE_TEST(test_load_with_failing_allocations),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
