#include "input.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "command.h"
#include "generate.h"
#include "memory.h"
#include "message.h"
#include "tensor.h"

const char *const input_routing_words[] = {"auto", "logits", "ids", "router", NULL};

int input_generate(const moe4_layer_config *config, int64_t n_tokens, int64_t seed, moe4_compute compute,
                   struct pass *pass)
{
    *pass = pass_begin(config, PASS_ROUTER, n_tokens, config->routing.top_k);
    pass->compute = compute;
    if (!config->router.weight)
        return fail("the layer has no router of its own: --input must bring router_logits, or topk_ids and "
                    "topk_weights");
    int64_t H = config->hidden_size;
    int code = allocate(&pass->x, n_tokens * H, sizeof(uint16_t), "inputs");
    if (!code) generate_inputs(generate_key((uint64_t)seed, GENERATE_INPUT, 0), 0, n_tokens, H, pass->x);
    if (!code && pass->router_size != H) {
        code = allocate(&pass->router_x, n_tokens * pass->router_size, sizeof *pass->router_x, "the router's inputs");
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

/* Names the tensors of the file that the command has no use for. */
static void note_unknown(const moe4_tensors *tensors, const char *path)
{
    static const char *const known[] = {
        "hidden_states", "hidden_states_scale", "router_hidden_states", "router_logits", "topk_ids", "topk_weights",
        "token_ids"};
    enum { N_KNOWN = sizeof known / sizeof *known };
    char names[200] = "";
    size_t used = 0;
    for (int64_t i = 0; i < moe4_tensors_count(tensors); ++i) {
        const char *name = moe4_tensors_get(tensors, i)->name;
        int k = 0;
        while (k < N_KNOWN && strcmp(name, known[k])) ++k;
        if (k == N_KNOWN && used < sizeof names)
            used += (size_t)snprintf(names + used, sizeof names - used, "%s%s", used ? ", " : "", name);
    }
    if (used) note("%s: not used: %s%s", path, names, used < sizeof names ? "" : "...");
}

/* INPUT_ANY resolved to what the file and the layer have. */
static input_routing routing_choose(const moe4_tensors *tensors, const moe4_layer_config *config, input_routing routing)
{
    if (routing != INPUT_ANY) return routing;
    if (config->routing.method != MOE4_ROUTING_NONE && moe4_tensors_find(tensors, "router_logits")) return INPUT_LOGITS;
    return moe4_tensors_find(tensors, "topk_ids") ? INPUT_IDS : INPUT_ROUTER;
}

static int read_logits(moe4_context *context, const moe4_tensors *tensors, struct pass *pass)
{
    const struct tensor_want want = {
        "router_logits", 2, {pass->n_tokens, pass->n_experts}, {MOE4_DTYPE_F32, MOE4_DTYPE_BF16, MOE4_DTYPE_F16}};
    int64_t shape[2];
    return tensor_load_f32(context, tensors, &want, shape, &pass->given_logits);
}

static int read_ids(moe4_context *context, const moe4_tensors *tensors, struct pass *pass)
{
    const struct tensor_want ids = {"topk_ids", 2, {pass->n_tokens, ANY_SIZE}, {MOE4_DTYPE_I32}};
    struct tensor_data loaded;
    int code = tensor_load(context, tensors, &ids, &loaded);
    if (code) return code;
    pass->given_ids = loaded.data;
    if (loaded.shape[1] > INT32_MAX) return fail("topk_ids: %lld slots a token", (long long)loaded.shape[1]);
    pass->top_k = (int32_t)loaded.shape[1];
    const struct tensor_want weights = {
        "topk_weights", 2, {pass->n_tokens, pass->top_k}, {MOE4_DTYPE_F32, MOE4_DTYPE_BF16}};
    int64_t shape[2];
    return tensor_load_f32(context, tensors, &weights, shape, &pass->given_weights);
}

/* Scales of codes: a row of E8M0 a token in MXFP8 compute, one f32 in FP8 compute. */
static int read_scales(moe4_context *context, const moe4_tensors *tensors, struct pass *pass)
{
    static const char name[] = "hidden_states_scale";
    const struct tensor_want mxfp8 = {name, 2, {pass->n_tokens, pass->hidden_size / 32}, {MOE4_DTYPE_E8M0}};
    const struct tensor_want fp8 = {name, 1, {pass->n_tokens, 0}, {MOE4_DTYPE_F32}};
    struct tensor_data loaded;
    int code = tensor_load(context, tensors, pass->compute == MOE4_COMPUTE_FP8 ? &fp8 : &mxfp8, &loaded);
    pass->x_scale = loaded.data;
    return code;
}

/* hidden_states: numbers that become bf16, or e4m3 codes with their scales. */
static int read_hidden(moe4_context *context, const moe4_tensors *tensors, moe4_compute compute, struct pass *pass)
{
    static const char name[] = "hidden_states";
    const moe4_tensor *found = moe4_tensors_find(tensors, name);
    int is_quantised = found && dtype_find(found->dtype) == MOE4_DTYPE_F8_E4M3;
    if (is_quantised && compute == MOE4_COMPUTE_BF16)
        return fail("%s: tensor \"%s\" is F8_E4M3, which needs --activation-dtype mxfp8 or fp8", found->file, name);
    const struct tensor_want floats = {
        name, 2, {ANY_SIZE, pass->hidden_size}, {MOE4_DTYPE_BF16, MOE4_DTYPE_F16, MOE4_DTYPE_F32}};
    int64_t shape[2] = {0};
    if (!is_quantised) {
        uint16_t *x;
        int code = tensor_load_bf16(context, tensors, &floats, shape, &x);
        pass->x = x;
        pass->n_tokens = shape[0];
        return code;
    }
    const struct tensor_want codes = {name, 2, {ANY_SIZE, pass->hidden_size}, {MOE4_DTYPE_F8_E4M3}};
    struct tensor_data loaded;
    int code = tensor_load(context, tensors, &codes, &loaded);
    if (code) return code;
    pass->x = loaded.data;
    pass->x_dtype = MOE4_DTYPE_F8_E4M3;
    pass->n_tokens = loaded.shape[0];
    return read_scales(context, tensors, pass);
}

/* router_hidden_states, for a router that sees another width than the experts. */
static int read_router_hidden(moe4_context *context, const moe4_tensors *tensors, struct pass *pass)
{
    static const char name[] = "router_hidden_states";
    if (pass->router_size == pass->hidden_size && !moe4_tensors_find(tensors, name)) return EXIT_OK;
    const struct tensor_want want = {
        name, 2, {pass->n_tokens, pass->router_size}, {MOE4_DTYPE_BF16, MOE4_DTYPE_F16, MOE4_DTYPE_F32}};
    int64_t shape[2];
    return tensor_load_bf16(context, tensors, &want, shape, &pass->router_x);
}

/* token_ids, for hash routing. */
static int read_token_ids(moe4_context *context, const moe4_tensors *tensors, const moe4_layer_config *config,
                          struct pass *pass)
{
    if (config->routing.method != MOE4_ROUTING_HASH) return EXIT_OK;
    const struct tensor_want want = {"token_ids", 1, {pass->n_tokens, 0}, {MOE4_DTYPE_I32}};
    struct tensor_data loaded;
    int code = tensor_load(context, tensors, &want, &loaded);
    pass->token_ids = loaded.data;
    return code;
}

static int read_router(moe4_context *context, const moe4_tensors *tensors, const moe4_layer_config *config,
                       struct pass *pass)
{
    if (!config->router.weight) return fail("the layer has no router of its own");
    int code = read_router_hidden(context, tensors, pass);
    return code ? code : read_token_ids(context, tensors, config, pass);
}

static int read_tensors(moe4_context *context, const moe4_tensors *tensors, const moe4_layer_config *config,
                        input_routing routing, moe4_compute compute, struct pass *pass)
{
    int code = read_hidden(context, tensors, compute, pass);
    if (code) return code;
    switch (routing_choose(tensors, config, routing)) {
    case INPUT_LOGITS:
        pass->routing = PASS_LOGITS;
        code = read_logits(context, tensors, pass);
        return code ? code : read_token_ids(context, tensors, config, pass);
    case INPUT_IDS: pass->routing = PASS_IDS; return read_ids(context, tensors, pass);
    default: return read_router(context, tensors, config, pass);
    }
}

int input_read(moe4_context *context, const char *path, const moe4_layer_config *config, input_routing routing,
               moe4_compute compute, struct pass *pass)
{
    moe4_tensors *tensors = NULL;
    *pass = pass_begin(config, PASS_ROUTER, 0, config->routing.top_k);
    pass->compute = compute;
    if (moe4_tensors_open(context, path, &tensors) != MOE4_OK) return fail_library(context);
    int code = read_tensors(context, tensors, config, routing, compute, pass);
    if (!code) note_unknown(tensors, path);
    moe4_tensors_close(tensors);
    return code;
}
