/* Checkpoints: the golden gpt-oss layers read from one file and from shards, and everything that must be refused. */
#include "io_helpers.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct fixture {
    struct test_context test;
    struct scratch scratch;
};

static int setup(void **state)
{
    struct fixture *fixture = calloc(1, sizeof *fixture);
    context_start(&fixture->test);
    scratch_create(&fixture->scratch);
    *state = fixture;
    return 0;
}

static int teardown(void **state)
{
    struct fixture *fixture = *state;
    context_end(&fixture->test);
    scratch_remove(&fixture->scratch);
    free(fixture);
    return 0;
}

/* ---- The golden layers ------------------------------------------------------------------------------------------- */

enum {
    DOWN_BIAS,
    GATE_UP_BIAS,
    ROUTER_BIAS,
    ROUTER_WEIGHT,
    DOWN_CODES,
    DOWN_SCALES,
    GATE_UP_CODES,
    GATE_UP_SCALES,
    N_PLACES
};

/* Sizes as config.json has them, and where each tensor's bytes lie in model.safetensors. */
static const struct golden {
    const char *name;
    int64_t E, H, I, A;
    int64_t places[N_PLACES];
} goldens[] = {
    {"gptoss_small", 8, 64, 96, 4, {840, 1864, 4936, 4952, 5976, 30552, 32088, 81240}},
    {"gptoss_clamped", 4, 96, 64, 2, {840, 1608, 2632, 2640, 3408, 15696, 16464, 41040}},
    {"gptoss_one_token", 32, 64, 64, 4, {864, 4960, 13152, 13216, 17312, 82848, 86944, 218016}},
};
enum { N_GOLDENS = sizeof goldens / sizeof *goldens };
#define SMALL (&goldens[0])

static void golden_path(const struct golden *golden, const char *file, char *path, size_t n_bytes)
{
    snprintf(path, n_bytes, "%s/golden/%s%s%s", TEST_DATA, golden->name, *file ? "/" : "", file);
}

static unsigned char *golden_bytes(const struct golden *golden, const char *file, size_t *n_bytes)
{
    char path[512];
    golden_path(golden, file, path, sizeof path);
    return load_bytes(path, n_bytes);
}

static void assert_bytes(const void *got, const unsigned char *file, int64_t at, int64_t n_bytes)
{
    assert_non_null(got);
    assert_memory_equal(got, file + at, (size_t)n_bytes);
}

/* Expert e of the layer, compared with the file itself. */
static void check_expert(const struct golden *golden, const unsigned char *file, int64_t e, const moe4_expert *expert)
{
    int64_t H = golden->H, I = golden->I;
    const int64_t *places = golden->places;
    assert_bytes(expert->gate_up.codes, file, places[GATE_UP_CODES] + e * 2 * I * H / 2, 2 * I * H / 2);
    assert_bytes(expert->gate_up.scales, file, places[GATE_UP_SCALES] + e * 2 * I * H / 32, 2 * I * H / 32);
    assert_bytes(expert->gate_up.bias, file, places[GATE_UP_BIAS] + e * 2 * I * 2, 2 * I * 2);
    assert_bytes(expert->down.codes, file, places[DOWN_CODES] + e * H * I / 2, H * I / 2);
    assert_bytes(expert->down.scales, file, places[DOWN_SCALES] + e * H * I / 32, H * I / 32);
    assert_bytes(expert->down.bias, file, places[DOWN_BIAS] + e * H * 2, H * 2);
    assert_int_equal(expert->gate_up.bias_dtype, MOE4_DTYPE_BF16);
    assert_int_equal(expert->down.bias_dtype, MOE4_DTYPE_BF16);
    assert_int_equal(expert->gate_up.codes_row_bytes, 0);
    assert_int_equal(expert->down.scales_row_bytes, 0);
}

