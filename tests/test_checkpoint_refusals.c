/* Checkpoints that contradict themselves: every refusal names file, key or tensor, and both values. */
#include "checkpoint_copy.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void test_configs(void **state)
{
    static const struct {
        const char *old, *replacement;
        moe4_status status;
        const char *message;
    } cases[] = {
        {"\"gpt_oss\"", "\"llama\"", MOE4_EUNSUPPORTED, "config.json: model_type is \"llama\", expected"},
        {"\"model_type\": \"gpt_oss\",", "", MOE4_EFORMAT, "config.json: model_type is missing, expected a string"},
        {"\"gpt_oss\"", "3", MOE4_EFORMAT, "model_type is 3, expected a string"},
        {"\"mxfp4\"", "\"fp8\"", MOE4_EUNSUPPORTED, "quantization_config.quant_method is \"fp8\", expected \"mxfp4\""},
        {"\"quant_method\": \"mxfp4\"", "", MOE4_EUNSUPPORTED, "quant_method is missing, expected \"mxfp4\""},
        {"\"hidden_size\": 64", "\"hidden_size\": 65", MOE4_EUNSUPPORTED,
         "hidden_size is 65, expected a multiple of 32"},
        {"\"hidden_size\": 64", "\"hidden_size\": 0", MOE4_EFORMAT,
         "hidden_size is 0, expected a whole number from 32"},
        {"\"hidden_size\": 64", "\"hidden_size\": -64", MOE4_EFORMAT, "hidden_size is -64"},
        {"\"hidden_size\": 64", "\"hidden_size\": 64.0", MOE4_EFORMAT, "hidden_size is 64.0"},
        {"\"hidden_size\": 64", "\"hidden_size\": \"64\"", MOE4_EFORMAT, "hidden_size is \"64\""},
        {"\"hidden_size\": 64", "\"hidden_size\": 9223372036854775807", MOE4_EFORMAT, "to 1048576"},
        {"\"hidden_size\": 64", "\"hidden_size\": 99999999999999999999999", MOE4_EFORMAT, "hidden_size is 9999"},
        {"\"hidden_size\": 64,", "", MOE4_EFORMAT, "hidden_size is missing"},
        {"\"hidden_size\": 64,", "\"hidden_size\": 64, \"hidden_size\": 64,", MOE4_EFORMAT, "key for the second time"},
        {"\"intermediate_size\": 96", "\"intermediate_size\": 100", MOE4_EUNSUPPORTED, "expected a multiple of 32"},
        {"\"num_local_experts\": 8", "\"num_local_experts\": 0", MOE4_EFORMAT, "num_local_experts is 0, expected"},
        {"\"num_local_experts\": 8", "\"num_local_experts\": 32768", MOE4_EFORMAT, "from 1 to 32767"},
        {"\"num_experts_per_tok\": 4", "\"num_experts_per_tok\": 9", MOE4_EFORMAT,
         "num_experts_per_tok is 9, expected"},
        {"\"num_experts_per_tok\": 4", "\"num_experts_per_tok\": 0", MOE4_EFORMAT, "from 1 to 8"},
        {"\"num_experts_per_tok\": 4", "\"num_experts_per_tok\": 3", MOE4_EFORMAT,
         "experts_per_token is 4, expected 3 as num_experts_per_tok says"},
        {"\"num_experts_per_tok\": 4,\n \"experts_per_token\": 4,", "", MOE4_EFORMAT, "num_experts_per_tok is missing"},
        {"\"experts_per_token\": 4", "\"experts_per_token\": true", MOE4_EFORMAT, "experts_per_token is true"},
        {"\"num_hidden_layers\": 1", "\"num_hidden_layers\": 0", MOE4_EFORMAT, "num_hidden_layers is 0"},
        {"\"num_hidden_layers\": 1", "\"num_hidden_layers\": 4000000000", MOE4_EFORMAT,
         "num_hidden_layers is 4000000000"},
        {"7.0", "0", MOE4_EFORMAT, "swiglu_limit is 0, expected a finite number above 0"},
        {"7.0", "-7", MOE4_EFORMAT, "swiglu_limit is -7"},
        {"7.0", "1e40", MOE4_EFORMAT, "swiglu_limit is 1e40"},
        {"7.0", "null", MOE4_EFORMAT, "swiglu_limit is null, expected a number"},
        {"7.0", "NaN", MOE4_EFORMAT, "config.json: byte"},
        {"{", "[", MOE4_EFORMAT, "config.json: byte"},
        {"{", "{\"a\": \"\xff\",", MOE4_EFORMAT, "not UTF-8"},
    };
    struct fixture *fixture = *state;
    moe4_context *context = &fixture->test.context;
    moe4_checkpoint *checkpoint;
    /* No tensor file at all: each of these is refused before one is looked for. */
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        copy_config(fixture, SMALL, cases[i].old, cases[i].replacement);
        moe4_status status = moe4_checkpoint_open(context, fixture->scratch.folder, &checkpoint);
        if (status == MOE4_OK || !strstr(context->message, "config.json: ")) fail_msg("%s", cases[i].replacement);
        assert_refused(&fixture->test, status, cases[i].status, cases[i].message);
        assert_null(checkpoint);
    }
    assert_int_equal(unlink(scratch_path(&fixture->scratch, "config.json")), 0);
    assert_refused(&fixture->test, moe4_checkpoint_open(context, fixture->scratch.folder, &checkpoint), MOE4_EIO,
                   "config.json: cannot open");
    assert_int_equal(moe4_checkpoint_open(context, NULL, &checkpoint), MOE4_EINVAL);
    assert_int_equal(moe4_checkpoint_open(context, fixture->scratch.folder, NULL), MOE4_EINVAL);
    assert_int_equal(moe4_checkpoint_open(NULL, fixture->scratch.folder, &checkpoint), MOE4_EINVAL);
    moe4_checkpoint_close(NULL);
}

