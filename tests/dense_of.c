/* dense_of SRC OUT stacked|apart|apart_with_biases BF16|F16|F32: the layers of a gpt-oss checkpoint unquantised, in
 * OUT/model.safetensors.
 *
 * stacked  as transformers saves gpt-oss: gate_up_proj [E, H, 2I], down_proj [E, I, H], biases and router copied
 * apart    as Qwen3 MoE: experts.N.{gate,up,down}_proj.weight [rows, K] and gate.weight, which is the router's
 * apart_with_biases  the same of gpt-oss: each with a .bias; the router under its own names */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "moe4/io.h"
#include "ref.h"

static moe4_context *context;
static moe4_tensor tensors[4096];
static void *data[4096];
static int32_t n_tensors;

static void must(int good, const char *what)
{
    if (good) return;
    fprintf(stderr, "dense_of: %s: %s\n", what, moe4_context_message(context));
    exit(1);
}

static void add(const char *name, const char *dtype, int32_t rank, const int64_t *shape, void *bytes)
{
    moe4_tensor *tensor = &tensors[n_tensors];
    *tensor = (moe4_tensor){.name = strdup(name), .dtype = dtype, .rank = rank};
    memcpy(tensor->shape, shape, (size_t)rank * sizeof *shape);
    data[n_tensors++] = bytes;
}

static size_t element_bytes(const char *dtype)
{
    return strcmp(dtype, "F32") ? 2 : 4;
}

static void store(char *at, const char *dtype, double value)
{
    float wide = (float)value;
    uint16_t half = *dtype == 'B' ? ref_to_bf16(value) : ref_to_f16(value);
    if (!strcmp(dtype, "F32"))
        memcpy(at, &wide, 4);
    else
        memcpy(at, &half, 2);
}

/* Rows first, first + step, ... of a matrix of K columns, transposed or not. */
static void fill(char *at, const char *dtype, const moe4_matrix *matrix, int64_t K, int64_t first, int64_t step,
                 int64_t rows, int transposed)
{
    size_t element = element_bytes(dtype);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t k = 0; k < K; k++) {
            int64_t place = transposed ? k * rows + r : r * K + k;
            store(at + (size_t)place * element, dtype, ref_weight(matrix, K, first + r * step, k));
        }
}

static void copy(const moe4_tensors *source, int layer, const char *from, const char *to)
{
    char name[128];
    snprintf(name, sizeof name, "model.layers.%d.mlp.%s", layer, from);
    const moe4_tensor *tensor = moe4_tensors_find(source, name);
    must(tensor != NULL, name);
    void *bytes = malloc((size_t)tensor->n_bytes);
    must(!moe4_tensors_read(context, source, tensor, 0, tensor->n_bytes, bytes), name);
    snprintf(name, sizeof name, "model.layers.%d.mlp.%s", layer, to);
    add(name, tensor->dtype, tensor->rank, tensor->shape, bytes);
}

static void add_stacked(moe4_layer_reader *reader, int layer, const char *dtype)
{
    const moe4_layer_config *config = moe4_layer_reader_config(reader);
    int64_t H = config->hidden_size, I = config->intermediate_size, E = config->n_experts;
    size_t element = element_bytes(dtype);
    char *gate_up = malloc((size_t)(E * H * 2 * I) * element), *down = malloc((size_t)(E * H * I) * element), name[128];
    for (int32_t e = 0; e < E; e++) {
        moe4_expert expert;
        must(!moe4_layer_reader_read(context, reader, e, &expert), "read");
        fill(gate_up + (size_t)(e * H * 2 * I) * element, dtype, &expert.gate_up, H, 0, 1, 2 * I, 1);
        fill(down + (size_t)(e * H * I) * element, dtype, &expert.down, I, 0, 1, H, 1);
    }
    snprintf(name, sizeof name, "model.layers.%d.mlp.experts.gate_up_proj", layer);
    add(name, dtype, 3, (int64_t[]){E, H, 2 * I}, gate_up);
    snprintf(name, sizeof name, "model.layers.%d.mlp.experts.down_proj", layer);
    add(name, dtype, 3, (int64_t[]){E, I, H}, down);
}

