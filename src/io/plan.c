/* Where the bytes of one layer lie: every name is made from the family's tables, every tensor found and checked. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/dims.h"
#include "io/family.h"
#include "io/show.h"
#include "io/tensors.h"

/* PREFIX STEM layer-number BLOCK, then `rest`. */
static struct tensor_name block_tensor(const struct plan *plan, const char *rest)
{
    struct tensor_name name;
    const struct spelling *spelling = plan->spelling;
    int32_t number = plan->layer_number, n_layers = plan->model->n_layers;
    const char *stem = plan->family->words->stem;
    if (spelling->extra_stem && number >= n_layers) {
        stem = spelling->extra_stem;
        number -= n_layers;
    }
    snprintf(name.text, sizeof name.text, "%s%s%" PRId32 "%s%s", spelling->prefix, stem, number, spelling->block, rest);
    return name;
}

static struct tensor_name expert_tensor(const struct plan *plan, int32_t expert, const struct projection *projection,
                                        const struct suffix *suffix)
{
    char rest[96];
    if (plan->family->storage == STORED_APART)
        snprintf(rest, sizeof rest, "%s%" PRId32 ".%s%s", plan->spelling->experts, expert, projection->name,
                 suffix->name);
    else
        snprintf(rest, sizeof rest, "%s%s%s", plan->spelling->experts, projection->name, suffix->name);
    return block_tensor(plan, rest);
}

/* ---- Experts ----------------------------------------------------------------------------------------------------- */

/* Rows of a projection and their length. */
struct extent {
    int64_t rows, K;
};

static struct extent projection_extent(const struct plan *plan, const struct projection *projection)
{
    int64_t H = plan->config.hidden_size, I = plan->config.intermediate_size;
    if (projection->matrix == MATRIX_DOWN) return (struct extent){H, I};
    return (struct extent){projection->half == HALF_BOTH ? 2 * I : I, H};
}

/* Finds one tensor of a projection: of one expert, or with n_experts as its first dimension of all. */
static moe4_status find_piece(moe4_context *context, struct plan *plan, const char *name,
                              const struct projection *projection, enum piece piece, const moe4_tensor **tensor)
{
    struct extent extent = projection_extent(plan, projection);
    int32_t stacked = plan->family->storage == STORED_STACKED;
    int64_t shape[] = {plan->config.n_experts, extent.rows, extent.K};
    const int64_t *leading = stacked ? shape : shape + 1;
    moe4_dtype dtype = MOE4_DTYPE_NONE, *known = &plan->bias_dtypes[projection->matrix];
    moe4_status status;
    switch (piece) {
    case PIECE_CODES:
        return find_packed(context, plan->tensors, name, PART_CODES, stacked + 1, leading, extent.K, tensor);
    case PIECE_SCALES:
        return find_packed(context, plan->tensors, name, PART_SCALES, stacked + 1, leading, extent.K, tensor);
    case PIECE_BLOCKS: return find_exact(context, plan->tensors, name, "MXFP4", stacked + 2, leading, tensor);
    default: break;
    }
    status = find_float(context, plan->tensors, name, stacked + 1, leading, tensor, &dtype);
    if (status != MOE4_OK) return status;
    if (*known && *known != dtype)
        return context_fail(context, MOE4_EUNSUPPORTED,
                            "%s: tensor \"%s\" is %s, but other biases of this matrix are of another type",
                            show_file((*tensor)->file).text, show_name(name).text, (*tensor)->dtype);
    *known = dtype;
    return MOE4_OK;
}

/* The same slice of every expert, behind what other projections have put into the part. */
static moe4_status plan_piece(moe4_context *context, struct plan *plan, const struct projection *projection,
                              const struct suffix *suffix)
{
    static const int32_t parts[] = {[PIECE_CODES] = PART_CODES,
                                    [PIECE_SCALES] = PART_SCALES,
                                    [PIECE_BIAS] = PART_BIAS,
                                    [PIECE_BLOCKS] = PART_CODES};
    int32_t matrix = projection->matrix, part = parts[suffix->piece], index = plan->n_slices++;
    int stacked = plan->family->storage == STORED_STACKED;
    int64_t part_at = plan->part_bytes[matrix][part], n_bytes = 0;
    const moe4_tensor *tensor = NULL;
    for (int32_t l = 0; l < plan->n_local; l++) {
        int32_t expert = plan->first_expert + l;
        if (!l || !stacked) {
            struct tensor_name name = expert_tensor(plan, expert, projection, suffix);
            moe4_status status = find_piece(context, plan, name.text, projection, suffix->piece, &tensor);
            if (status != MOE4_OK) return status;
            n_bytes = stacked ? tensor->n_bytes / plan->config.n_experts : tensor->n_bytes;
        }
        plan->slices[(int64_t)l * MAX_SLICES + index] = (struct slice){
            .tensor = tensor,
            .first = stacked ? expert * n_bytes : 0,
            .n_bytes = n_bytes,
            .part_at = part_at,
            .matrix = matrix,
            .part = part,
            .form = suffix->piece == PIECE_BLOCKS ? SLICE_GGUF_BLOCKS : SLICE_PLAIN,
        };
    }
    if (suffix->piece != PIECE_BLOCKS) {
        plan->part_bytes[matrix][part] += n_bytes;
        return MOE4_OK;
    }
    int64_t n_blocks = n_bytes / (BLOCK_BYTES + 1);
    plan->part_bytes[matrix][PART_CODES] += n_blocks * BLOCK_BYTES;
    plan->part_bytes[matrix][PART_SCALES] += n_blocks;
    return MOE4_OK;
}

