/* moe4 synth: a checkpoint of true shape and layout, filled by the generator. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <jansson.h>

#include "command.h"
#include "generate.h"
#include "memory.h"
#include "message.h"
#include "moe4/io.h"
#include "options.h"
#include "parallel.h"
#include "progress.h"
#include "report.h"
#include "shapes.h"

enum { LAYER_TENSORS = 8 };

static const char *const synth_models[] = {"gpt-oss-20b", "gpt-oss-120b", NULL};
static const char *const synth_shapes[] = {"oss20b", "oss120b"};

struct synth {
    const char *path;
    int model; /* index of synth_models */
    int64_t n_layers, n_experts, seed, H, I;
    int force, json;

    int32_t top_k;
    char parameters[192]; /* what the file's metadata records */
    char *model_file, *config_file;

    moe4_context *context;
    int32_t n_threads;
    moe4_writer *writer;
    struct progress bar;
    int64_t bytes_done, bytes_total;
};

/* ---- Files ------------------------------------------------------------------------------------------------------- */

static char *path_join(const char *folder, const char *name)
{
    char *path = NULL;
    return asprintf(&path, "%s/%s", folder, name) < 0 ? NULL : path;
}

/* What the two files of a folder hold already. */
typedef enum synth_state { SYNTH_ABSENT, SYNTH_SAME, SYNTH_OTHER } synth_state;

static synth_state synth_look(const struct synth *synth)
{
    if (access(synth->model_file, F_OK)) return access(synth->config_file, F_OK) ? SYNTH_ABSENT : SYNTH_OTHER;
    moe4_tensors *tensors = NULL;
    if (moe4_tensors_open(synth->context, synth->model_file, &tensors) != MOE4_OK) return SYNTH_OTHER;
    const char *recorded = moe4_tensors_metadata(tensors, "moe4.synth");
    synth_state state = recorded && !strcmp(recorded, synth->parameters) ? SYNTH_SAME : SYNTH_OTHER;
    moe4_tensors_close(tensors);
    return state;
}

static json_t *synth_config_json(const struct synth *synth)
{
    json_t *config = json_pack("{s:[s], s:s}", "architectures", "GptOssForCausalLM", "model_type", "gpt_oss");
    json_put_integer(config, "hidden_size", synth->H);
    json_put_integer(config, "intermediate_size", synth->I);
    json_put_integer(config, "num_local_experts", synth->n_experts);
    json_put_integer(config, "num_experts_per_tok", synth->top_k);
    json_put_integer(config, "experts_per_token", synth->top_k);
    json_put_integer(config, "num_hidden_layers", synth->n_layers);
    json_put_real(config, "swiglu_limit", 7);
    json_put_text(config, "hidden_act", "silu");
    json_object_set_new(config, "quantization_config", json_pack("{s:s}", "quant_method", "mxfp4"));
    return config;
}

/* Writes config.json: beside its place first, then renamed over it. */
static int synth_write_config(const struct synth *synth)
{
    char *temporary = NULL;
    if (asprintf(&temporary, "%s.%ld.tmp", synth->config_file, (long)getpid()) < 0) return fail("out of memory");
    json_t *config = synth_config_json(synth);
    int failed = json_dump_file(config, temporary, JSON_INDENT(2)) || rename(temporary, synth->config_file);
    int code = failed ? fail("%s: %s", synth->config_file, strerror(errno)) : EXIT_OK;
    if (failed) unlink(temporary);
    json_decref(config);
    free(temporary);
    return code;
}

/* ---- Tensors ----------------------------------------------------------------------------------------------------- */

/* What a tensor of a layer is, in the released gpt-oss layout: gate and up rows interleaved. */
struct synth_tensor {
    char name[96];
    moe4_tensor description;
};