/* Tensors that disagree with the config: the message names file, tensor and both values. */
static void test_tensors_of_a_layer(void **state)
{
#define LAYER "model.layers.0.mlp."
    static const struct {
        struct change change;
        const char *message;
    } cases[] = {
        {{"gate_up_proj_bias", {.dtype = "BF16", .rank = 2, .shape = {8, 96}}},
         "model.safetensors: tensor \"" LAYER "experts.gate_up_proj_bias\" is BF16 [8, 96], expected BF16 [8, 192]"},
        {{"gate_up_proj_bias", {.dtype = "I16", .rank = 2, .shape = {8, 192}}},
         "is I16 [8, 192], expected BF16, F16 or F32 [8, 192]"},
        {{"gate_up_proj_bias", {.dtype = "BF16", .rank = 1, .shape = {8}}}, "is BF16 [8], expected BF16 [8, 192]"},
        {{"gate_up_proj_bias", {0}},
         "tensor \"" LAYER "experts.gate_up_proj_bias\" is missing, expected BF16 [8, 192]"},
        {{"gate_up_proj_blocks", {0}}, "gate_up_proj_blocks\" is missing, expected U8 [8, 192, 2, 16]"},
        {{"gate_up_proj_scales", {0}}, "gate_up_proj_scales\" is missing, expected U8 [8, 192, 2]"},
        {{"down_proj_blocks", {0}}, "down_proj_blocks\" is missing, expected U8 [8, 64, 3, 16]"},
        {{"down_proj_scales", {0}}, "down_proj_scales\" is missing, expected U8 [8, 64, 3]"},
        {{"down_proj_bias", {0}}, "down_proj_bias\" is missing, expected BF16 [8, 64]"},
        {{"router.weight", {0}}, "tensor \"" LAYER "router.weight\" is missing, expected BF16 [8, 64]"},
        {{"router.bias", {0}}, "router.bias\" is missing, expected BF16 [8]"},
        {{"router.weight", {.dtype = "BF16", .rank = 2, .shape = {64, 8}}}, "is BF16 [64, 8], expected BF16 [8, 64]"},
        {{"router.bias", {.dtype = "I32", .rank = 1, .shape = {8}}}, "is I32 [8], expected BF16, F16 or F32 [8]"},
        {{"gate_up_proj_blocks", {.dtype = "U8", .rank = 4, .shape = {8, 192, 2, 15}}},
         "is U8 [8, 192, 2, 15], expected U8 [8, 192, 2, 16]"},
        {{"gate_up_proj_blocks", {.dtype = "U8", .rank = 4, .shape = {8, 192, 16, 2}}},
         "is U8 [8, 192, 16, 2], expected"},
        {{"gate_up_proj_blocks", {.dtype = "U8", .rank = 4, .shape = {8, 96, 4, 16}}},
         "is U8 [8, 96, 4, 16], expected"},
        {{"gate_up_proj_blocks", {.dtype = "U8", .rank = 4, .shape = {4, 192, 2, 16}}},
         "is U8 [4, 192, 2, 16], expected"},
        {{"gate_up_proj_blocks", {.dtype = "U8", .rank = 3, .shape = {8, 192, 64}}}, "is U8 [8, 192, 64], expected"},
        {{"gate_up_proj_blocks", {.dtype = "U8", .rank = 2, .shape = {8, 6144}}}, "is U8 [8, 6144], expected"},
        {{"gate_up_proj_blocks", {.dtype = "U8", .rank = 1, .shape = {49152}}}, "is U8 [49152], expected"},
        {{"gate_up_proj_blocks", {.dtype = "U16", .rank = 4, .shape = {8, 192, 2, 8}}},
         "is U16 [8, 192, 2, 8], expected"},
        {{"gate_up_proj_blocks", {.dtype = "U32", .rank = 3, .shape = {8, 192, 32}}}, "is U32 [8, 192, 32], expected"},
        {{"gate_up_proj_scales", {.dtype = "U8", .rank = 3, .shape = {8, 192, 3}}},
         "is U8 [8, 192, 3], expected U8 [8, 192, 2]"},
        {{"gate_up_proj_scales", {.dtype = "U8", .rank = 4, .shape = {8, 192, 2, 1}}},
         "is U8 [8, 192, 2, 1], expected"},
        {{"gate_up_proj_scales", {.dtype = "F8_E4M3", .rank = 3, .shape = {8, 192, 2}}},
         "is F8_E4M3 [8, 192, 2], expected"},
    };
    struct fixture *fixture = *state;
    moe4_context *context = &fixture->test.context;
    moe4_tensors *source = open_golden(fixture, SMALL);
    copy_config(fixture, SMALL, "{", "{");
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        moe4_checkpoint *checkpoint;
        moe4_layer_reader *reader;
        write_copy(fixture, source, "model.safetensors", 0, 1, &cases[i].change);
        assert_int_equal(moe4_checkpoint_open(context, fixture->scratch.folder, &checkpoint), MOE4_OK);
        assert_int_equal(moe4_checkpoint_layer_number(checkpoint, 0), 0); /* it is here, if not whole */
        moe4_status status = moe4_layer_reader_open(context, checkpoint, 0, NULL, &reader);
        if (status == MOE4_OK) fail_msg("accepted: %s", cases[i].message);
        assert_refused(&fixture->test, status, MOE4_EFORMAT, cases[i].message);
        assert_null(reader);
        moe4_checkpoint_close(checkpoint);
    }
    moe4_tensors_close(source);
}

