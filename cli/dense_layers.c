#include "dense_layers.h"

#include <stdlib.h>
#include <string.h>

#include "command.h"
#include "memory.h"
#include "message.h"
#include "tensor.h"

enum { GATE_UP, DOWN };

/* ---- Finding ----------------------------------------------------------------------------------------------------- */

int dense_layers_have(const moe4_tensor *tensor)
{
    return dense_parse(tensor->name).kind != DENSE_NONE;
}

/* The layer of a number; a new one after the last.  Tensors of a layer mostly come together. */
static struct dense_layer *layer_at(struct dense_layers *self, int32_t number)
{
    for (int32_t i = self->n_layers - 1; i >= 0; --i)
        if (self->layers[i].number == number) return &self->layers[i];
    struct dense_layer *grown = reallocarray(self->layers, (size_t)self->n_layers + 1, sizeof *grown);
    if (!grown) return NULL;
    self->layers = grown;
    grown[self->n_layers] = (struct dense_layer){.number = number};
    return &grown[self->n_layers++];
}

/* Room for one more expert's tensors, in every list. */
static int layer_grow(struct dense_layer *layer, int32_t n_experts)
{
    const moe4_tensor ***const lists[] = {layer->apart, layer->apart_bias};
    if (n_experts <= layer->n_experts) return EXIT_OK;
    for (int l = 0; l < 2; ++l)
        for (int role = 0; role < N_PROJECTIONS; ++role) {
            const moe4_tensor **grown = reallocarray(lists[l][role], (size_t)n_experts, sizeof *grown);
            if (!grown) return fail("out of memory: a list of %d experts", n_experts);
            memset(grown + layer->n_experts, 0, (size_t)(n_experts - layer->n_experts) * sizeof *grown);
            lists[l][role] = grown;
        }
    layer->n_experts = n_experts;
    return EXIT_OK;
}

/* Where the layer keeps such a tensor; NULL after a failure. */
static const moe4_tensor **place_of(struct dense_layer *layer, const moe4_tensor *tensor, const struct dense_name *name)
{
    enum { MOST_EXPERTS = 1 << 15 };
    switch (name->kind) {
    case DENSE_GATE_UP: return &layer->stacked[GATE_UP];
    case DENSE_DOWN: return &layer->stacked[DOWN];
    case DENSE_GATE_UP_BIAS: return &layer->stacked_bias[GATE_UP];
    case DENSE_DOWN_BIAS: return &layer->stacked_bias[DOWN];
    default: break;
    }
    if (name->expert < 0 || name->expert >= MOST_EXPERTS) {
        fail("%s: an expert's number, expected 0 to %d", tensor->name, MOST_EXPERTS - 1);
        return NULL;
    }
    if (layer_grow(layer, name->expert + 1)) return NULL;
    return &(name->kind == DENSE_EXPERT ? layer->apart : layer->apart_bias)[name->role][name->expert];
}

/* 0 where config.json does not say: extra layers then meet others. */
static int32_t count_layers(const json_t *config)
{
    enum { MOST_LAYERS = 100000 };
    json_int_t n = json_integer_value(config_member(config, "num_hidden_layers"));
    return n > 0 && n <= MOST_LAYERS ? (int32_t)n : 0;
}

static int add_tensor(struct dense_layers *self, const moe4_tensor *tensor, int32_t n_model_layers)
{
    struct dense_name name = dense_parse(tensor->name);
    if (name.kind == DENSE_NONE) return EXIT_OK;
    if (!tensor_is_float(tensor))
        return fail("%s: dtype %s, expected BF16, F16 or F32: it is quantised already", tensor->name, tensor->dtype);
    if (name.layer < 0) return fail("%s: of which layer its name does not say", tensor->name);
    struct dense_layer *layer = layer_at(self, name.layer + (name.is_extra ? n_model_layers : 0));
    if (!layer) return fail("out of memory: a list of layers");
    const moe4_tensor **place = place_of(layer, tensor, &name);
    if (!place) return EXIT_FAILED;
    if (*place)
        return fail("%s and %s: both the same weights of layer %d", (*place)->name, tensor->name, layer->number);
    *place = tensor;
    layer->base = tensor->name;
    layer->base_length = name.base_length;
    return EXIT_OK;
}

