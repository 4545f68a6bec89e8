/* moe4 synth: a checkpoint of true shape and layout, filled by the generator. */
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <jansson.h>

#include "command.h"
#include "expert_output.h"
#include "gguf_output.h"
#include "known_model.h"
#include "memory.h"
#include "message.h"
#include "options.h"
#include "output.h"
#include "report.h"
#include "shapes.h"
#include "storage.h"
#include "synth_layers.h"

enum { UNIT_ROUTER };

/* What the models look like beside the shape of their layers. */
static const struct likeness {
    const char *word, *shape, *family;
    storage_kind layout; /* as released, or as quantised by others */
    int32_t n_shared_experts;
    int32_t width;      /* of the model, in hidden sizes of its experts */
    int64_t vocab_size; /* 0 = no layer chooses by token id */
} likenesses[] = {
    {"gpt-oss-20b", "oss20b", "gpt-oss", STORAGE_GPT_OSS, 0, 1, 0},
    {"gpt-oss-120b", "oss120b", "gpt-oss", STORAGE_GPT_OSS, 0, 1, 0},
    {"deepseek-v3", "dsv3", "DeepSeek-V3", STORAGE_COMPRESSED_TENSORS, 1, 1, 0},
    {"deepseek-v4-flash", "v4flash", "DeepSeek-V4", STORAGE_DEEPSEEK_V4, 1, 1, 129280},
    {"kimi-k3", "k3", "Kimi-K3", STORAGE_COMPRESSED_TENSORS, 2, 2, 0},
};
static const char *const synth_models[] = {"gpt-oss-20b",       "gpt-oss-120b", "deepseek-v3",
                                           "deepseek-v4-flash", "kimi-k3",      NULL};

struct synth {
    const char *path;
    int model, layout; /* index of likenesses; storage_kind, -1 = the model's own */
    int64_t n_layers, n_experts, n_hash_layers, seed, H, I;
    int force, json;

    const struct likeness *like;
    const struct known_model *names;
    struct synth_layers layers;
    char parameters[224]; /* what the files' metadata records */

    moe4_context *context;
    struct output output;
    struct expert_output experts;
    json_t *config;
};

/* ---- What is there ----------------------------------------------------------------------------------------------- */

typedef enum synth_state { SYNTH_ABSENT, SYNTH_SAME, SYNTH_OTHER } synth_state;

/* Where the files of a checkpoint would be: a folder, a GGUF file, or the first of several. */
static synth_state synth_look(const struct synth *synth)
{
    char config[PATH_MAX];
    moe4_tensors *tensors = NULL;
    int is_file = synth->layout >= STORAGE_GGUF;
    snprintf(config, sizeof config, "%s/config.json", synth->path);
    if (access(is_file ? synth->path : config, F_OK)) return SYNTH_ABSENT; /* or unfinished */
    if (moe4_tensors_open(synth->context, synth->path, &tensors) != MOE4_OK) return SYNTH_OTHER;
    const char *recorded = moe4_tensors_metadata(tensors, "moe4.synth");
    synth_state state = recorded && !strcmp(recorded, synth->parameters) ? SYNTH_SAME : SYNTH_OTHER;
    moe4_tensors_close(tensors);
    return state;
}

/* ---- A folder ---------------------------------------------------------------------------------------------------- */

/* The tensors of a layer's router: by whom they are used, what they hold. */
struct router_tensor {
    enum router_part part;
    const void *data;
    const char *dtype;
    int32_t rank;
    int64_t shape[2];
};

static int32_t router_tensors(const struct synth *synth, const moe4_layer_config *config, struct router_tensor *list)
{
    const moe4_routing *routing = &config->routing;
    int64_t E = config->n_experts;
    const struct router_tensor all[] = {
        {ROUTER_WEIGHT, config->router.weight, "BF16", 2, {E, synth->layers.router_size}},
        {ROUTER_BIAS, config->router.bias, "BF16", 1, {E}},
        {ROUTER_SELECTION_BIAS, routing->correction_bias, "F32", 1, {E}},
        {ROUTER_HASH_TABLE, routing->hash_table, "I64", 2, {routing->vocab_size, routing->top_k}},
    };
    int32_t n = 0;
    for (size_t i = 0; i < sizeof all / sizeof *all; ++i)
        if (all[i].data) list[n++] = all[i];
    return n;
}

