/* A model of Kimi-K3's layers by its headers alone, shards of holes: what is kept of a tensor must stay small, since
 * the whole model has half a million of them. */
#include "io_helpers.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { E = 896, N_LAYERS = 5, H = 3584, WIDTH = 7168, I = 3072, BYTES_A_TENSOR = 1000 };

static const char config[] =
    "{\"model_type\": \"kimi_k3\", \"text_config\": {\"num_experts\": 896, \"num_experts_per_token\": 16,"
    "\"hidden_size\": 7168, \"routed_expert_hidden_size\": 3584, \"moe_intermediate_size\": 3072,"
    "\"num_hidden_layers\": 5, \"hidden_act\": \"situ\", \"activation_situ_beta\": 4.0,"
    "\"activation_situ_linear_beta\": 25.0, \"topk_method\": \"noaux_tc\", \"routed_scaling_factor\": 2.5,"
    "\"quantization_config\": {\"quant_method\": \"compressed-tensors\", \"format\": \"mxfp4-pack-quantized\","
    "\"config_groups\": {\"group_0\": {\"weights\": {\"num_bits\": 4, \"type\": \"float\", \"group_size\": 32}}}}}}";

/* One shard while it is written. */
struct shard {
    FILE *file;
    FILE *index;
    const char *name;
    int64_t data_bytes;
    int n;
};

static void add(struct shard *shard, const char *name, const char *dtype, int64_t rows, int64_t columns,
                int64_t n_bytes)
{
    fprintf(shard->file, "%s\"%s\":{\"dtype\":\"%s\",\"shape\":[%" PRId64, shard->n ? "," : "", name, dtype, rows);
    if (columns) fprintf(shard->file, ",%" PRId64, columns);
    fprintf(shard->file, "],\"data_offsets\":[%" PRId64 ",%" PRId64 "]}", shard->data_bytes,
            shard->data_bytes + n_bytes);
    fprintf(shard->index, "%s\"%s\":\"%s\"", ftell(shard->index) > 20 ? "," : "", name, shard->name);
    shard->data_bytes += n_bytes;
    shard->n++;
}

static void add_layer(struct shard *shard, int layer)
{
    static const struct {
        const char *name;
        int64_t rows, K;
    } matrices[] = {{"w1", I, H}, {"w2", H, I}, {"w3", I, H}};
    char name[128];
    for (int e = 0; e < E; e++)
        for (int m = 0; m < 3; m++) {
            int64_t rows = matrices[m].rows, K = matrices[m].K;
            snprintf(name, sizeof name, "model.layers.%d.block_sparse_moe.experts.%d.%s.weight_packed", layer, e,
                     matrices[m].name);
            add(shard, name, "U8", rows, K / 2, rows * K / 2);
            snprintf(name, sizeof name, "model.layers.%d.block_sparse_moe.experts.%d.%s.weight_scale", layer, e,
                     matrices[m].name);
            add(shard, name, "U8", rows, K / 32, rows * K / 32);
        }
    snprintf(name, sizeof name, "model.layers.%d.block_sparse_moe.gate.weight", layer);
    add(shard, name, "BF16", E, WIDTH, (int64_t)E * WIDTH * 2);
    snprintf(name, sizeof name, "model.layers.%d.block_sparse_moe.gate.e_score_correction_bias", layer);
    add(shard, name, "F32", E, 0, (int64_t)E * 4);
}

/* A shard a layer: a header, and a hole for its data. */
static void write_shard(struct scratch *scratch, FILE *index, int layer)
{
    char name[32];
    snprintf(name, sizeof name, "%d.safetensors", layer);
    struct shard shard = {.file = fopen(scratch_path(scratch, name), "w+b"), .index = index, .name = name};
    assert_non_null(shard.file);
    fwrite("\0\0\0\0\0\0\0\0{", 9, 1, shard.file);
    add_layer(&shard, layer);
    fputc('}', shard.file);
    int64_t header_bytes = ftell(shard.file) - 8;
    rewind(shard.file);
    fwrite(&header_bytes, sizeof header_bytes, 1, shard.file);
    fflush(shard.file);
    assert_int_equal(ftruncate(fileno(shard.file), 8 + header_bytes + shard.data_bytes), 0);
    fclose(shard.file);
}

static void test_many_tensors(void **state)
{
    struct fixture *fixture = *state;
    moe4_context *context = &fixture->test.context;
    moe4_checkpoint *checkpoint;
    moe4_reader_options options = MOE4_READER_OPTIONS_INIT;
    FILE *index = fopen(scratch_path(&fixture->scratch, "model.safetensors.index.json"), "wb");
    assert_non_null(index);
    fputs("{\"weight_map\": {\n   ", index);
    for (int layer = 0; layer < N_LAYERS; layer++) write_shard(&fixture->scratch, index, layer);
    fputs("}}", index);
    fclose(index);
    scratch_write(&fixture->scratch, "config.json", config, sizeof config - 1);
    if (moe4_checkpoint_open(context, fixture->scratch.folder, &checkpoint) != MOE4_OK)
        fail_msg("%s", context->message);
    int64_t n_tensors = moe4_tensors_count(moe4_checkpoint_tensors(checkpoint));
    assert_int_equal(n_tensors, N_LAYERS * (6 * E + 2));
    assert_true(fixture->test.counter.peak_bytes < n_tensors * BYTES_A_TENSOR);
    options.router = MOE4_ROUTER_SKIP;
    for (int layer = 0; layer < N_LAYERS; layer++) {
        moe4_layer_reader *reader;
        moe4_expert expert;
        if (moe4_layer_reader_open(context, checkpoint, layer, &options, &reader) != MOE4_OK)
            fail_msg("%s", context->message);
        assert_int_equal(moe4_layer_reader_read(context, reader, E - 1, &expert), MOE4_OK);
        assert_int_equal(expert.down.codes[(int64_t)H * I / 2 - 1], 0); /* holes read as zeros */
        moe4_layer_reader_close(reader);
    }
    moe4_checkpoint_close(checkpoint);
}

int main(void)
{
    const struct CMUnitTest tests[] = {FILE_TEST(test_many_tensors)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