/* Whether the experts of this checkpoint have a bias in a matrix: if one half of one expert does, all must. */
static int matrix_has_bias(const struct plan *plan, int32_t matrix, const struct suffix *suffix)
{
    if (plan->model->expert_bias != NEED_OPTIONAL) return plan->model->expert_bias == NEED_REQUIRED;
    for (int32_t p = 0; p < plan->spelling->projections->count; p++) {
        const struct projection *projection = &plan->spelling->projections->items[p];
        if (projection->matrix == matrix &&
            moe4_tensors_find(plan->tensors, expert_tensor(plan, plan->first_expert, projection, suffix).text))
            return 1;
    }
    return 0;
}

static moe4_status plan_experts(moe4_context *context, struct plan *plan)
{
    const struct family *family = plan->family;
    moe4_status status = MOE4_OK;
    for (int32_t p = 0; p < plan->spelling->projections->count; p++) {
        const struct projection *projection = &plan->spelling->projections->items[p];
        for (int32_t s = 0; s < family->n_suffixes && status == MOE4_OK; s++) {
            const struct suffix *suffix = &family->suffixes[s];
            if (suffix->piece > PIECE_BLOCKS) continue;
            if (suffix->piece == PIECE_BIAS && !matrix_has_bias(plan, projection->matrix, suffix)) continue;
            status = plan_piece(context, plan, projection, suffix);
        }
    }
    return status;
}

/* ---- Router ------------------------------------------------------------------------------------------------------ */

/* The first of some names that is there; if none is, the first of them. */
static struct tensor_name any_of(const struct plan *plan, const char *const *names)
{
    for (int i = 0; i < MAX_SYNONYMS && names[i]; i++) {
        struct tensor_name name = block_tensor(plan, names[i]);
        if (moe4_tensors_find(plan->tensors, name.text)) return name;
    }
    return block_tensor(plan, names[0]);
}

static moe4_status plan_vector(moe4_context *context, struct plan *plan, int source, enum need need,
                               const char *const *names)
{
    const int64_t shape[] = {plan->config.n_experts};
    if (!names[0]) return MOE4_OK;
    struct tensor_name name = any_of(plan, names);
    const moe4_tensor *found = moe4_tensors_find(plan->tensors, name.text);
    if (need != NEED_REQUIRED && !found) return MOE4_OK;
    if (need == NEED_NONE)
        return context_fail(context, MOE4_EFORMAT, "%s: tensor \"%s\" is there, but by the config this router has none",
                            show_file(found->file).text, show_name(name.text).text);
    return find_float(context, plan->tensors, name.text, 1, shape, &plan->sources[source],
                      &plan->source_dtypes[source]);
}

/* "gate.bias" of a model whose routers have none: nobody says which of the two biases it is. */
static moe4_status refuse_unknown_bias(moe4_context *context, const struct plan *plan)
{
    const struct router_names *names = plan->model->router;
    if (names->bias || (names->selection_bias[0] && strcmp(names->selection_bias[0], "gate.bias") == 0)) return MOE4_OK;
    const moe4_tensor *tensor = moe4_tensors_find(plan->tensors, block_tensor(plan, "gate.bias").text);
    if (!tensor) return MOE4_OK;
    return context_fail(context, MOE4_EUNSUPPORTED,
                        "%s: tensor \"%s\": whether this is a bias of logits or of the selection is not known for %s",
                        show_file(tensor->file).text, show_name(tensor->name).text, plan->model->name);
}