static void synth_describe(const struct synth *synth, int64_t layer, struct synth_tensor tensors[LAYER_TENSORS])
{
    int64_t E = synth->n_experts, H = synth->H, I = synth->I;
    const struct {
        const char *name, *dtype;
        int32_t rank;
        int64_t shape[4];
    } rows[LAYER_TENSORS] = {
        {"experts.gate_up_proj_blocks", "U8", 4, {E, 2 * I, H / 32, 16}},
        {"experts.gate_up_proj_scales", "U8", 3, {E, 2 * I, H / 32}},
        {"experts.gate_up_proj_bias", "BF16", 2, {E, 2 * I}},
        {"experts.down_proj_blocks", "U8", 4, {E, H, I / 32, 16}},
        {"experts.down_proj_scales", "U8", 3, {E, H, I / 32}},
        {"experts.down_proj_bias", "BF16", 2, {E, H}},
        {"router.weight", "BF16", 2, {E, H}},
        {"router.bias", "BF16", 1, {E}},
    };
    for (int i = 0; i < LAYER_TENSORS; ++i) {
        struct synth_tensor *tensor = &tensors[i];
        snprintf(tensor->name, sizeof tensor->name, "model.layers.%lld.mlp.%s", (long long)layer, rows[i].name);
        tensor->description = (moe4_tensor){.name = tensor->name, .dtype = rows[i].dtype, .rank = rows[i].rank};
        memcpy(tensor->description.shape, rows[i].shape, sizeof rows[i].shape);
    }
}

static int synth_write(struct synth *synth, int64_t index, int64_t first, int64_t n_bytes, const void *data)
{
    if (moe4_writer_write(synth->context, synth->writer, (int32_t)index, first, n_bytes, data) != MOE4_OK)
        return fail_library(synth->context);
    synth->bytes_done += n_bytes;
    return progress_update(&synth->bar, synth->bytes_done, synth->bytes_total);
}

/* Rows of one expert's matrix, made by several threads. */
struct matrix_task {
    uint64_t key;
    int64_t first_row, K;
    uint8_t *codes, *scales;
};

static void matrix_run(void *user, int64_t first, int64_t end)
{
    const struct matrix_task *task = user;
    generate_weights(task->key, task->first_row + first, task->first_row + end, task->K,
                     task->codes + first * (task->K / 2), task->scales + first * (task->K / 32));
}

/* Codes and scales of a stacked [E, rows, K] matrix, as tensors `index` and `index` + 1, one expert at a time. */
static int synth_matrix(struct synth *synth, int64_t index, uint64_t key, int64_t rows, int64_t K)
{
    struct matrix_task task = {.key = key, .K = K};
    int64_t codes_bytes = rows * (K / 2), scales_bytes = rows * (K / 32);
    int code = allocate(&task.codes, codes_bytes, 1, "an expert's codes");
    if (!code) code = allocate(&task.scales, scales_bytes, 1, "an expert's scales");
    for (int64_t e = 0; !code && e < synth->n_experts; ++e) {
        task.first_row = e * rows;
        parallel_for(synth->n_threads, rows, matrix_run, &task);
        code = synth_write(synth, index, e * codes_bytes, codes_bytes, task.codes);
        if (!code) code = synth_write(synth, index + 1, e * scales_bytes, scales_bytes, task.scales);
    }
    free(task.codes);
    free(task.scales);
    return code;
}

static int synth_bias(struct synth *synth, int64_t index, uint64_t key, int64_t count)
{
    uint16_t *bias;
    int code = allocate(&bias, count, sizeof *bias, "biases");
    if (code) return code;
    generate_biases(key, 0, count, bias);
    code = synth_write(synth, index, 0, count * 2, bias);
    free(bias);
    return code;
}

static int synth_router(struct synth *synth, int64_t index, int64_t layer)
{
    uint16_t *weight = NULL, *bias = NULL;
    int64_t E = synth->n_experts, H = synth->H;
    int code = allocate(&weight, E * H, sizeof *weight, "the router");
    if (!code) code = allocate(&bias, E, sizeof *bias, "the router's bias");
    if (!code &&
        !generate_router((uint64_t)synth->seed, layer, (int32_t)E, synth->top_k, H, synth->n_threads, weight, bias))
        code = fail("out of memory: calibrating the router of %lld experts", (long long)E);
    if (!code) code = synth_write(synth, index, 0, E * H * 2, weight);
    if (!code) code = synth_write(synth, index + 1, 0, E * 2, bias);
    free(weight);
    free(bias);
    return code;
}

