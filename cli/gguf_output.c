#include "gguf_output.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "command.h"
#include "dense.h"
#include "memory.h"
#include "message.h"
#include "progress.h"
#include "rearrange.h"
#include "ref.h"
#include "words.h"

enum { MAX_VALUES = 32, LAYER_TENSORS = 10, GGUF_BLOCK_BYTES = 17, BLOCK = 32 };

/* What is being written. */
struct gguf_job {
    struct gguf_output *output;
    moe4_gguf_value values[MAX_VALUES];
    int32_t n_values;
    char keys[MAX_VALUES][64];
    float *limits; /* one a layer of the model */

    moe4_tensor *tensors;
    char (*names)[64];
    int32_t n_tensors;
    moe4_writer *writer;
    char *rows, *scales, *blocks; /* of one projection of one expert */
    int64_t rows_room, scales_room, blocks_room;
    struct progress bar;
    int64_t bytes_done;
};

static const struct {
    const char *family, *word;
} architectures[] = {
    {"gpt-oss", "gpt-oss"},   {"DeepSeek-V4", "deepseek4"}, {"DeepSeek-V3", "deepseek2"},
    {"Kimi-K3", "kimi-k3"},   {"Qwen3 MoE", "qwen3moe"},    {"Qwen3-Next", "qwen3next"},
    {"GLM-4 MoE", "glm4moe"}, {"MiniMax-M2", "minimax"},    {"Qwen3.5 MoE", "qwen35moe"},
};

static const char *architecture_of(const char *family)
{
    for (size_t i = 0; i < sizeof architectures / sizeof *architectures; ++i)
        if (!strcmp(architectures[i].family, family)) return architectures[i].word;
    return NULL;
}

/* ---- Metadata ---------------------------------------------------------------------------------------------------- */

/* A new value whose key is `key` under the architecture, or as it is when it has a dot. */
static moe4_gguf_value *value_add(struct gguf_job *job, const char *key, moe4_gguf_type type)
{
    int32_t i = job->n_values++;
    snprintf(job->keys[i], sizeof job->keys[i], "%s%s%s",
             strncmp(key, "general.", 8) && strncmp(key, "moe4.", 5) ? architecture_of(job->output->info->family) : "",
             strncmp(key, "general.", 8) && strncmp(key, "moe4.", 5) ? "." : "", key);
    job->values[i] = (moe4_gguf_value){.key = job->keys[i], .type = type};
    return &job->values[i];
}

static void put_integer(struct gguf_job *job, const char *key, int64_t value)
{
    value_add(job, key, MOE4_GGUF_U32)->u32 = (uint32_t)value;
}

static void put_real(struct gguf_job *job, const char *key, float value)
{
    value_add(job, key, MOE4_GGUF_F32)->f32 = value;
}

static void put_text(struct gguf_job *job, const char *key, const char *value)
{
    value_add(job, key, MOE4_GGUF_STRING)->text = value;
}

/* expert_gating_func of a routing method, 0 where it has none; *normalised is expert_weights_norm. */
static uint32_t gating_of(moe4_routing_method method, uint32_t *normalised)
{
    *normalised = method != MOE4_ROUTING_DEFAULT && method != MOE4_ROUTING_SIGMOID;
    switch (method) {
    case MOE4_ROUTING_DEFAULT:
    case MOE4_ROUTING_RENORMALIZE: return 1;
    case MOE4_ROUTING_DEEPSEEK_V3:
    case MOE4_ROUTING_MINIMAX2:
    case MOE4_ROUTING_SIGMOID: return 2;
    case MOE4_ROUTING_HASH:
    case MOE4_ROUTING_SQRT_SOFTPLUS: return 4;
    default: return 0;
    }
}

static int put_routing(struct gguf_job *job, const moe4_routing *routing)
{
    uint32_t normalised, gating = gating_of(routing->method, &normalised);
    if (!gating) return fail("routing %s: GGUF has no word for it", routing_word(routing->method));
    put_integer(job, "expert_used_count", routing->top_k);
    put_integer(job, "expert_gating_func", gating);
    value_add(job, "expert_weights_norm", MOE4_GGUF_BOOL)->u32 = normalised;
    if (routing->scaling_factor != 0) put_real(job, "expert_weights_scale", routing->scaling_factor);
    if (routing->n_group) {
        put_integer(job, "expert_group_count", routing->n_group);
        put_integer(job, "expert_group_used_count", routing->topk_group);
    }
    return EXIT_OK;
}