/* ---- Checking ---------------------------------------------------------------------------------------------------- */

static int check_shape(const moe4_tensor *tensor, int32_t rank, const int64_t *shape)
{
    if (tensor->rank == rank && !memcmp(tensor->shape, shape, (size_t)rank * sizeof *shape)) return EXIT_OK;
    return fail("%s: shape %s, expected %s", tensor->name, shape_show(tensor->rank, tensor->shape).text,
                shape_show(rank, shape).text);
}

static int check_stacked(const struct dense_layers *self, const struct dense_layer *layer)
{
    const struct dense_model *model = &self->model;
    int code = EXIT_OK;
    for (int m = GATE_UP; !code && m <= DOWN; ++m) {
        int64_t rows = m == GATE_UP ? 2 * model->I : model->H, K = m == GATE_UP ? model->H : model->I;
        int64_t shape[] = {model->E, model->is_transposed ? K : rows, model->is_transposed ? rows : K};
        if (!layer->stacked[m])
            return fail("layer %d: no tensor %.*s%s", layer->number, layer->base_length, layer->base,
                        m == GATE_UP ? "gate_up_proj" : "down_proj");
        code = check_shape(layer->stacked[m], 3, shape);
        shape[1] = rows;
        if (!code && layer->stacked_bias[m]) code = check_shape(layer->stacked_bias[m], 2, shape);
    }
    return code;
}

static int check_apart(const struct dense_layers *self, const struct dense_layer *layer)
{
    int code = EXIT_OK;
    for (int role = 0; role < N_PROJECTIONS; ++role)
        for (int32_t e = 0; !code && e < layer->n_experts; ++e) {
            const moe4_tensor *weight = layer->apart[role][e], *bias = layer->apart_bias[role][e];
            const int64_t I = self->model.I, H = self->model.H;
            const int64_t shape[] = {role == ROLE_DOWN ? H : I, role == ROLE_DOWN ? I : H};
            if (!weight)
                return fail("layer %d: no tensor %.*s%d.%s.weight, of %d experts", layer->number, layer->base_length,
                            layer->base, e, projection_word(layer->base, (enum projection_role)role), layer->n_experts);
            code = check_shape(weight, 2, shape);
            if (!code && bias) code = check_shape(bias, 1, shape);
            const moe4_tensor *first = layer->apart_bias[role == ROLE_UP ? ROLE_GATE : role][0];
            if (!code && (!bias != !first || (bias && strcmp(bias->dtype, first->dtype))))
                code = fail("layer %d: expert %d has another bias in %s than the others", layer->number, e,
                            projection_word(layer->base, (enum projection_role)role));
        }
    return code;
}

static int check_layer(const struct dense_layers *self, const struct dense_layer *layer)
{
    int is_stacked = layer->stacked[GATE_UP] || layer->stacked[DOWN];
    if (is_stacked && layer->n_experts)
        return fail("layer %d: experts both stacked and apart, as in %s", layer->number, layer->base);
    if (!is_stacked && !layer->n_experts) return fail("layer %d: biases of experts, but no weights", layer->number);
    int64_t n_experts = is_stacked ? self->model.E : layer->n_experts;
    if (self->model.n_experts && n_experts != self->model.n_experts)
        return fail("layer %d: %lld experts, but config.json says %lld", layer->number, (long long)n_experts,
                    (long long)self->model.n_experts);
    return is_stacked ? check_stacked(self, layer) : check_apart(self, layer);
}

static int by_number(const void *a, const void *b)
{
    const struct dense_layer *first = a, *second = b;
    return (first->number > second->number) - (first->number < second->number);
}