/* Biases first, first + step, ... of a matrix. */
static void add_bias(const moe4_matrix *matrix, int layer, int32_t e, const char *word, int64_t first, int64_t step,
                     int64_t rows)
{
    char name[128];
    uint16_t *bias = malloc((size_t)rows * sizeof *bias);
    must(matrix->bias && matrix->bias_dtype == MOE4_DTYPE_BF16, "bias");
    for (int64_t r = 0; r < rows; r++) bias[r] = ((const uint16_t *)matrix->bias)[first + r * step];
    snprintf(name, sizeof name, "model.layers.%d.mlp.experts.%d.%s_proj.bias", layer, e, word);
    add(name, "BF16", 1, &rows, bias);
}

static void add_apart(moe4_layer_reader *reader, int layer, const char *dtype, int has_biases)
{
    static const char *const words[] = {"gate", "up", "down"};
    const moe4_layer_config *config = moe4_layer_reader_config(reader);
    int64_t H = config->hidden_size, I = config->intermediate_size;
    for (int32_t e = 0; e < config->n_experts; e++) {
        moe4_expert expert;
        must(!moe4_layer_reader_read(context, reader, e, &expert), "read");
        for (int p = 0; p < 3; p++) {
            char *weight = malloc((size_t)(H * I) * element_bytes(dtype)), name[128];
            if (p < 2)
                fill(weight, dtype, &expert.gate_up, H, p, 2, I, 0);
            else
                fill(weight, dtype, &expert.down, I, 0, 1, H, 0);
            snprintf(name, sizeof name, "model.layers.%d.mlp.experts.%d.%s_proj.weight", layer, e, words[p]);
            add(name, dtype, 2, (int64_t[]){p < 2 ? I : H, p < 2 ? H : I}, weight);
            if (has_biases && p < 2) add_bias(&expert.gate_up, layer, e, words[p], p, 2, I);
            if (has_biases && p == 2) add_bias(&expert.down, layer, e, words[p], 0, 1, H);
        }
    }
}

static void save(const char *folder)
{
    char path[1024];
    moe4_writer *writer;
    snprintf(path, sizeof path, "%s/model.safetensors", folder);
    must(!moe4_writer_create(context, path, tensors, n_tensors, NULL, &writer), path);
    for (int32_t i = 0; i < n_tensors; i++) {
        int64_t bytes = tensors[i].dtype[0] == 'F' && tensors[i].dtype[1] == '3' ? 4 : 2;
        for (int32_t d = 0; d < tensors[i].rank; d++) bytes *= tensors[i].shape[d];
        must(!moe4_writer_write(context, writer, i, 0, bytes, data[i]), tensors[i].name);
    }
    must(!moe4_writer_commit(context, writer), path);
}

int main(int argc, char **argv)
{
    moe4_checkpoint *checkpoint;
    if (argc != 5) return 2;
    int is_stacked = !strcmp(argv[3], "stacked"), has_biases = !strcmp(argv[3], "apart_with_biases");
    must(!moe4_context_create(NULL, &context), "context");
    must(!moe4_checkpoint_open(context, argv[1], &checkpoint), argv[1]);
    const moe4_tensors *source = moe4_checkpoint_tensors(checkpoint);
    for (int32_t i = 0, layer; (layer = moe4_checkpoint_layer_number(checkpoint, i)) >= 0; i++) {
        moe4_layer_reader *reader;
        must(!moe4_layer_reader_open(context, checkpoint, layer, NULL, &reader), "layer");
        if (is_stacked) {
            add_stacked(reader, layer, argv[4]);
            copy(source, layer, "experts.gate_up_proj_bias", "experts.gate_up_proj_bias");
            copy(source, layer, "experts.down_proj_bias", "experts.down_proj_bias");
        } else {
            add_apart(reader, layer, argv[4], has_biases);
        }
        int is_gpt_oss = is_stacked || has_biases;
        if (is_gpt_oss) copy(source, layer, "router.bias", "router.bias");
        copy(source, layer, "router.weight", is_gpt_oss ? "router.weight" : "gate.weight");
        moe4_layer_reader_close(reader);
    }
    save(argv[2]);
    for (int32_t i = 0; i < n_tensors; i++) {
        free((char *)tensors[i].name);
        free(data[i]);
    }
    moe4_checkpoint_close(checkpoint);
    moe4_context_destroy(context);
    return 0;
}