static int plan_router(struct synth *synth, int32_t layer)
{
    struct router_tensor list[4];
    int32_t n = router_tensors(synth, &synth->layers.at, list);
    struct output_unit *unit = output_add_unit(&synth->output, UNIT_ROUTER);
    int code = unit ? EXIT_OK : EXIT_FAILED;
    if (unit) unit->layer = layer;
    for (int32_t i = 0; !code && i < n; ++i) {
        struct block_name name = known_model_router(synth->names, layer, (int32_t)synth->n_layers, list[i].part);
        if (synth->layout == STORAGE_ORIGINAL)
            snprintf(name.text, sizeof name.text, "block.%d.mlp.gate.%s", layer,
                     list[i].part == ROUTER_WEIGHT ? "weight" : "bias");
        code = output_add(&synth->output, name.text, list[i].dtype, list[i].rank, list[i].shape);
    }
    return code;
}

static int plan(struct synth *synth, const json_t *model)
{
    int code = EXIT_OK;
    for (int32_t layer = 0; !code && layer < synth->n_layers; ++layer) {
        char base[256];
        snprintf(base, sizeof base, "%sexperts.",
                 known_model_block(synth->names, layer, (int32_t)synth->n_layers).text);
        code = expert_output_plan(&synth->experts, layer,
                                  storage_base((storage_kind)synth->layout, model, layer, base, sizeof base));
        if (!code) code = plan_router(synth, layer);
    }
    return code;
}

static int produce(void *user, struct output *output, const struct output_unit *unit)
{
    struct synth *synth = user;
    struct router_tensor list[4];
    const moe4_layer_config *config;
    if (unit->kind == UNIT_EXPERTS) return expert_output_produce(&synth->experts, unit);
    struct feed feed = synth_layers_feed(&synth->layers);
    int code = feed.open(feed.user, unit->layer, &config);
    int32_t n = code ? 0 : router_tensors(synth, config, list);
    for (int32_t i = 0; !code && i < n; ++i)
        code = output_put(output, unit, i, 0, output->tensors[unit->first + i].n_bytes, list[i].data);
    return code;
}

static int write_folder(struct synth *synth)
{
    struct model_facts facts = {.model = synth->names,
                                .config = &synth->layers.config,
                                .model_hidden_size = synth->layers.router_size,
                                .n_layers = (int32_t)synth->n_layers,
                                .n_shared_experts = synth->like->n_shared_experts,
                                .n_hash_layers = (int32_t)synth->n_hash_layers,
                                .has_selection_bias = synth->layers.has_selection_bias,
                                .vocab_size = synth->n_hash_layers ? synth->layers.vocab_size : 0};
    json_t *model = known_model_config(&facts);
    if (model) synth->config = storage_config((storage_kind)synth->layout, model);
    int code = synth->config ? EXIT_OK : EXIT_FAILED;
    output_note(&synth->output, "moe4.job", synth->output.job);
    output_note(&synth->output, "moe4.synth", synth->parameters);
    output_note(&synth->output, "moe4.scale_rule", "even");
    output_note(&synth->output, "format", "pt");
    if (!code) {
        synth->experts = expert_output_begin(&synth->output, storage_find((storage_kind)synth->layout, model),
                                             synth_layers_feed(&synth->layers));
        code = plan(synth, model);
    }
    if (!code) code = output_write(&synth->output, synth->config, produce, synth);
    json_decref(model);
    return code;
}

/* ---- GGUF -------------------------------------------------------------------------------------------------------- */

static int write_gguf(struct synth *synth)
{
    moe4_checkpoint_info info = MOE4_CHECKPOINT_INFO_INIT;
    const char *const notes[] = {"moe4.synth", synth->parameters, "moe4.scale_rule", "even", NULL};
    struct gguf_output output = {.context = synth->context,
                                 .info = &info,
                                 .feed = synth_layers_feed(&synth->layers),
                                 .n_layers = (int32_t)synth->n_layers,
                                 .gate_up = synth->layout == STORAGE_GGUF ? GGUF_SPLIT : GGUF_FUSED,
                                 .path = synth->path,
                                 .force = synth->force,
                                 .job = synth->output.job,
                                 .file_bytes = synth->output.shard_bytes,
                                 .notes = notes};
    int32_t *layers;
    info.family = synth->like->family;
    info.n_model_layers = (int32_t)synth->n_layers;
    info.n_shared_experts = synth->like->n_shared_experts;
    info.model_hidden_size = synth->layers.router_size;
    int code = allocate(&layers, synth->n_layers, sizeof *layers, "layers");
    for (int32_t i = 0; !code && i < synth->n_layers; ++i) layers[i] = i;
    output.layers = layers;
    if (!code) code = gguf_output_write(&output);
    synth->output.bytes_total = output.bytes_total;
    free(layers);
    return code;
}

