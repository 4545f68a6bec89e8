#include "checkpoint_copy.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const struct golden goldens[N_GOLDENS] = {
    {"gptoss_small", 8, 64, 96, 4, {840, 1864, 4936, 4952, 5976, 30552, 32088, 81240}},
    {"gptoss_clamped", 4, 96, 64, 2, {840, 1608, 2632, 2640, 3408, 15696, 16464, 41040}},
    {"gptoss_one_token", 32, 64, 64, 4, {864, 4960, 13152, 13216, 17312, 82848, 86944, 218016}},
};

void golden_path(const struct golden *golden, const char *file, char *path, size_t n_bytes)
{
    snprintf(path, n_bytes, "%s/golden/%s%s%s", TEST_DATA, golden->name, *file ? "/" : "", file);
}

unsigned char *golden_bytes(const struct golden *golden, const char *file, size_t *n_bytes)
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

void check_expert(const struct golden *golden, const unsigned char *file, int64_t e, const moe4_expert *expert)
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

void check_layer(struct fixture *fixture, const struct golden *golden, const char *folder)
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

/* Whether `name` ends in `end`. */
static int ends_in(const char *name, const char *end)
{
    size_t length = strlen(name), suffix = end ? strlen(end) : 0;
    return end && length >= suffix && strcmp(name + length - suffix, end) == 0;
}

void write_copy(struct fixture *fixture, const moe4_tensors *source, const char *name, int part, int n_parts,
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

moe4_tensors *open_golden(struct fixture *fixture, const struct golden *golden)
{
    char path[512];
    moe4_tensors *source;
    golden_path(golden, "model.safetensors", path, sizeof path);
    assert_int_equal(moe4_tensors_open(&fixture->test.context, path, &source), MOE4_OK);
    return source;
}

void copy_config(struct fixture *fixture, const struct golden *golden, const char *old, const char *replacement)
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
