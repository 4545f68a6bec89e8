#include "input.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "command.h"
#include "generate.h"
#include "memory.h"
#include "message.h"
#include "tensor.h"
#include "words.h"

const char *const input_routing_words[] = {"auto", "logits", "ids", "router", NULL};

int input_refuse(const struct input_choice *choice)
{
    if (choice->file) return EXIT_OK;
    if (choice->routing) return fail_usage("--routing chooses among the tensors of --input");
    if (choice->weight_use) return fail_usage("--weight-on is for ids and weights, which only --input brings");
    return EXIT_OK;
}

/* ---- Generated --------------------------------------------------------------------------------------------------- */

static int input_generate(const moe4_layer_config *config, const struct input_choice *choice, struct pass *pass)
{
    const int64_t n_tokens = choice->n_tokens, seed = choice->seed, H = config->hidden_size;
    if (!config->router.weight)
        return fail("the layer has no router of its own: --input must bring router_logits, or topk_ids and "
                    "topk_weights");
    pass->n_tokens = n_tokens;
    int code = allocate(&pass->x, n_tokens * H, sizeof(uint16_t), "inputs");
    if (!code) generate_inputs(generate_key((uint64_t)seed, GENERATE_INPUT, 0), 0, n_tokens, H, pass->x);
    if (!code && pass->router_size != H) {
        code = allocate(&pass->router_x, n_tokens * pass->router_size, sizeof(uint16_t), "the router's inputs");
        if (!code)
            generate_inputs(generate_key((uint64_t)seed, GENERATE_INPUT, 1), 0, n_tokens, pass->router_size,
                            pass->router_x);
    }
    if (!code && config->routing.method == MOE4_ROUTING_HASH) {
        code = allocate(&pass->token_ids, n_tokens, sizeof *pass->token_ids, "token ids");
        for (int64_t t = 0; !code && t < n_tokens; ++t)
            pass->token_ids[t] = (int32_t)((seed % 1000 + t * 7919) % config->routing.vocab_size);
    }
    return code;
}

/* ---- From a file ------------------------------------------------------------------------------------------------- */

struct reading {
    moe4_context *context;
    const moe4_tensors *tensors;
    const struct input_choice *choice;
    const moe4_layer_config *config;
    struct pass *pass;
};

/* Names the tensors of the file that this pass has no use for. */
static void note_unused(const struct reading *reading, const char *path)
{
    enum { LOGITS = 1 << PASS_LOGITS, IDS = 1 << PASS_IDS, ROUTER = 1 << PASS_ROUTER, ANY = LOGITS | IDS | ROUTER };
    static const struct {
        const char *name;
        int routings; /* that use it */
    } known[] = {{"hidden_states", ANY},
                 {"hidden_states_scale", ANY},
                 {"router_hidden_states", ROUTER},
                 {"router_logits", LOGITS},
                 {"topk_ids", IDS},
                 {"topk_weights", IDS},
                 {"topk_packed", IDS},
                 {"token_ids", LOGITS | ROUTER},
                 {"addend", ANY},
                 {"expert_map", ANY}};
    enum { N_KNOWN = sizeof known / sizeof *known };
    char names[200] = "";
    size_t used = 0;
    for (int64_t i = 0; i < moe4_tensors_count(reading->tensors); ++i) {
        const char *name = moe4_tensors_get(reading->tensors, i)->name;
        int k = 0;
        while (k < N_KNOWN && strcmp(name, known[k].name)) ++k;
        if (k < N_KNOWN && known[k].routings >> reading->pass->routing & 1) continue;
        if (used < sizeof names)
            used += (size_t)snprintf(names + used, sizeof names - used, "%s%s", used ? ", " : "", name);
    }
    if (used) note("%s: not used: %s%s", path, names, used < sizeof names ? "" : "...");
}

static int has(const struct reading *reading, const char *name)
{
    return moe4_tensors_find(reading->tensors, name) != NULL;
}

/* INPUT_ANY resolved to what the file and the layer have. */
static pass_routing routing_choose(const struct reading *reading)
{
    static const pass_routing chosen[] = {
        [INPUT_LOGITS] = PASS_LOGITS, [INPUT_IDS] = PASS_IDS, [INPUT_ROUTER] = PASS_ROUTER};
    if (reading->choice->routing != INPUT_ANY) return chosen[reading->choice->routing];
    if (reading->config->routing.method != MOE4_ROUTING_NONE && has(reading, "router_logits")) return PASS_LOGITS;
    return has(reading, "topk_ids") || has(reading, "topk_packed") ? PASS_IDS : PASS_ROUTER;
}