/* Limits differ by layer, so there is one for each of the model's. */
static int put_limits(struct gguf_job *job, const moe4_layer_config *config, int32_t layer, int32_t n_all)
{
    if (config->limit.presence == MOE4_ABSENT) return EXIT_OK;
    if (!job->limits) {
        int code = allocate(&job->limits, n_all, sizeof *job->limits, "limits");
        if (code) return code;
        moe4_gguf_value *value = value_add(job, "swiglu_clamp_exp", MOE4_GGUF_F32_ARRAY);
        value->array = job->limits;
        value->n_elements = n_all;
    }
    if (layer < n_all) job->limits[layer] = config->limit.value;
    return EXIT_OK;
}

static void put_activation(struct gguf_job *job, const moe4_layer_config *config)
{
    if (config->activation != MOE4_ACTIVATION_SITU) return;
    put_real(job, "activation.situ_beta", config->alpha.value);
    if (config->beta.presence != MOE4_ABSENT) put_real(job, "activation.situ_linear_beta", config->beta.value);
}

static int put_metadata(struct gguf_job *job, const moe4_layer_config *config)
{
    const moe4_checkpoint_info *info = job->output->info;
    put_text(job, "general.architecture", architecture_of(info->family));
    put_text(job, "general.name", info->family);
    put_text(job, "moe4.contents", "MoE layers only");
    put_integer(job, "general.file_type", 38); /* mostly MXFP4 */
    put_integer(job, "general.quantization_version", 2);
    put_integer(job, "block_count", info->n_model_layers + info->n_extra_layers);
    if (info->n_extra_layers) put_integer(job, "nextn_predict_layers", info->n_extra_layers);
    put_integer(job, "embedding_length", info->model_hidden_size);
    if (config->hidden_size != info->model_hidden_size) put_integer(job, "expert_latent_length", config->hidden_size);
    put_integer(job, "expert_count", config->n_experts);
    put_integer(job, "expert_feed_forward_length", config->intermediate_size);
    if (info->n_shared_experts) put_integer(job, "expert_shared_count", info->n_shared_experts);
    put_activation(job, config);
    return put_routing(job, &config->routing);
}

/* ---- Tensors ----------------------------------------------------------------------------------------------------- */

static void tensor_add(struct gguf_job *job, int32_t layer, const char *name, const char *dtype, int32_t rank,
                       const int64_t *shape)
{
    moe4_tensor *tensor = &job->tensors[job->n_tensors];
    snprintf(job->names[job->n_tensors], sizeof job->names[0], "blk.%d.%s", layer, name);
    *tensor = (moe4_tensor){.name = job->names[job->n_tensors++], .dtype = dtype, .rank = rank};
    memcpy(tensor->shape, shape, (size_t)rank * sizeof *shape);
}

static const char *const weight_names[] = {"ffn_gate_exps.weight", "ffn_up_exps.weight", "ffn_down_exps.weight"};
static const char *const bias_names[] = {"ffn_gate_exps.bias", "ffn_up_exps.bias", "ffn_down_exps.bias"};

/* The order in which layer_write goes through them. */
static void layer_describe(struct gguf_job *job, int32_t layer, const moe4_layer_config *config,
                           const moe4_expert *sample)
{
    const moe4_routing *routing = &config->routing;
    int64_t E = config->n_experts, H = config->hidden_size, I = config->intermediate_size;
    int64_t width = config->router.hidden_size ? config->router.hidden_size : H;
    for (int role = 0; role < N_PROJECTIONS; ++role) {
        int64_t rows = role == ROLE_DOWN ? H : I;
        tensor_add(job, layer, weight_names[role], "MXFP4", 3, (int64_t[]){E, rows, role == ROLE_DOWN ? I : H});
        if (projection_matrix(sample, (enum projection_role)role)->bias)
            tensor_add(job, layer, bias_names[role], "F32", 2, (int64_t[]){E, rows});
    }
    if (config->router.weight) tensor_add(job, layer, "ffn_gate_inp.weight", "F32", 2, (int64_t[]){E, width});
    if (config->router.bias) tensor_add(job, layer, "ffn_gate_inp.bias", "F32", 1, &E);
    if (routing->correction_bias) tensor_add(job, layer, "exp_probs_b.bias", "F32", 1, &E);
    if (routing->hash_table)
        tensor_add(job, layer, "ffn_gate_tid2eid.weight", "I32", 2, (int64_t[]){routing->vocab_size, routing->top_k});
}