static int synth_layer(struct synth *synth, int64_t layer)
{
    int64_t first = layer * LAYER_TENSORS, E = synth->n_experts, H = synth->H, I = synth->I;
    uint64_t seed = (uint64_t)synth->seed;
    int code = synth_matrix(synth, first, generate_key(seed, GENERATE_GATE_UP, layer), 2 * I, H);
    if (!code) code = synth_bias(synth, first + 2, generate_key(seed, GENERATE_GATE_UP_BIAS, layer), E * 2 * I);
    if (!code) code = synth_matrix(synth, first + 3, generate_key(seed, GENERATE_DOWN, layer), H, I);
    if (!code) code = synth_bias(synth, first + 5, generate_key(seed, GENERATE_DOWN_BIAS, layer), E * H);
    if (!code) code = synth_router(synth, first + 6, layer);
    return code;
}

static int synth_open_writer(struct synth *synth)
{
    int64_t n = synth->n_layers * LAYER_TENSORS;
    struct synth_tensor *tensors = NULL;
    moe4_tensor *descriptions = NULL;
    int code = allocate(&tensors, n, sizeof *tensors, "tensor names");
    if (!code) code = allocate(&descriptions, n, sizeof *descriptions, "tensor descriptions");
    if (!code) {
        for (int64_t layer = 0; layer < synth->n_layers; ++layer)
            synth_describe(synth, layer, tensors + layer * LAYER_TENSORS);
        for (int64_t i = 0; i < n; ++i) descriptions[i] = tensors[i].description;
        const char *const metadata[] = {"format",          "pt",   "moe4.synth", synth->parameters,
                                        "moe4.scale_rule", "even", NULL};
        if (moe4_writer_create(synth->context, synth->model_file, descriptions, (int32_t)n, metadata, &synth->writer) !=
            MOE4_OK)
            code = fail_library(synth->context);
    }
    free(descriptions);
    free(tensors);
    return code;
}

static int synth_write_model(struct synth *synth)
{
    if (mkdir(synth->path, 0777) && errno != EEXIST) return fail("%s: %s", synth->path, strerror(errno));
    int code = synth_open_writer(synth);
    if (code) return code;
    synth->bar = progress_begin("generating");
    for (int64_t layer = 0; !code && layer < synth->n_layers; ++layer) code = synth_layer(synth, layer);
    progress_end(&synth->bar);
    if (code) {
        moe4_writer_discard(synth->writer);
        return code;
    }
    return moe4_writer_commit(synth->context, synth->writer) == MOE4_OK ? EXIT_OK : fail_library(synth->context);
}

/* ---- Command ----------------------------------------------------------------------------------------------------- */

/* Fills in what follows from the options. */
static int synth_resolve(struct synth *synth)
{
    const struct layer_shape *shape = layer_shape_find(synth_shapes[synth->model]);
    synth->top_k = shape->top_k;
    if (!synth->n_experts) synth->n_experts = shape->n_experts;
    if (!synth->H) synth->H = shape->hidden_size;
    if (!synth->I) synth->I = shape->intermediate_size;
    if (synth->H % 32) return fail_usage("--hidden: %lld is not a multiple of 32", (long long)synth->H);
    if (synth->I % 32) return fail_usage("--intermediate: %lld is not a multiple of 32", (long long)synth->I);
    int64_t weights = 3 * synth->H * synth->I, biases = 2 * synth->I + 2 * synth->H + 1;
    synth->bytes_total = synth->n_layers * synth->n_experts * (weights / 32 * 17 + 2 * biases);
    snprintf(synth->parameters, sizeof synth->parameters,
             "generator %d, %s, layers %lld, experts %lld, hidden %lld, intermediate %lld, seed %lld", GENERATE_VERSION,
             synth_models[synth->model], (long long)synth->n_layers, (long long)synth->n_experts, (long long)synth->H,
             (long long)synth->I, (long long)synth->seed);
    synth->model_file = path_join(synth->path, "model.safetensors");
    synth->config_file = path_join(synth->path, "config.json");
    return synth->model_file && synth->config_file ? EXIT_OK : fail("out of memory");
}