static int load(const struct reading *reading, const struct tensor_want *want, struct tensor_data *loaded)
{
    return tensor_load(reading->context, reading->tensors, want, loaded);
}

/* Scales of codes: a row of E8M0 a token in MXFP8 compute, one f32 in FP8 compute. */
static int read_scales(const struct reading *reading)
{
    static const char name[] = "hidden_states_scale";
    struct pass *pass = reading->pass;
    const struct tensor_want mxfp8 = {name, 2, {pass->n_tokens, pass->hidden_size / 32}, {MOE4_DTYPE_E8M0}};
    const struct tensor_want fp8 = {name, 1, {pass->n_tokens, 0}, {MOE4_DTYPE_F32}};
    struct tensor_data loaded;
    int code = load(reading, pass->compute == MOE4_COMPUTE_FP8 ? &fp8 : &mxfp8, &loaded);
    pass->x_scale = loaded.data;
    return code;
}

/* hidden_states: numbers, or e4m3 codes with their scales. */
static int read_hidden(const struct reading *reading)
{
    static const char name[] = "hidden_states", scale_name[] = "hidden_states_scale";
    struct pass *pass = reading->pass;
    const moe4_tensor *found = moe4_tensors_find(reading->tensors, name);
    const struct tensor_want floats = {
        name, 2, {ANY_SIZE, pass->hidden_size}, {MOE4_DTYPE_BF16, MOE4_DTYPE_F16, MOE4_DTYPE_F32}};
    const struct tensor_want codes = {name, 2, {ANY_SIZE, pass->hidden_size}, {MOE4_DTYPE_F8_E4M3}};
    int is_quantised = found && dtype_named(found->dtype) == MOE4_DTYPE_F8_E4M3;
    struct tensor_data loaded;
    const int takes_codes = pass->compute == MOE4_COMPUTE_MXFP8 || pass->compute == MOE4_COMPUTE_FP8;
    if (is_quantised && !takes_codes)
        return fail("%s: tensor \"%s\" is F8_E4M3, which needs --activation-dtype mxfp8 or fp8", found->file, name);
    if (!is_quantised && has(reading, scale_name))
        return fail("tensor \"%s\" is there, but \"%s\" is %s, expected F8_E4M3", scale_name, name,
                    found ? found->dtype : "missing");
    int code = load(reading, is_quantised ? &codes : &floats, &loaded);
    if (code) return code;
    pass->x = loaded.data;
    pass->x_dtype = loaded.dtype;
    pass->n_tokens = loaded.shape[0];
    return is_quantised ? read_scales(reading) : EXIT_OK;
}

/* token_ids, for hash routing. */
static int read_token_ids(const struct reading *reading)
{
    if (reading->config->routing.method != MOE4_ROUTING_HASH) return EXIT_OK;
    const struct tensor_want want = {"token_ids", 1, {reading->pass->n_tokens, 0}, {MOE4_DTYPE_I32}};
    struct tensor_data loaded;
    int code = load(reading, &want, &loaded);
    reading->pass->token_ids = loaded.data;
    return code;
}

static int read_logits(const struct reading *reading)
{
    struct pass *pass = reading->pass;
    const struct tensor_want want = {
        "router_logits", 2, {pass->n_tokens, pass->n_experts}, {MOE4_DTYPE_F32, MOE4_DTYPE_BF16, MOE4_DTYPE_F16}};
    struct tensor_data loaded;
    int code = load(reading, &want, &loaded);
    pass->given_logits = loaded.data;
    pass->logits_dtype = loaded.dtype;
    return code ? code : read_token_ids(reading);
}

/* Ids that name no expert at all are no mistake, but worth a word. */
static void note_foreign(const struct pass *pass)
{
    int64_t n = 0;
    for (int64_t p = 0; p < pass->n_tokens * pass->top_k; ++p) {
        int32_t id = pass_given(pass, p).id;
        n += id < -1 || id >= pass->n_experts;
    }
    if (n) note("%lld ids are none of 0..%d and not -1: they add nothing", (long long)n, pass->n_experts - 1);
}