static int job_put(struct gguf_job *job, int32_t tensor, int64_t first, int64_t n_bytes, const void *data)
{
    if (moe4_writer_write(job->output->context, job->writer, tensor, first, n_bytes, data) != MOE4_OK)
        return fail_library(job->output->context);
    job->bytes_done += n_bytes;
    return progress_update(&job->bar, job->bytes_done, job->output->bytes_total);
}

/* A block's scale, then its codes with element j beside element j + 16. */
static void block_weave(const uint8_t *codes, uint8_t scale, uint8_t *block)
{
    uint8_t elements[BLOCK];
    for (int j = 0; j < BLOCK / 2; ++j) {
        elements[2 * j] = codes[j] & 15;
        elements[2 * j + 1] = codes[j] >> 4;
    }
    *block++ = scale;
    for (int j = 0; j < BLOCK / 2; ++j) block[j] = (uint8_t)(elements[j] | elements[j + 16] << 4);
}

static int write_projection(struct gguf_job *job, int32_t tensor, const moe4_layer_config *config,
                            const moe4_expert *expert, enum projection_role role, int32_t e)
{
    const moe4_matrix *matrix = projection_matrix(expert, role);
    struct row_place from = row_place(config, role);
    int64_t K = role == ROLE_DOWN ? config->intermediate_size : config->hidden_size;
    int64_t n_blocks = from.count * (K / BLOCK), n_bytes = n_blocks * GGUF_BLOCK_BYTES;
    int code = buffer_reserve(&job->rows, &job->rows_room, n_blocks * 16, "rows of an expert");
    if (!code) code = buffer_reserve(&job->scales, &job->scales_room, n_blocks, "scales of an expert");
    if (!code) code = buffer_reserve(&job->blocks, &job->blocks_room, n_bytes, "blocks of an expert");
    if (code) return code;
    rows_gather(matrix, PART_CODES, K, from, 0, 1, job->rows);
    rows_gather(matrix, PART_SCALES, K, from, 0, 1, job->scales);
    for (int64_t b = 0; b < n_blocks; ++b)
        block_weave((const uint8_t *)job->rows + b * 16, (uint8_t)job->scales[b],
                    (uint8_t *)job->blocks + b * GGUF_BLOCK_BYTES);
    return job_put(job, tensor, e * n_bytes, n_bytes, job->blocks);
}

/* Values first, first + step, ... as f32 or i32. */
static int write_values(struct gguf_job *job, int32_t tensor, int64_t at, const void *values, moe4_dtype dtype,
                        struct row_place from)
{
    int is_integer = dtype == MOE4_DTYPE_I32 || dtype == MOE4_DTYPE_I64;
    int code = buffer_reserve(&job->blocks, &job->blocks_room, from.count * 4, "values");
    for (int64_t i = 0; !code && i < from.count; ++i) {
        double value = ref_load(values, dtype, from.first + i * from.step);
        float real = (float)value;
        int32_t integer = is_integer ? (int32_t)value : 0;
        memcpy(job->blocks + 4 * i, is_integer ? (const void *)&integer : (const void *)&real, 4);
    }
    return code ? code : job_put(job, tensor, at * from.count * 4, from.count * 4, job->blocks);
}