static void synth_report(const struct synth *synth, synth_state state, double seconds)
{
    if (synth->json) {
        json_t *object = json_object();
        json_put_text(object, "path", synth->path);
        json_put_text(object, "like", synth_models[synth->model]);
        json_put_integer(object, "layers", synth->n_layers);
        json_put_integer(object, "n_experts", synth->n_experts);
        json_put_integer(object, "top_k", synth->top_k);
        json_put_integer(object, "hidden_size", synth->H);
        json_put_integer(object, "intermediate_size", synth->I);
        json_put_integer(object, "seed", synth->seed);
        json_put_integer(object, "bytes", synth->bytes_total);
        json_put_real(object, "seconds", seconds);
        json_put_truth(object, "reused", state == SYNTH_SAME);
        report_json(object);
        return;
    }
    report_title("%s", synth->path);
    report_field("contents", "%s like %s, %lld experts of %lld x %lld, %s", human_plural(synth->n_layers, "layer").text,
                 synth_models[synth->model], (long long)synth->n_experts, (long long)synth->H, (long long)synth->I,
                 human_bytes((double)synth->bytes_total).text);
    if (state == SYNTH_SAME)
        report_field("time", "none: it was there already");
    else
        report_field("time", "%s", human_milliseconds(1000 * seconds).text);
}

static int synth_run(struct synth *synth)
{
    double started = seconds_now();
    synth_state state = synth_look(synth);
    if (state == SYNTH_OTHER && !synth->force)
        return fail("%s: holds another checkpoint, or one of other parameters; --force replaces it", synth->path);
    int code = state == SYNTH_SAME ? EXIT_OK : synth_write_model(synth);
    if (!code && (state != SYNTH_SAME || access(synth->config_file, F_OK))) code = synth_write_config(synth);
    if (!code) synth_report(synth, state, seconds_now() - started);
    return code;
}

int cmd_synth(int argc, char **argv)
{
    struct synth synth = {.n_layers = 1};
    const struct option options[] = {
        option_operand("OUT", &synth.path, "folder to write config.json and model.safetensors into"),
        option_word("--like", synth_models, &synth.model, "the model whose layout and shapes it has (gpt-oss-20b)"),
        option_integer("--layers", "N", &synth.n_layers, 1, 1000, "number of layers (1)"),
        option_integer("--experts", "E", &synth.n_experts, 4, 32767, "experts a layer (the model's)"),
        option_integer("--hidden", "H", &synth.H, 32, 1 << 20, "hidden size, for small tests (the model's)"),
        option_integer("--intermediate", "I", &synth.I, 32, 1 << 20, "intermediate size (the model's)"),
        option_integer("--seed", "S", &synth.seed, 0, INT64_MAX, "seed of the generator (0)"),
        option_flag("--force", &synth.force, "replace what OUT holds, even if it is another checkpoint"),
        option_flag("--json", &synth.json, "report as one JSON object"),
    };
    const struct usage usage = {"synth", "Writes a synthetic checkpoint; one that is already there is kept.", options,
                                sizeof options / sizeof *options};
    int code;
    if (!options_parse(&usage, argc, argv, &code)) return code;
    moe4_context_info info = MOE4_CONTEXT_INFO_INIT;
    code = synth_resolve(&synth);
    if (!code) code = context_open(MOE4_ISA_AUTO, 0, NULL, &synth.context, &info);
    synth.n_threads = info.n_threads;
    if (!code) code = synth_run(&synth);
    moe4_context_destroy(synth.context);
    free(synth.model_file);
    free(synth.config_file);
    return code;
}