/* Tensors that the layout does not have. */
static void test_extra_tensors(void **state)
{
    static const struct {
        const char *name;
        moe4_status status;
        const char *message;
    } cases[] = {
        {LAYER "experts.gate_up_proj", MOE4_EUNSUPPORTED, "gate_up_proj\": dequantised weights, U8 [8, 4], expected"},
        {LAYER "experts.down_proj", MOE4_EUNSUPPORTED, "dequantised weights"},
        {LAYER "experts.gate_up_proj_zero_points", MOE4_EFORMAT, "gate_up_proj_zero_points\": unknown expert tensor"},
        {LAYER "experts.", MOE4_EFORMAT, "unknown expert tensor"},
        {"model.layers.1.mlp.experts.down_proj_bias", MOE4_EFORMAT, "is of layer 1, but config.json has 1 layers"},
        {"model.layers.999999999.mlp.experts.down_proj_bias", MOE4_EFORMAT, "is of layer 999999999"},
        {"model.layers.0.self_attn.q_proj.weight", MOE4_OK, NULL},
        {"model.layers.0.mlp.expertsdown_proj_bias", MOE4_OK, NULL},
        {"model.layers.x.mlp.experts.down_proj_bias", MOE4_OK, NULL},
        {"model.layers..mlp.experts.down_proj", MOE4_OK, NULL},
        {"model.layers.9999999999.mlp.experts.down_proj", MOE4_OK, NULL},
        {"lm_head.weight", MOE4_OK, NULL},
    };
    struct fixture *fixture = *state;
    moe4_tensors *source = open_golden(fixture, SMALL);
    copy_config(fixture, SMALL, "{", "{");
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const struct change change = {NULL, {.name = cases[i].name, .dtype = "U8", .rank = 2, .shape = {8, 4}}};
        moe4_checkpoint *checkpoint;
        write_copy(fixture, source, "model.safetensors", 0, 1, &change);
        if (cases[i].status == MOE4_OK) {
            check_layer(fixture, SMALL, fixture->scratch.folder);
            continue;
        }
        assert_refused(&fixture->test,
                       moe4_checkpoint_open(&fixture->test.context, fixture->scratch.folder, &checkpoint),
                       cases[i].status, cases[i].message);
        assert_message(&fixture->test, "model.safetensors: tensor");
        assert_null(checkpoint);
    }
    moe4_tensors_close(source);
}