static int write_router(struct gguf_job *job, int32_t *next, const moe4_layer_config *config)
{
    const moe4_router *router = &config->router;
    const moe4_routing *routing = &config->routing;
    int64_t E = config->n_experts, width = router->hidden_size ? router->hidden_size : config->hidden_size;
    const struct {
        const void *values;
        moe4_dtype dtype;
        int64_t count;
    } parts[] = {{router->weight, router->weight_dtype, E * width},
                 {router->bias, router->bias_dtype, E},
                 {routing->correction_bias, routing->correction_bias_dtype, E},
                 {routing->hash_table, routing->hash_table_dtype, routing->vocab_size * routing->top_k}};
    int code = EXIT_OK;
    for (size_t i = 0; !code && i < sizeof parts / sizeof *parts; ++i)
        if (parts[i].values)
            code = write_values(job, (*next)++, 0, parts[i].values, parts[i].dtype,
                                (struct row_place){0, 1, parts[i].count});
    return code;
}

static int write_expert(struct gguf_job *job, int32_t *next, const moe4_layer_config *config, const moe4_expert *expert,
                        int32_t e)
{
    int code = EXIT_OK;
    for (int role = 0; !code && role < N_PROJECTIONS; ++role) {
        const moe4_matrix *matrix = projection_matrix(expert, (enum projection_role)role);
        code = write_projection(job, (*next)++, config, expert, (enum projection_role)role, e);
        if (!code && matrix->bias)
            code = write_values(job, (*next)++, e, matrix->bias, matrix->bias_dtype,
                                row_place(config, (enum projection_role)role));
    }
    return code;
}

/* ---- Layers ------------------------------------------------------------------------------------------------------ */

static int reader_open(const struct gguf_job *job, int32_t layer, moe4_layer_reader **reader)
{
    if (moe4_layer_reader_open(job->output->context, job->output->checkpoint, layer, NULL, reader) == MOE4_OK)
        return EXIT_OK;
    return fail_library(job->output->context);
}

static int reader_read(const struct gguf_job *job, moe4_layer_reader *reader, int32_t e, moe4_expert *expert)
{
    if (moe4_layer_reader_read(job->output->context, reader, e, expert) == MOE4_OK) return EXIT_OK;
    return fail_library(job->output->context);
}

static int layer_plan(struct gguf_job *job, int32_t layer)
{
    const moe4_checkpoint_info *info = job->output->info;
    moe4_layer_reader *reader = NULL;
    moe4_expert sample;
    int code = reader_open(job, layer, &reader);
    if (code) return code;
    const moe4_layer_config *config = moe4_layer_reader_config(reader);
    if (config->gate_up == MOE4_GATE_UP_NONE)
        code = fail("layer %d: experts without a gate: no layout that can be written has them", layer);
    if (!code && !job->n_values) code = put_metadata(job, config);
    if (!code && config->activation == MOE4_ACTIVATION_SILU)
        code = put_limits(job, config, layer, info->n_model_layers + info->n_extra_layers);
    if (!code) code = reader_read(job, reader, 0, &sample);
    if (!code) layer_describe(job, layer, config, &sample);
    moe4_layer_reader_close(reader);
    return code;
}

static int layer_write(struct gguf_job *job, int32_t layer, int32_t *next)
{
    moe4_layer_reader *reader = NULL;
    int32_t first = *next;
    int code = reader_open(job, layer, &reader);
    if (code) return code;
    const moe4_layer_config *config = moe4_layer_reader_config(reader);
    for (int32_t e = 0; !code && e < config->n_experts; ++e) {
        moe4_expert expert;
        *next = first;
        code = reader_read(job, reader, e, &expert);
        if (!code) code = write_expert(job, next, config, &expert, e);
    }
    if (!code) code = write_router(job, next, config);
    moe4_layer_reader_close(reader);
    return code;
}

/* ---- Comparing --------------------------------------------------------------------------------------------------- */

static int param_is_same(const moe4_param *a, const moe4_param *b)
{
    return a->presence == b->presence && (a->presence == MOE4_ABSENT || a->value == b->value);
}

