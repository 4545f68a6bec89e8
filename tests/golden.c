#include "golden.h"

#include <setjmp.h>
#include <stdarg.h> /* for cmocka.h, as the next two */
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <jansson.h>

/* ---- Any safetensors file of ours ---- */

typedef struct named_tensor {
    const char *name;
    golden_tensor tensor;
} named_tensor;

struct golden_file {
    json_t *header;
    size_t n_tensors;
    named_tensor *tensors;
};

static void *test_allocate(size_t bytes)
{
    void *memory = aligned_alloc(64, (bytes + 63) / 64 * 64);
    if (!memory) fail_msg("out of memory for %zu bytes", bytes);
    return memory;
}

/* The bytes of a file and a 0 after them. */
static char *read_file(const char *path, size_t *n_bytes)
{
    char full[1024];
    snprintf(full, sizeof full, "%s/%s", TEST_DATA, path);
    FILE *stream = fopen(full, "rb");
    if (!stream) fail_msg("cannot open %s", full);
    if (fseek(stream, 0, SEEK_END)) fail_msg("cannot seek in %s", full);
    *n_bytes = (size_t)ftell(stream);
    rewind(stream);
    char *bytes = test_allocate(*n_bytes + 1);
    if (fread(bytes, 1, *n_bytes, stream) != *n_bytes) fail_msg("cannot read %s", full);
    bytes[*n_bytes] = 0;
    fclose(stream);
    return bytes;
}

static named_tensor copy_tensor(const char *name, const json_t *entry, const char *data, size_t data_bytes)
{
    const json_t *shape = json_object_get(entry, "shape"), *offsets = json_object_get(entry, "data_offsets");
    size_t begin = (size_t)json_integer_value(json_array_get(offsets, 0));
    size_t end = (size_t)json_integer_value(json_array_get(offsets, 1));
    named_tensor named = {name, {.dtype = json_string_value(json_object_get(entry, "dtype"))}};
    golden_tensor *tensor = &named.tensor;
    if (!tensor->dtype || json_array_size(shape) > 8 || begin > end || end > data_bytes)
        fail_msg("tensor %s has a bad description", name);
    tensor->rank = (int32_t)json_array_size(shape);
    for (int32_t i = 0; i < tensor->rank; i++) tensor->shape[i] = json_integer_value(json_array_get(shape, (size_t)i));
    tensor->n_bytes = (int64_t)(end - begin);
    void *copy = test_allocate(end - begin + 1);
    memcpy(copy, data + begin, end - begin);
    tensor->data = copy;
    return named;
}

golden_file *golden_file_open(const char *path)
{
    size_t n_bytes, n_tensors = 0;
    char *bytes = read_file(path, &n_bytes);
    uint64_t header_bytes = 0;
    if (n_bytes >= 8) memcpy(&header_bytes, bytes, 8);
    if (n_bytes < 8 || header_bytes > n_bytes - 8) fail_msg("%s is not a safetensors file", path);

    golden_file *file = test_allocate(sizeof *file);
    file->header = json_loadb(bytes + 8, (size_t)header_bytes, 0, NULL);
    if (!file->header) fail_msg("the header of %s is not JSON", path);
    file->tensors = test_allocate((json_object_size(file->header) + 1) * sizeof *file->tensors);
    const char *name;
    json_t *entry;
    json_object_foreach(file->header, name, entry)
    {
        if (strcmp(name, "__metadata__") == 0) continue;
        file->tensors[n_tensors++] =
            copy_tensor(name, entry, bytes + 8 + header_bytes, n_bytes - 8 - (size_t)header_bytes);
    }
    file->n_tensors = n_tensors;
    free(bytes);
    return file;
}

void golden_file_close(golden_file *file)
{
    if (!file) return;
    for (size_t i = 0; i < file->n_tensors; i++) free((void *)file->tensors[i].tensor.data);
    free(file->tensors);
    json_decref(file->header);
    free(file);
}

const golden_tensor *golden_look(const golden_file *file, const char *name)
{
    for (size_t i = 0; i < file->n_tensors; i++)
        if (strcmp(file->tensors[i].name, name) == 0) return &file->tensors[i].tensor;
    return NULL;
}

