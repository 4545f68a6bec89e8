#include "synth_layers.h"

#include <stdlib.h>
#include <string.h>

#include "command.h"
#include "memory.h"
#include "message.h"

enum { GATE_UP, DOWN };

static int64_t rows_of(const struct synth_layers *self, int m)
{
    return m == GATE_UP ? 2 * self->config.intermediate_size : self->config.hidden_size;
}

static int64_t K_of(const struct synth_layers *self, int m)
{
    return m == GATE_UP ? self->config.hidden_size : self->config.intermediate_size;
}

int synth_layers_begin(struct synth_layers *self)
{
    int64_t E = self->config.n_experts, top_k = self->config.routing.top_k;
    int code = EXIT_OK;
    self->layer = -1;
    for (int m = GATE_UP; !code && m <= DOWN; ++m) {
        int64_t rows = rows_of(self, m), K = K_of(self, m);
        code = allocate(&self->codes[m], rows * (K / 2), 1, "an expert's codes");
        if (!code) code = allocate(&self->scales[m], rows * (K / 32), 1, "an expert's scales");
        if (!code) code = allocate(&self->bias[m], rows, sizeof *self->bias[m], "an expert's biases");
    }
    if (!code) code = allocate(&self->router_weight, E * self->router_size, sizeof *self->router_weight, "the router");
    if (!code) code = allocate(&self->router_bias, E, sizeof *self->router_bias, "the router's bias");
    if (!code) code = allocate(&self->selection_bias, E, sizeof *self->selection_bias, "the router's bias");
    if (!code && self->n_hash_layers)
        code = allocate(&self->hash_table, self->vocab_size * top_k, sizeof *self->hash_table, "a hash table");
    return code;
}

/* ---- Routers ----------------------------------------------------------------------------------------------------- */

static enum generate_score score_of(moe4_routing_method method)
{
    switch (method) {
    case MOE4_ROUTING_SQRT_SOFTPLUS: return GENERATE_SCORE_SQRT_SOFTPLUS;
    case MOE4_ROUTING_DEEPSEEK_V3:
    case MOE4_ROUTING_MINIMAX2: return GENERATE_SCORE_SIGMOID;
    default: return GENERATE_SCORE_LOGIT;
    }
}

/* top_k different experts for every token. */
static void make_hash_table(struct synth_layers *self, int32_t layer)
{
    int32_t top_k = self->config.routing.top_k, E = self->config.n_experts;
    uint64_t key = generate_key(self->seed, GENERATE_HASH_TABLE, layer);
    for (int64_t token = 0; token < self->vocab_size; ++token) {
        int64_t *row = self->hash_table + token * top_k;
        for (int32_t a = 0; a < top_k; ++a) {
            row[a] = (int64_t)(generate_bits(key, (uint64_t)(token * top_k + a)) % (uint64_t)E);
            for (int32_t b = 0; b < a; ++b)
                if (row[a] == row[b]) {
                    row[a] = (row[a] + 1) % E;
                    b = -1; /* compare with all of them again */
                }
        }
    }
}

static int make_router(struct synth_layers *self, int32_t layer)
{
    const moe4_layer_config *config = &self->config;
    if (!generate_router(self->seed, layer, config->n_experts, config->routing.top_k, self->router_size,
                         score_of(config->routing.method), self->n_threads, self->router_weight, self->router_bias))
        return fail("out of memory: calibrating the router of %d experts", config->n_experts);
    for (int32_t e = 0; e < config->n_experts; ++e) {
        uint32_t bits = (uint32_t)self->router_bias[e] << 16;
        memcpy(&self->selection_bias[e], &bits, sizeof bits);
    }
    if (layer < self->n_hash_layers) make_hash_table(self, layer);
    return EXIT_OK;
}

static int layers_open(void *user, int32_t layer, const moe4_layer_config **config)
{
    struct synth_layers *self = user;
    *config = &self->at;
    if (self->layer == layer) return EXIT_OK;
    self->layer = layer;
    self->at = self->config;
    moe4_router *router = &self->at.router;
    moe4_routing *routing = &self->at.routing;
    router->weight = self->router_weight;
    router->weight_dtype = MOE4_DTYPE_BF16;
    router->hidden_size = self->router_size == self->config.hidden_size ? 0 : self->router_size;
    if (layer < self->n_hash_layers) {
        routing->method = MOE4_ROUTING_HASH;
        routing->hash_table = self->hash_table;
        routing->hash_table_dtype = MOE4_DTYPE_I64;
        routing->vocab_size = self->vocab_size;
    } else if (self->has_selection_bias) {
        routing->correction_bias = self->selection_bias;
        routing->correction_bias_dtype = MOE4_DTYPE_F32;
    } else {
        router->bias = self->router_bias;
        router->bias_dtype = MOE4_DTYPE_BF16;
    }
    return make_router(self, layer);
}

/* ---- Experts ----------------------------------------------------------------------------------------------------- */

static void describe_biases(const struct synth_layers *self, moe4_expert *expert)
{
    moe4_matrix *const matrices[] = {&expert->gate_up, &expert->down};
    for (int m = GATE_UP; m <= DOWN; ++m) {
        *matrices[m] = (moe4_matrix){.codes = self->codes[m], .scales = self->scales[m]};
        if (!self->has_biases) continue;
        matrices[m]->bias = self->bias[m];
        matrices[m]->bias_dtype = MOE4_DTYPE_BF16;
    }
}

static int layers_sample(void *user, moe4_expert *expert)
{
    describe_biases(user, expert);
    return EXIT_OK;
}

static int layers_read(void *user, int32_t e, moe4_expert *expert)
{
    static const generate_tensor tensors[2][2] = {{GENERATE_GATE_UP, GENERATE_GATE_UP_BIAS},
                                                  {GENERATE_DOWN, GENERATE_DOWN_BIAS}};
    struct synth_layers *self = user;
    for (int m = GATE_UP; m <= DOWN; ++m) {
        int64_t rows = rows_of(self, m);
        generate_matrix(generate_weights, self->n_threads, generate_key(self->seed, tensors[m][0], self->layer),
                        e * rows, rows, K_of(self, m), self->codes[m], self->scales[m]);
        if (self->has_biases)
            generate_biases(generate_key(self->seed, tensors[m][1], self->layer), e * rows, rows, self->bias[m]);
    }
    describe_biases(self, expert);
    return EXIT_OK;
}

struct feed synth_layers_feed(struct synth_layers *self)
{
    return (struct feed){self, layers_open, layers_sample, layers_read};
}

void synth_layers_release(struct synth_layers *self)
{
    for (int m = GATE_UP; m <= DOWN; ++m) {
        free(self->codes[m]);
        free(self->scales[m]);
        free(self->bias[m]);
    }
    free(self->router_weight);
    free(self->router_bias);
    free(self->selection_bias);
    free(self->hash_table);
}