/* What of a layer the file does not say as the source does; NULL if nothing. */
static const char *what_differs(const moe4_layer_config *a, const moe4_layer_config *b)
{
    if (a->activation != b->activation) return "its activation";
    if (!param_is_same(&a->alpha, &b->alpha)) return "the activation's alpha";
    if (!param_is_same(&a->beta, &b->beta)) return "the activation's beta";
    if (!param_is_same(&a->limit, &b->limit)) return "the activation's limit";
    if (a->routing.method != b->routing.method) return "its routing method";
    if (a->routing.top_k != b->routing.top_k) return "its top_k";
    if (a->routing.n_group != b->routing.n_group || a->routing.topk_group != b->routing.topk_group)
        return "its expert groups";
    if (a->routing.scaling_factor != b->routing.scaling_factor) return "its scaling factor";
    if (a->hidden_size != b->hidden_size || a->intermediate_size != b->intermediate_size) return "its sizes";
    return NULL;
}

static int layer_verify(const struct gguf_job *job, const moe4_checkpoint *written, int32_t layer)
{
    moe4_layer_reader *readers[2] = {NULL, NULL};
    int code = reader_open(job, layer, &readers[0]);
    if (!code && moe4_layer_reader_open(job->output->context, written, layer, NULL, &readers[1]) != MOE4_OK)
        code = fail_library(job->output->context);
    const char *what =
        code ? NULL : what_differs(moe4_layer_reader_config(readers[0]), moe4_layer_reader_config(readers[1]));
    if (what)
        code = fail("layer %d: %s would be lost: GGUF's %s implies another", layer, what,
                    architecture_of(job->output->info->family));
    moe4_layer_reader_close(readers[0]);
    moe4_layer_reader_close(readers[1]);
    return code;
}

static int job_verify(const struct gguf_job *job, const char *path)
{
    moe4_checkpoint *written = NULL;
    int code = EXIT_OK;
    if (moe4_checkpoint_open(job->output->context, path, &written) != MOE4_OK)
        return fail_library(job->output->context);
    for (int32_t i = 0; !code && i < job->output->n_layers; ++i)
        code = layer_verify(job, written, job->output->layers[i]);
    moe4_checkpoint_close(written);
    return code;
}

/* ---- All of it --------------------------------------------------------------------------------------------------- */

static int64_t tensor_bytes(const moe4_tensor *tensor)
{
    int64_t n = 1;
    for (int32_t d = 0; d < tensor->rank; ++d) n *= tensor->shape[d];
    return strcmp(tensor->dtype, "MXFP4") ? 4 * n : n / BLOCK * GGUF_BLOCK_BYTES;
}

static int job_write(struct gguf_job *job, const char *path)
{
    struct gguf_output *output = job->output;
    int32_t next = 0;
    int code = EXIT_OK;
    if (moe4_gguf_writer_create(output->context, path, job->tensors, job->n_tensors, job->values, job->n_values,
                                &job->writer) != MOE4_OK)
        return fail_library(output->context);
    job->bar = progress_begin("writing");
    for (int32_t i = 0; !code && i < output->n_layers; ++i) code = layer_write(job, output->layers[i], &next);
    progress_end(&job->bar);
    if (code)
        moe4_writer_discard(job->writer);
    else if (moe4_writer_commit(output->context, job->writer) != MOE4_OK)
        code = fail_library(output->context);
    return code;
}

int gguf_output_write(struct gguf_output *output)
{
    struct gguf_job job = {.output = output};
    char unverified[PATH_MAX];
    if (!architecture_of(output->info->family))
        return fail("model %s: GGUF has no architecture for it that is known here", output->info->family);
    snprintf(unverified, sizeof unverified, "%s.%ld.gguf", output->path, (long)getpid());
    int64_t room = (int64_t)output->n_layers * LAYER_TENSORS;
    int code = allocate(&job.tensors, room, sizeof *job.tensors, "tensors");
    if (!code) code = allocate(&job.names, room, sizeof *job.names, "tensor names");
    for (int32_t i = 0; !code && i < output->n_layers; ++i) code = layer_plan(&job, output->layers[i]);
    for (int32_t i = 0; !code && i < job.n_tensors; ++i) output->bytes_total += tensor_bytes(&job.tensors[i]);
    if (!code) code = job_write(&job, unverified);
    if (!code) code = job_verify(&job, unverified);
    if (!code && rename(unverified, output->path)) code = fail("%s: %s", output->path, strerror(errno));
    if (code) unlink(unverified);
    free(job.tensors);
    free(job.names);
    free(job.limits);
    free(job.rows);
    free(job.scales);
    free(job.blocks);
    return code;
}