static int read_ids(const struct reading *reading)
{
    struct pass *pass = reading->pass;
    int is_packed = has(reading, "topk_packed");
    const char *apart = has(reading, "topk_ids") ? "topk_ids" : "topk_weights";
    if (is_packed && has(reading, apart))
        return fail("both \"topk_packed\" and \"%s\" are there, expected one of them", apart);
    const struct tensor_want ids = {
        is_packed ? "topk_packed" : "topk_ids", 2, {pass->n_tokens, ANY_SIZE}, {MOE4_DTYPE_I32}};
    struct tensor_data loaded;
    int code = load(reading, &ids, &loaded);
    if (code) return code;
    pass->given_ids = loaded.data;
    if (loaded.shape[1] > INT32_MAX) return fail("%s: %lld slots a token", ids.name, (long long)loaded.shape[1]);
    pass->top_k = (int32_t)loaded.shape[1];
    if (is_packed) {
        pass->topk_format = MOE4_TOPK_PACKED;
        pass->weights_dtype = MOE4_DTYPE_BF16;
    } else {
        const struct tensor_want weights = {
            "topk_weights", 2, {pass->n_tokens, pass->top_k}, {MOE4_DTYPE_F32, MOE4_DTYPE_BF16}};
        code = load(reading, &weights, &loaded);
        pass->given_weights = loaded.data;
        pass->weights_dtype = loaded.dtype;
    }
    if (!code) note_foreign(pass);
    return code;
}

/* The layer's own router, and router_hidden_states where it sees another width than the experts. */
static int read_router(const struct reading *reading)
{
    static const char name[] = "router_hidden_states";
    struct pass *pass = reading->pass;
    if (!reading->config->router.weight) return fail("the layer has no router of its own");
    if (pass->router_size != pass->hidden_size || has(reading, name)) {
        const struct tensor_want want = {
            name, 2, {pass->n_tokens, pass->router_size}, {MOE4_DTYPE_BF16, MOE4_DTYPE_F16, MOE4_DTYPE_F32}};
        struct tensor_data loaded;
        int code = load(reading, &want, &loaded);
        if (code) return code;
        pass->router_x = loaded.data;
        pass->router_x_dtype = loaded.dtype;
    }
    return read_token_ids(reading);
}

static int read_addend(const struct reading *reading)
{
    struct pass *pass = reading->pass;
    const struct tensor_want want = {"addend", 2, {pass->n_tokens, pass->output_size}, {pass->y_dtype}};
    struct tensor_data loaded = {0};
    int code = has(reading, want.name) ? load(reading, &want, &loaded) : EXIT_OK;
    pass->addend = loaded.data;
    return code;
}

static int read_map(const struct reading *reading, struct model *model)
{
    const struct tensor_want want = {"expert_map", 1, {reading->config->n_experts, 0}, {MOE4_DTYPE_I32}};
    struct tensor_data loaded;
    if (!has(reading, want.name)) return EXIT_OK;
    int code = load(reading, &want, &loaded);
    return code ? code : model_map(model, loaded.data);
}

static int read_tensors(const struct reading *reading)
{
    static int (*const readers[])(const struct reading *) = {
        [PASS_LOGITS] = read_logits, [PASS_IDS] = read_ids, [PASS_ROUTER] = read_router};
    struct pass *pass = reading->pass;
    int code = read_hidden(reading);
    if (code) return code;
    pass->routing = routing_choose(reading);
    if (reading->choice->weight_use && pass->routing != PASS_IDS)
        return fail_usage("--weight-on %s is for ids and weights, but the tokens are routed by %s",
                          weight_words[reading->choice->weight_use],
                          pass->routing == PASS_LOGITS ? "router_logits" : "the layer's own router");
    code = readers[pass->routing](reading);
    return code ? code : read_addend(reading);
}

/* ---- Either ------------------------------------------------------------------------------------------------------ */

int input_open(moe4_context *context, const struct input_choice *choice, struct model *model, struct pass *pass)
{
    moe4_tensors *tensors = NULL;
    *pass = pass_begin(model->config, PASS_ROUTER, 0, model->config->routing.top_k);
    pass->compute = (moe4_compute)choice->compute;
    pass->weight_use = (moe4_weight_use)choice->weight_use;
    pass->y_dtype = output_dtype(choice->output);
    if (!choice->file) return input_generate(model->config, choice, pass);
    if (moe4_tensors_open(context, choice->file, &tensors) != MOE4_OK) return fail_library(context);
    const struct reading reading = {context, tensors, choice, model->config, pass};
    int code = read_map(&reading, model);
    if (!code) code = read_tensors(&reading);
    if (!code) note_unused(&reading, choice->file);
    moe4_tensors_close(tensors);
    return code;
}