/* Flips every bit of a file of a checkpoint in turn: an error, or a checkpoint that can be used. */
static void flip_every_bit(struct fixture *fixture, const char *name)
{
    moe4_context *context = &fixture->test.context;
    size_t n_bytes, n_refused = 0;
    unsigned char *file = load_bytes(scratch_path(&fixture->scratch, name), &n_bytes);
    for (size_t bit = 0; bit < 8 * n_bytes; bit++) {
        moe4_checkpoint *checkpoint;
        moe4_layer_reader *reader = NULL;
        moe4_expert expert;
        file[bit / 8] ^= (unsigned char)(1 << bit % 8);
        scratch_write(&fixture->scratch, name, file, n_bytes);
        moe4_status status = moe4_checkpoint_open(context, fixture->scratch.folder, &checkpoint);
        if (status == MOE4_OK) status = moe4_layer_reader_open(context, checkpoint, 0, NULL, &reader);
        if (status == MOE4_OK) assert_int_equal(moe4_layer_reader_read(context, reader, 0, &expert), MOE4_OK);
        n_refused += status != MOE4_OK;
        moe4_layer_reader_close(reader);
        moe4_checkpoint_close(checkpoint);
        assert_int_equal(fixture->test.counter.live, 0);
        file[bit / 8] ^= (unsigned char)(1 << bit % 8);
    }
    assert_true(n_refused > n_bytes); /* what is left is in parts that nobody reads */
    free(file);
}

static void test_every_bit_of_config_and_index(void **state)
{
    struct fixture *fixture = *state;
    char index[4096] = "{\"weight_map\": {";
    moe4_tensors *source = open_golden(fixture, SMALL);
    for (int64_t i = 0; i < moe4_tensors_count(source); i++) {
        size_t length = strlen(index);
        snprintf(index + length, sizeof index - length, "%s\"%s\": \"%d.safetensors\"", i ? ", " : "",
                 moe4_tensors_get(source, i)->name, (int)(i % 2) + 1);
    }
    strcat(index, "}}");
    write_copy(fixture, source, "1.safetensors", 0, 2, NULL);
    write_copy(fixture, source, "2.safetensors", 1, 2, NULL);
    moe4_tensors_close(source);
    scratch_write(&fixture->scratch, "model.safetensors.index.json", index, strlen(index));
    copy_config(fixture, SMALL, "{", "{");
    check_layer(fixture, SMALL, fixture->scratch.folder);
    flip_every_bit(fixture, "config.json");
    copy_config(fixture, SMALL, "{", "{");
    flip_every_bit(fixture, "model.safetensors.index.json");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        FILE_TEST(test_configs),
        FILE_TEST(test_tensors_of_a_layer),
        FILE_TEST(test_extra_tensors),
        FILE_TEST(test_every_bit_of_config_and_index),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