static moe4_status plan_hash(moe4_context *context, struct plan *plan)
{
    moe4_routing *routing = &plan->config.routing;
    struct tensor_name name = any_of(plan, plan->model->router->hash_table);
    const moe4_tensor *found = moe4_tensors_find(plan->tensors, name.text);
    int64_t rows = plan->model->vocab_size ? plan->model->vocab_size : found && found->rank == 2 ? found->shape[0] : 1;
    const int64_t shape[] = {rows, routing->top_k};
    const char *dtype = found && strcmp(found->dtype, "I32") == 0 ? "I32" : "I64";
    moe4_status status =
        find_exact(context, plan->tensors, name.text, dtype, 2, shape, &plan->sources[SOURCE_HASH_TABLE]);
    plan->source_dtypes[SOURCE_HASH_TABLE] = *(dtype + 1) == '3' ? MOE4_DTYPE_I32 : MOE4_DTYPE_I64;
    routing->method = MOE4_ROUTING_HASH;
    routing->vocab_size = rows;
    return status;
}

/* A table in a layer that the config does not count among the hash layers: one of the two is wrong. */
static moe4_status refuse_hash(moe4_context *context, const struct plan *plan)
{
    const char *const *names = plan->model->router->hash_table;
    const moe4_tensor *tensor = names[0] ? moe4_tensors_find(plan->tensors, any_of(plan, names).text) : NULL;
    if (!tensor) return MOE4_OK;
    return context_fail(
        context, MOE4_EFORMAT,
        "%s: tensor \"%s\" is there, but the config has %" PRId32 " hash layers, of which %" PRId32 " is none",
        show_file(tensor->file).text, show_name(tensor->name).text, plan->model->n_hash_layers, plan->layer_number);
}

static moe4_status plan_router(moe4_context *context, struct plan *plan)
{
    const struct model *model = plan->model;
    const struct router_names *names = model->router;
    const char *const bias[] = {names->bias, NULL};
    const int64_t shape[] = {plan->config.n_experts, model->router_size};
    struct tensor_name weight = block_tensor(plan, names->weight);
    int hashed = plan->layer_number < model->n_hash_layers;
    moe4_status status = find_float(context, plan->tensors, weight.text, 2, shape, &plan->sources[SOURCE_ROUTER_WEIGHT],
                                    &plan->source_dtypes[SOURCE_ROUTER_WEIGHT]);
    if (status == MOE4_OK) status = plan_vector(context, plan, SOURCE_ROUTER_BIAS, model->router_bias, bias);
    if (status == MOE4_OK) status = refuse_unknown_bias(context, plan);
    if (status != MOE4_OK) return status;
    if (hashed) return plan_hash(context, plan);
    status = refuse_hash(context, plan);
    if (status != MOE4_OK) return status;
    return plan_vector(context, plan, SOURCE_SELECTION_BIAS, model->selection_bias, names->selection_bias);
}

/* A sigmoid router without bias and factor has a method of its own. */
static void settle_method(struct plan *plan)
{
    moe4_routing *routing = &plan->config.routing;
    if (routing->method == MOE4_ROUTING_MINIMAX2 && !plan->sources[SOURCE_SELECTION_BIAS] &&
        (routing->scaling_factor == 0.0f || routing->scaling_factor == 1.0f)) {
        routing->method = MOE4_ROUTING_SIGMOID_RENORM;
        routing->scaling_factor = 0.0f;
    }
}

size_t plan_slices_bytes(const struct plan *plan)
{
    return (size_t)plan->n_local * MAX_SLICES * sizeof *plan->slices;
}

/* Only once the router's weight has shown that the file, too, is one of so many experts. */
static moe4_status allocate_slices(moe4_context *context, struct plan *plan)
{
    plan->slices = memory_allocate_zeroed(&context->allocator, plan_slices_bytes(plan));
    return plan->slices ? MOE4_OK : context_fail_memory(context, "a layer's plan", plan_slices_bytes(plan));
}

moe4_status plan_fill(moe4_context *context, struct plan *plan)
{
    const struct model *model = plan->model;
    plan->config = model->layer;
    plan->config.gate_up = plan->spelling->projections->order;
    if (model->limits) {
        float limit = model->limits[plan->layer_number];
        plan->config.limit = (moe4_param){limit > 0.0f ? MOE4_SAME : MOE4_ABSENT, limit, NULL};
    }
    moe4_status status = plan_router(context, plan);
    if (status == MOE4_OK && plan->experts == MOE4_EXPERTS_READ) {
        status = allocate_slices(context, plan);
        if (status == MOE4_OK) status = plan_experts(context, plan);
    }
    settle_method(plan);
    return status;
}