int dense_layers_find(moe4_context *context, const json_t *config, const moe4_tensors *tensors, struct encoder *encoder,
                      struct dense_layers *self)
{
    const moe4_tensor *gate_up = NULL;
    int code = EXIT_OK;
    const int32_t n_model_layers = count_layers(config);
    *self = (struct dense_layers){.context = context, .tensors = tensors, .encoder = encoder};
    for (int64_t i = 0; !code && i < moe4_tensors_count(tensors); ++i)
        code = add_tensor(self, moe4_tensors_get(tensors, i), n_model_layers);
    int32_t n_weighted = 0;
    for (int32_t i = 0; i < self->n_layers; ++i)
        n_weighted += self->layers[i].n_experts || self->layers[i].stacked[GATE_UP] || self->layers[i].stacked[DOWN];
    if (!code && !n_weighted)
        code = fail("no expert weights of bf16, f16 or f32 (...experts.N.gate_proj.weight, ...experts.gate_up_proj and "
                    "their like)");
    if (code) return code;
    qsort(self->layers, (size_t)self->n_layers, sizeof *self->layers, by_number);
    for (int32_t i = 0; !gate_up && i < self->n_layers; ++i) gate_up = self->layers[i].stacked[GATE_UP];
    code = dense_model_read(config, gate_up, &self->model);
    if (!code && (self->model.H < 1 || self->model.H % 32 || self->model.I < 1 || self->model.I % 32))
        code = fail("config.json: hidden size %lld and intermediate size %lld, expected multiples of 32",
                    (long long)self->model.H, (long long)self->model.I);
    for (int32_t i = 0; !code && i < self->n_layers; ++i) code = check_layer(self, &self->layers[i]);
    return code;
}

/* ---- Reading ----------------------------------------------------------------------------------------------------- */

static int layers_open(void *user, int32_t number, const moe4_layer_config **config)
{
    struct dense_layers *self = user;
    for (self->at = self->layers; self->at->number != number;) ++self->at;
    const struct dense_model *model = &self->model;
    self->config = (moe4_layer_config)MOE4_LAYER_CONFIG_INIT;
    self->config.hidden_size = model->H;
    self->config.intermediate_size = model->I;
    self->config.n_experts = self->at->n_experts ? self->at->n_experts : (int32_t)model->E;
    self->config.gate_up =
        !self->at->n_experts && model->is_interleaved ? MOE4_GATE_UP_INTERLEAVED : MOE4_GATE_UP_GATE_FIRST;
    *config = &self->config;
    return EXIT_OK;
}

/* Quantises a tensor's matrix [rows, K], or that of expert e, to row `first` of a matrix of the expert. */
static int quantise(struct dense_layers *self, const moe4_tensor *tensor, int32_t e, int m, int64_t first, int64_t rows)
{
    const int64_t K = m == GATE_UP ? self->model.H : self->model.I;
    const struct dense_matrix matrix = {self->tensors, tensor, e * rows * K,
                                        rows,          K,      tensor->rank == 3 && self->model.is_transposed};
    return encode_matrix(self->encoder, &matrix, self->codes[m] + first * (K / 2), self->scales[m] + first * (K / 32));
}

/* Bytes of biases, behind those that are there. */
static int read_bias(struct dense_layers *self, const moe4_tensor *tensor, int32_t e, int m, int64_t first,
                     int64_t rows)
{
    int64_t element = (int64_t)dtype_bytes(dtype_named(tensor->dtype));
    if (moe4_tensors_read(self->context, self->tensors, tensor, e * rows * element, rows * element,
                          self->bias[m] + first * element) != MOE4_OK)
        return fail_library(self->context);
    return EXIT_OK;
}