static void check_config(const struct golden *golden, const unsigned char *file, const moe4_layer_config *config)
{
    assert_int_equal(config->size, sizeof *config);
    assert_int_equal(config->hidden_size, golden->H);
    assert_int_equal(config->intermediate_size, golden->I);
    assert_int_equal(config->n_experts, golden->E);
    assert_int_equal(config->gate_up, MOE4_GATE_UP_INTERLEAVED);
    assert_int_equal(config->activation, MOE4_ACTIVATION_SWIGLU_OAI);
    assert_true(config->alpha.presence == MOE4_SAME && config->alpha.value == 1.702f);
    assert_true(config->beta.presence == MOE4_SAME && config->beta.value == 1.0f);
    assert_true(config->limit.presence == MOE4_SAME && config->limit.value == 7.0f);
    assert_int_equal(config->routing.size, sizeof config->routing);
    assert_int_equal(config->routing.method, MOE4_ROUTING_RENORMALIZE);
    assert_int_equal(config->routing.top_k, golden->A);
    assert_null(config->routing.correction_bias); /* the router's bias is added to the logit */
    assert_bytes(config->router.weight, file, golden->places[ROUTER_WEIGHT], golden->E * golden->H * 2);
    assert_bytes(config->router.bias, file, golden->places[ROUTER_BIAS], golden->E * 2);
    assert_int_equal(config->router.weight_dtype, MOE4_DTYPE_BF16);
    assert_int_equal(config->router.bias_dtype, MOE4_DTYPE_BF16);
    assert_int_equal(config->router.hidden_size, 0);
}

/* Opens a folder that holds a golden layer and compares all of it. */
static void check_layer(struct fixture *fixture, const struct golden *golden, const char *folder)
{
    moe4_context *context = &fixture->test.context;
    moe4_checkpoint *checkpoint;
    moe4_checkpoint_info info = MOE4_CHECKPOINT_INFO_INIT;
    moe4_layer_reader *reader;
    moe4_expert expert;
    size_t n_bytes;
    unsigned char *file = golden_bytes(golden, "model.safetensors", &n_bytes);
    moe4_status status = moe4_checkpoint_open(context, folder, &checkpoint);
    if (status) fail_msg("%s", fixture->test.context.message);
    assert_int_equal(moe4_checkpoint_describe(checkpoint, &info), MOE4_OK);
    assert_string_equal(info.family, "gpt-oss");
    assert_string_equal(info.layout, "gpt-oss released");
    assert_int_equal(info.n_model_layers, 1);
    assert_int_equal(info.n_moe_layers, 1);
    assert_int_equal(moe4_checkpoint_layer_number(checkpoint, 0), 0);
    assert_int_equal(moe4_checkpoint_layer_number(checkpoint, 1), -1);
    assert_int_equal(moe4_checkpoint_layer_number(checkpoint, -1), -1);
    assert_true(moe4_tensors_count(moe4_checkpoint_tensors(checkpoint)) >= N_PLACES);

    assert_int_equal(moe4_layer_reader_open(context, checkpoint, 0, NULL, &reader), MOE4_OK);
    check_config(golden, file, moe4_layer_reader_config(reader));
    assert_int_equal(moe4_layer_reader_config(reader)->first_expert, 0);
    assert_int_equal(moe4_layer_reader_config(reader)->n_local_experts, golden->E);
    for (int64_t e = golden->E; e-- > 0;) {
        assert_int_equal(moe4_layer_reader_read(context, reader, (int32_t)e, &expert), MOE4_OK);
        check_expert(golden, file, e, &expert);
    }
    moe4_layer_reader_close(reader);
    moe4_checkpoint_close(checkpoint);
    free(file);
}

static void test_single_file(void **state)
{
    for (int g = 0; g < N_GOLDENS; g++) {
        char folder[512];
        golden_path(&goldens[g], "", folder, sizeof folder);
        check_layer(*state, &goldens[g], folder);
    }
}

/* ---- Copies of a golden layer with changes ----------------------------------------------------------------------- */

/* The expected value of `tensor` in a copy: another description of it, or none at all. */
struct change {
    const char *tensor;  /* the end of its name; NULL = no change */
    moe4_tensor instead; /* its dtype, rank and shape; dtype NULL = left out; with another name = added */
};

/* Whether `name` ends in `end`. */
static int ends_in(const char *name, const char *end)
{
    size_t length = strlen(name), suffix = end ? strlen(end) : 0;
    return end && length >= suffix && strcmp(name + length - suffix, end) == 0;
}

/* Writes the tensors of `source` whose index is `part` modulo `n_parts` as one shard; a changed tensor gets as many of
 * its bytes as it has room for, then zeros. */
