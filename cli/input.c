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

int input_generate(const moe4_layer_config *config, int64_t n_tokens, int64_t seed, struct pass *pass)
{
    *pass = pass_begin(config, PASS_ROUTER, n_tokens, config->routing.top_k);
    if (!config->router.weight)
        return fail("the layer has no router of its own: --input must bring router_logits, or topk_ids and "
                    "topk_weights");
    int64_t H = config->hidden_size;
    int code = allocate(&pass->x, n_tokens * H, sizeof *pass->x, "inputs");
    if (!code) generate_inputs(generate_key((uint64_t)seed, GENERATE_INPUT, 0), 0, n_tokens, H, pass->x);
    return code;
}

/* Names the tensors of the file that the command has no use for. */
static void note_unknown(const moe4_tensors *tensors, const char *path)
{
    static const char *const known[] = {"hidden_states", "router_logits", "topk_ids", "topk_weights"};
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

static int read_tensors(moe4_context *context, const moe4_tensors *tensors, const moe4_layer_config *config,
                        input_routing routing, struct pass *pass)
{
    const struct tensor_want hidden = {
        "hidden_states", 2, {ANY_SIZE, config->hidden_size}, {MOE4_DTYPE_BF16, MOE4_DTYPE_F16, MOE4_DTYPE_F32}};
    int64_t shape[2];
    uint16_t *x;
    int code = tensor_load_bf16(context, tensors, &hidden, shape, &x);
    *pass = pass_begin(config, PASS_ROUTER, shape[0], config->routing.top_k);
    pass->x = x;
    if (code) return code;
    switch (routing_choose(tensors, config, routing)) {
    case INPUT_LOGITS: pass->routing = PASS_LOGITS; return read_logits(context, tensors, pass);
    case INPUT_IDS: pass->routing = PASS_IDS; return read_ids(context, tensors, pass);
    default: return config->router.weight ? EXIT_OK : fail("the layer has no router of its own");
    }
}

int input_read(moe4_context *context, const char *path, const moe4_layer_config *config, input_routing routing,
               struct pass *pass)
{
    moe4_tensors *tensors = NULL;
    *pass = pass_begin(config, PASS_ROUTER, 0, config->routing.top_k);
    if (moe4_tensors_open(context, path, &tensors) != MOE4_OK) return fail_library(context);
    int code = read_tensors(context, tensors, config, routing, pass);
    if (!code) note_unknown(tensors, path);
    moe4_tensors_close(tensors);
    return code;
}