static int reserve(struct dense_layers *self, int m)
{
    int64_t rows = m == GATE_UP ? 2 * self->model.I : self->model.H, K = m == GATE_UP ? self->model.H : self->model.I;
    int code = buffer_reserve(&self->codes[m], &self->codes_room[m], rows * (K / 2), "an expert's codes");
    if (!code) code = buffer_reserve(&self->scales[m], &self->scales_room[m], rows * (K / 32), "an expert's scales");
    if (!code) code = buffer_reserve(&self->bias[m], &self->bias_room[m], 4 * rows, "an expert's biases");
    return code;
}

static int read_stacked(struct dense_layers *self, int32_t e, const moe4_tensor *biases[2])
{
    int code = EXIT_OK;
    for (int m = GATE_UP; !code && m <= DOWN; ++m) {
        int64_t rows = m == GATE_UP ? 2 * self->model.I : self->model.H;
        biases[m] = self->at->stacked_bias[m];
        code = quantise(self, self->at->stacked[m], e, m, 0, rows);
        if (!code && biases[m]) code = read_bias(self, biases[m], e, m, 0, rows);
    }
    return code;
}

static int read_apart(struct dense_layers *self, int32_t e, const moe4_tensor *biases[2])
{
    int64_t H = self->model.H, I = self->model.I;
    int code = EXIT_OK;
    for (int role = 0; !code && role < N_PROJECTIONS; ++role) {
        int m = role == ROLE_DOWN ? DOWN : GATE_UP;
        int64_t first = role == ROLE_UP ? I : 0, rows = role == ROLE_DOWN ? H : I;
        biases[m] = self->at->apart_bias[role][e];
        code = quantise(self, self->at->apart[role][e], 0, m, first, rows);
        if (!code && biases[m]) code = read_bias(self, biases[m], 0, m, first, rows);
    }
    return code;
}

static int layers_sample(void *user, moe4_expert *expert)
{
    static const char somewhere[1];
    const struct dense_layers *self = user;
    const struct dense_layer *at = self->at;
    const moe4_tensor *const biases[] = {at->n_experts ? at->apart_bias[ROLE_GATE][0] : at->stacked_bias[GATE_UP],
                                         at->n_experts ? at->apart_bias[ROLE_DOWN][0] : at->stacked_bias[DOWN]};
    moe4_matrix *const matrices[] = {&expert->gate_up, &expert->down};
    for (int m = GATE_UP; m <= DOWN; ++m) {
        *matrices[m] = (moe4_matrix){0};
        if (!biases[m]) continue;
        matrices[m]->bias = somewhere;
        matrices[m]->bias_dtype = dtype_named(biases[m]->dtype);
    }
    return EXIT_OK;
}

static int layers_read(void *user, int32_t e, moe4_expert *expert)
{
    struct dense_layers *self = user;
    const moe4_tensor *biases[2];
    int code = reserve(self, GATE_UP);
    if (!code) code = reserve(self, DOWN);
    if (!code) code = self->at->n_experts ? read_apart(self, e, biases) : read_stacked(self, e, biases);
    if (code) return code;
    moe4_matrix *const matrices[] = {&expert->gate_up, &expert->down};
    for (int m = GATE_UP; m <= DOWN; ++m) {
        *matrices[m] = (moe4_matrix){.codes = self->codes[m], .scales = self->scales[m]};
        if (!biases[m]) continue;
        matrices[m]->bias = self->bias[m];
        matrices[m]->bias_dtype = dtype_named(biases[m]->dtype);
    }
    return EXIT_OK;
}

struct feed dense_layers_feed(struct dense_layers *self)
{
    return (struct feed){self, layers_open, layers_sample, layers_read};
}

void dense_layers_release(struct dense_layers *self)
{
    for (int32_t i = 0; i < self->n_layers; ++i)
        for (int role = 0; role < N_PROJECTIONS; ++role) {
            free(self->layers[i].apart[role]);
            free(self->layers[i].apart_bias[role]);
        }
    free(self->layers);
    for (int m = GATE_UP; m <= DOWN; ++m) {
        free(self->codes[m]);
        free(self->scales[m]);
        free(self->bias[m]);
    }
}