const golden_tensor *golden_find(const golden_file *file, const char *name)
{
    const golden_tensor *tensor = golden_look(file, name);
    if (!tensor) fail_msg("there is no tensor %s", name);
    return tensor;
}

const char *golden_metadata(const golden_file *file, const char *key)
{
    return json_string_value(json_object_get(json_object_get(file->header, "__metadata__"), key));
}

const void *golden_data(const golden_file *file, const char *name, const char *dtype, int64_t n_elements)
{
    const golden_tensor *tensor = golden_find(file, name);
    int64_t count = 1;
    for (int32_t i = 0; i < tensor->rank; i++) count *= tensor->shape[i];
    if (strcmp(tensor->dtype, dtype) != 0) fail_msg("tensor %s is %s, expected %s", name, tensor->dtype, dtype);
    if (count != n_elements)
        fail_msg("tensor %s has %lld elements, expected %lld", name, (long long)count, (long long)n_elements);
    return tensor->data;
}

/* ---- The gpt-oss layers ---- */

const char *const golden_layer_names[3] = {"gptoss_small", "gptoss_clamped", "gptoss_one_token"};

static json_t *read_config(const char *folder)
{
    char path[256];
    size_t n_bytes;
    snprintf(path, sizeof path, "golden/%s/config.json", folder);
    char *text = read_file(path, &n_bytes);
    json_t *config = json_loadb(text, n_bytes, 0, NULL);
    if (!config) fail_msg("%s is not JSON", path);
    free(text);
    return config;
}

static int64_t config_integer(const json_t *config, const char *key)
{
    const json_t *value = json_object_get(config, key);
    if (!json_is_integer(value)) fail_msg("config.json: %s is not an integer", key);
    return json_integer_value(value);
}

static float config_number(const json_t *config, const char *key)
{
    const json_t *value = json_object_get(config, key);
    if (!json_is_number(value)) fail_msg("config.json: %s is not a number", key);
    return (float)json_number_value(value);
}

static golden_file *open_in(const char *folder, const char *file)
{
    char path[256];
    snprintf(path, sizeof path, "golden/%s/%s", folder, file);
    return golden_file_open(path);
}

static void fill_config(golden_layer *layer, const char *name)
{
    json_t *json = read_config(name);
    moe4_layer_config *config = &layer->config;
    *config = (moe4_layer_config)MOE4_LAYER_CONFIG_INIT;
    config->hidden_size = config_integer(json, "hidden_size");
    config->intermediate_size = config_integer(json, "intermediate_size");
    config->n_experts = (int32_t)config_integer(json, "num_local_experts");
    config->gate_up = MOE4_GATE_UP_INTERLEAVED;
    config->activation = MOE4_ACTIVATION_SWIGLU_OAI;
    config->alpha = (moe4_param){MOE4_SAME, 1.702f, NULL};
    config->beta = (moe4_param){MOE4_SAME, 1.0f, NULL};
    config->limit = (moe4_param){MOE4_SAME, config_number(json, "swiglu_limit"), NULL};
    config->routing.method = MOE4_ROUTING_RENORMALIZE;
    config->routing.top_k = (int32_t)config_integer(json, "num_experts_per_tok");
    json_decref(json);
}

static const void *weights(const golden_layer *layer, const char *name, const char *dtype, int64_t per_expert)
{
    char full[128];
    snprintf(full, sizeof full, "model.layers.0.mlp.%s", name);
    return golden_data(layer->files[0], full, dtype, layer->config.n_experts * per_expert);
}