/* ---- Command ----------------------------------------------------------------------------------------------------- */

/* What does not fit the model. */
static int synth_check(const struct synth *synth, const struct layer_shape *shape)
{
    int64_t E = synth->n_experts;
    if (synth->H % 32) return fail_usage("--hidden: %lld is not a multiple of 32", (long long)synth->H);
    if (synth->I % 32) return fail_usage("--intermediate: %lld is not a multiple of 32", (long long)synth->I);
    if (E < shape->top_k)
        return fail_usage("--experts: %lld, but a token takes %d of them", (long long)E, shape->top_k);
    if (shape->n_group && (E % shape->n_group || E < 2 * shape->n_group))
        return fail_usage("--experts: %lld, expected a multiple of %d groups, each of two or more", (long long)E,
                          shape->n_group);
    if (synth->n_hash_layers > (synth->like->vocab_size ? synth->n_layers : 0))
        return fail_usage("--hash-layers: %lld, but of the %lld layers of %s at most %lld can",
                          (long long)synth->n_hash_layers, (long long)synth->n_layers, synth->like->word,
                          (long long)(synth->like->vocab_size ? synth->n_layers : 0));
    return EXIT_OK;
}

/* Fills in what follows from the options. */
static int synth_resolve(struct synth *synth)
{
    synth->like = &likenesses[synth->model];
    synth->names = known_model_find(synth->like->family);
    const struct layer_shape *shape = layer_shape_find(synth->like->shape);
    struct synth_layers *layers = &synth->layers;
    if (synth->layout < 0) synth->layout = (int)synth->like->layout;
    if (!synth->n_experts) synth->n_experts = shape->n_experts;
    if (!synth->H) synth->H = shape->hidden_size;
    if (!synth->I) synth->I = shape->intermediate_size;
    int code = synth_check(synth, shape);
    if (code) return code;
    *layers = (struct synth_layers){.config = layer_shape_config(shape),
                                    .router_size = synth->H * synth->like->width,
                                    .seed = (uint64_t)synth->seed,
                                    .n_hash_layers = (int32_t)synth->n_hash_layers,
                                    .vocab_size = synth->like->vocab_size,
                                    .has_biases = shape->has_biases,
                                    .has_selection_bias = !shape->has_biases};
    layers->config.hidden_size = synth->H;
    layers->config.intermediate_size = synth->I;
    layers->config.n_experts = (int32_t)synth->n_experts;
    int used = snprintf(synth->parameters, sizeof synth->parameters,
                        "generator %d, %s, layers %lld, experts %lld, hidden %lld, intermediate %lld, seed %lld",
                        GENERATE_VERSION, synth->like->word, (long long)synth->n_layers, (long long)synth->n_experts,
                        (long long)synth->H, (long long)synth->I, (long long)synth->seed);
    char *end = synth->parameters + used, *limit = synth->parameters + sizeof synth->parameters;
    if (synth->n_hash_layers)
        end += snprintf(end, (size_t)(limit - end), ", hash layers %lld", (long long)synth->n_hash_layers);
    if (synth->layout != (int)synth->like->layout)
        snprintf(end, (size_t)(limit - end), ", layout %s", storage_words[synth->layout]);
    snprintf(synth->output.job, sizeof synth->output.job, "synth %s, shards of %lld bytes", synth->parameters,
             (long long)synth->output.shard_bytes);
    return EXIT_OK;
}

