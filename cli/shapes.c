#include "shapes.h"

#include <string.h>

/* name, E, A, H, I, order, activation, alpha, beta, limit, routing, n_group, topk_group, scale, biases */
static const struct layer_shape layer_shapes[] = {
    {"oss20b", 32, 4, 2880, 2880, MOE4_GATE_UP_INTERLEAVED, MOE4_ACTIVATION_SWIGLU_OAI, 1.702f, 1, 7,
     MOE4_ROUTING_RENORMALIZE, 0, 0, 0, 1},
    {"oss120b", 128, 4, 2880, 2880, MOE4_GATE_UP_INTERLEAVED, MOE4_ACTIVATION_SWIGLU_OAI, 1.702f, 1, 7,
     MOE4_ROUTING_RENORMALIZE, 0, 0, 0, 1},
    {"v4flash", 256, 6, 4096, 2048, MOE4_GATE_UP_GATE_FIRST, MOE4_ACTIVATION_SILU, 0, 0, 10, MOE4_ROUTING_SQRT_SOFTPLUS,
     0, 0, 1.5f, 0},
    {"dsv3", 256, 8, 7168, 2048, MOE4_GATE_UP_GATE_FIRST, MOE4_ACTIVATION_SILU, 0, 0, 0, MOE4_ROUTING_DEEPSEEK_V3, 8, 4,
     2.5f, 0},
    {"k3", 896, 16, 3584, 3072, MOE4_GATE_UP_GATE_FIRST, MOE4_ACTIVATION_SITU, 4, 25, 0, MOE4_ROUTING_MINIMAX2, 0, 0, 1,
     0},
};

const char *const layer_shape_names[] = {"oss20b", "oss120b", "v4flash", "dsv3", "k3", NULL};

const struct layer_shape *layer_shape_find(const char *name)
{
    for (size_t i = 0; i < sizeof layer_shapes / sizeof *layer_shapes; ++i)
        if (!strcmp(layer_shapes[i].name, name)) return &layer_shapes[i];
    return NULL;
}

static moe4_param param(float value)
{
    return (moe4_param){.presence = value != 0 ? MOE4_SAME : MOE4_ABSENT, .value = value};
}

moe4_layer_config layer_shape_config(const struct layer_shape *shape)
{
    moe4_layer_config config = MOE4_LAYER_CONFIG_INIT;
    config.hidden_size = shape->hidden_size;
    config.intermediate_size = shape->intermediate_size;
    config.n_experts = shape->n_experts;
    config.gate_up = shape->gate_up;
    config.activation = shape->activation;
    config.alpha = param(shape->alpha);
    config.beta = param(shape->beta);
    config.limit = param(shape->limit);
    config.routing.method = shape->routing;
    config.routing.top_k = shape->top_k;
    config.routing.n_group = shape->n_group;
    config.routing.topk_group = shape->topk_group;
    config.routing.scaling_factor = shape->scaling_factor;
    return config;
}