static void fill_weights(golden_layer *layer)
{
    moe4_layer_config *config = &layer->config;
    int64_t H = config->hidden_size, I = config->intermediate_size;
    const uint8_t *up_codes = weights(layer, "experts.gate_up_proj_blocks", "U8", 2 * I * H / 2);
    const uint8_t *up_scales = weights(layer, "experts.gate_up_proj_scales", "U8", 2 * I * H / 32);
    const uint16_t *up_bias = weights(layer, "experts.gate_up_proj_bias", "BF16", 2 * I);
    const uint8_t *down_codes = weights(layer, "experts.down_proj_blocks", "U8", H * I / 2);
    const uint8_t *down_scales = weights(layer, "experts.down_proj_scales", "U8", H * I / 32);
    const uint16_t *down_bias = weights(layer, "experts.down_proj_bias", "BF16", H);
    config->router.weight = weights(layer, "router.weight", "BF16", H);
    config->router.bias = weights(layer, "router.bias", "BF16", 1);
    config->router.weight_dtype = config->router.bias_dtype = MOE4_DTYPE_BF16;

    layer->experts = test_allocate((size_t)config->n_experts * sizeof *layer->experts);
    for (int64_t e = 0; e < config->n_experts; e++)
        layer->experts[e] = (moe4_expert){
            .gate_up = {up_codes + e * 2 * I * H / 2, up_scales + e * 2 * I * H / 32, 0, 0, up_bias + e * 2 * I,
                        MOE4_DTYPE_BF16},
            .down = {down_codes + e * H * I / 2, down_scales + e * H * I / 32, 0, 0, down_bias + e * H,
                     MOE4_DTYPE_BF16},
        };
}

static void fill_values(golden_layer *layer)
{
    const golden_file *io = layer->files[1], *rounded = layer->files[2];
    int64_t H = layer->config.hidden_size, I = layer->config.intermediate_size, E = layer->config.n_experts;
    int64_t T = layer->T = golden_find(io, "hidden_states")->shape[0], R = T * layer->config.routing.top_k;
    layer->hidden_states = golden_data(io, "hidden_states", "BF16", T * H);
    layer->router_logits = golden_data(io, "router_logits", "F32", T * E);
    layer->topk_ids = golden_data(io, "topk_ids", "I32", R);
    layer->topk_weights = golden_data(io, "topk_weights", "F32", R);
    layer->output = golden_data(io, "output", "F32", T * H);
    layer->intermediate = golden_data(rounded, "intermediate", "BF16", R * I);
    layer->gemm2_rows = golden_data(rounded, "gemm2_rows", "BF16", R * H);
    layer->row_map = golden_data(rounded, "row_map", "I32", R);
    layer->expert_weights = golden_data(rounded, "expert_weights", "BF16", R);
    layer->rounded_output = golden_data(rounded, "output", "BF16", T * H);
}

golden_layer *golden_layer_open(const char *name)
{
    static const char *const files[3] = {"model.safetensors", "io.safetensors", "io_rounded.safetensors"};
    golden_layer *layer = test_allocate(sizeof *layer);
    for (int i = 0; i < 3; i++) layer->files[i] = open_in(name, files[i]);
    fill_config(layer, name);
    fill_weights(layer);
    fill_values(layer);
    return layer;
}

void golden_layer_close(golden_layer *layer)
{
    for (int i = 0; i < 3; i++) golden_file_close(layer->files[i]);
    free(layer->experts);
    free(layer);
}

/* ---- The DeepSeek-V3 router ---- */

golden_router *golden_router_open(void)
{
    golden_router *router = test_allocate(sizeof *router);
    json_t *json = read_config("dsv3_256_8");
    router->E = (int32_t)config_integer(json, "num_experts");
    router->routing = (moe4_routing)MOE4_ROUTING_INIT;
    router->routing.method = MOE4_ROUTING_DEEPSEEK_V3;
    router->routing.top_k = (int32_t)config_integer(json, "top_k");
    router->routing.n_group = (int32_t)config_integer(json, "n_group");
    router->routing.topk_group = (int32_t)config_integer(json, "topk_group");
    router->routing.scaling_factor = config_number(json, "routed_scaling_factor");
    json_decref(json);

    router->file = open_in("dsv3_256_8", "io.safetensors");
    router->T = golden_find(router->file, "router_logits")->shape[0];
    router->logits = golden_data(router->file, "router_logits", "F32", router->T * router->E);
    router->ids = golden_data(router->file, "topk_ids", "I32", router->T * router->routing.top_k);
    router->weights = golden_data(router->file, "topk_weights", "F32", router->T * router->routing.top_k);
    router->routing.correction_bias = golden_data(router->file, "correction_bias", "F32", router->E);
    router->routing.correction_bias_dtype = MOE4_DTYPE_F32;
    return router;
}

void golden_router_close(golden_router *router)
{
    golden_file_close(router->file);
    free(router);
}