static void write_copy(struct fixture *fixture, const moe4_tensors *source, const char *name, int part, int n_parts,
                       const struct change *change)
{
    moe4_context *context = &fixture->test.context;
    moe4_tensor written[16];
    const moe4_tensor *from[16];
    int32_t n = 0;
    moe4_writer *writer;
    for (int64_t i = part; i < moe4_tensors_count(source); i += n_parts) {
        from[n] = moe4_tensors_get(source, i);
        written[n] = *from[n];
        int changed = change && ends_in(from[n]->name, change->tensor) && !change->instead.name;
        if (changed && !change->instead.dtype) continue;
        if (changed) written[n] = change->instead;
        written[n].name = from[n]->name;
        n++;
    }
    if (change && change->instead.name) {
        from[n] = moe4_tensors_get(source, 0);
        written[n++] = change->instead;
    }
    assert_int_equal(moe4_writer_create(context, scratch_path(&fixture->scratch, name), written, n, NULL, &writer),
                     MOE4_OK);
    for (int32_t i = 0; i < n; i++) {
        int64_t n_bytes = 1;
        int bits = ends_in(written[i].dtype, "32")   ? 32
                   : ends_in(written[i].dtype, "16") ? 16
                   : ends_in(written[i].dtype, "F4") ? 4
                                                     : 8;
        for (int32_t d = 0; d < written[i].rank; d++) n_bytes *= written[i].shape[d];
        n_bytes = n_bytes * bits / 8;
        int64_t kept = n_bytes < from[i]->n_bytes ? n_bytes : from[i]->n_bytes;
        unsigned char *bytes = calloc(1, (size_t)n_bytes + 1);
        assert_int_equal(moe4_tensors_read(context, source, from[i], 0, kept, bytes), MOE4_OK);
        assert_int_equal(moe4_writer_write(context, writer, i, 0, n_bytes, bytes), MOE4_OK);
        free(bytes);
    }
    assert_int_equal(moe4_writer_commit(context, writer), MOE4_OK);
}

static moe4_tensors *open_golden(struct fixture *fixture, const struct golden *golden)
{
    char path[512];
    moe4_tensors *source;
    golden_path(golden, "model.safetensors", path, sizeof path);
    assert_int_equal(moe4_tensors_open(&fixture->test.context, path, &source), MOE4_OK);
    return source;
}

/* Copies config.json, with the first `old` in it replaced. */
static void copy_config(struct fixture *fixture, const struct golden *golden, const char *old, const char *replacement)
{
    char edited[2048];
    size_t n_bytes;
    char *config = (char *)golden_bytes(golden, "config.json", &n_bytes);
    config[n_bytes] = '\0';
    char *found = strstr(config, old);
    assert_non_null(found);
    snprintf(edited, sizeof edited, "%.*s%s%s", (int)(found - config), config, replacement, found + strlen(old));
    scratch_write(&fixture->scratch, "config.json", edited, strlen(edited));
    free(config);
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

/* ---- What must be refused ---------------------------------------------------------------------------------------- */

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
        {"quantization_config", "x", MOE4_EUNSUPPORTED, "quantization_config.quant_method is missing"},
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
        {"\"num_experts_per_tok\": 4,\n \"experts_per_token\": 4,", "", MOE4_EFORMAT, "experts_per_token is missing"},
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
        {{"gate_up_proj_bias", {.dtype = "F16", .rank = 2, .shape = {8, 192}}},
         "is F16 [8, 192], expected BF16 [8, 192]"},
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
        {{"router.bias", {.dtype = "F32", .rank = 1, .shape = {8}}}, "is F32 [8], expected BF16 [8]"},
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
#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
    const struct CMUnitTest tests[] = {
        TEST(test_single_file),
        TEST(test_shards),
        TEST(test_every_bit_of_config_and_index),
        TEST(test_equivalent_forms),
        TEST(test_configs),
        TEST(test_config_variants),
        TEST(test_tensors_of_a_layer),
        TEST(test_extra_tensors),
        TEST(test_part_of_a_model),
        TEST(test_no_layer),
        TEST(test_local_range),
        TEST(test_progress),
        TEST(test_memory_is_bounded),
        TEST(test_shrinking_file),
        TEST(test_failing_allocations),
        TEST(test_load),
        TEST(test_load_is_refused),
        TEST(test_load_with_failing_allocations),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