static void synth_report(const struct synth *synth, int is_reused, double seconds)
{
    if (synth->json) {
        json_t *object = json_object();
        json_put_text(object, "path", synth->path);
        json_put_text(object, "like", synth->like->word);
        json_put_text(object, "layout", storage_words[synth->layout]);
        json_put_integer(object, "layers", synth->n_layers);
        json_put_integer(object, "n_experts", synth->n_experts);
        json_put_integer(object, "top_k", synth->layers.config.routing.top_k);
        json_put_integer(object, "hidden_size", synth->H);
        json_put_integer(object, "intermediate_size", synth->I);
        json_put_integer(object, "seed", synth->seed);
        json_put_integer(object, "bytes", synth->output.bytes_total);
        json_put_real(object, "seconds", seconds);
        json_put_truth(object, "reused", is_reused);
        report_json(object);
        return;
    }
    report_title("%s", synth->path);
    report_field("contents", "%s like %s in layout %s, %lld experts of %lld x %lld",
                 human_plural(synth->n_layers, "layer").text, synth->like->word, storage_words[synth->layout],
                 (long long)synth->n_experts, (long long)synth->H, (long long)synth->I);
    if (is_reused) {
        report_field("time", "none: it was there already");
        return;
    }
    report_field("size", "%s", human_bytes((double)synth->output.bytes_total).text);
    report_field("time", "%s", human_milliseconds(1000 * seconds).text);
}

static int synth_run(struct synth *synth)
{
    double started = seconds_now();
    synth_state state = synth_look(synth);
    if (state == SYNTH_OTHER && !synth->force)
        return fail("%s: holds another checkpoint, or one of other parameters; --force replaces it", synth->path);
    int code = state == SYNTH_SAME ? EXIT_OK : synth_layers_begin(&synth->layers);
    if (!code && state != SYNTH_SAME) code = synth->layout >= STORAGE_GGUF ? write_gguf(synth) : write_folder(synth);
    int was_there = synth->output.n_shards && synth->output.n_kept == synth->output.n_shards; /* but for config.json */
    if (!code) synth_report(synth, state == SYNTH_SAME || was_there, seconds_now() - started);
    return code;
}

int cmd_synth(int argc, char **argv)
{
    struct synth synth = {.n_layers = 1, .layout = -1};
    const struct option options[] = {
        option_operand("OUT", &synth.path, "folder to write config.json and *.safetensors into; for gguf a file"),
        option_word("--like", synth_models, &synth.model, "the model whose layout and shapes it has (gpt-oss-20b)"),
        option_word("--layout", storage_words, &synth.layout, "how it is stored (the model's own)"),
        option_integer("--layers", "N", &synth.n_layers, 1, 1000, "number of layers (1)"),
        option_integer("--experts", "E", &synth.n_experts, 4, 32767, "experts a layer (the model's)"),
        option_integer("--hidden", "H", &synth.H, 32, 1 << 20, "hidden size, for small tests (the model's)"),
        option_integer("--intermediate", "I", &synth.I, 32, 1 << 20, "intermediate size (the model's)"),
        option_integer("--hash-layers", "N", &synth.n_hash_layers, 0, 1000,
                       "layers that choose experts by token id: the first N, of deepseek-v4-flash (0)"),
        option_integer("--seed", "S", &synth.seed, 0, INT64_MAX, "seed of the generator (0)"),
        option_integer("--shard-bytes", "N", &synth.output.shard_bytes, 1, INT64_MAX, "bytes a file, about (no limit)"),
        option_flag("--force", &synth.force, "replace what OUT holds, even if it is another checkpoint"),
        option_flag("--json", &synth.json, "report as one JSON object"),
    };
    const struct usage usage = {"synth", "Writes a synthetic checkpoint; one that is already there is kept.", options,
                                sizeof options / sizeof *options};
    int code;
    synth.output.shard_bytes = INT64_MAX;
    if (!options_parse(&usage, argc, argv, &code)) return code;
    moe4_context_info info = MOE4_CONTEXT_INFO_INIT;
    code = synth_resolve(&synth);
    if (!code) code = context_open_simple(0, &synth.context, &info);
    synth.layers.n_threads = info.n_threads;
    synth.output.context = synth.context;
    synth.output.folder = synth.path;
    synth.output.force = synth.force;
    if (!code) code = synth_run(&synth);
    output_release(&synth.output);
    expert_output_release(&synth.experts);
    synth_layers_release(&synth.layers);
    json_decref(synth.config);
    moe4_context_destroy(synth.context);
    return code;
}
