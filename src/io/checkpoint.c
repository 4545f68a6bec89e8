#include "io/checkpoint.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "io/check.h"
#include "io/gguf.h"
#include "io/show.h"
#include "io/tensors.h"
#include "supports.h"

/* ---- Opening ----------------------------------------------------------------------------------------------------- */

static moe4_status read_model(const struct config *config, moe4_checkpoint *checkpoint)
{
    moe4_status status = family_find(config, &checkpoint->family);
    if (status == MOE4_OK) status = checkpoint->family->read_config(config, &checkpoint->model);
    if (status == MOE4_OK) checkpoint->n_all = checkpoint->model.n_layers + checkpoint->model.n_extra_layers;
    return status;
}

/* config.json first: what it refuses needs no tensor looked at. */
static moe4_status open_folder(moe4_context *context, moe4_checkpoint *checkpoint, const char *folder)
{
    static const char config_name[] = "/config.json";
    struct config config;
    size_t folder_bytes = strlen(folder), bytes = folder_bytes + sizeof config_name;
    char *path = memory_allocate(&checkpoint->allocator, bytes);
    if (!path) return context_fail_memory(context, "a path", bytes);
    memcpy(path, folder, folder_bytes);
    memcpy(path + folder_bytes, config_name, sizeof config_name);
    moe4_status status = config_open(context, path, &config);
    if (status == MOE4_OK) {
        status = read_model(&config, checkpoint);
        config_close(&config);
    }
    memory_release(&checkpoint->allocator, path, bytes);
    return status == MOE4_OK ? moe4_tensors_open(context, folder, &checkpoint->tensors) : status;
}

/* A GGUF file is its own config. */
static moe4_status open_gguf(moe4_context *context, moe4_checkpoint *checkpoint, const char *path)
{
    struct config config;
    moe4_status status = moe4_tensors_open(context, path, &checkpoint->tensors);
    if (status == MOE4_OK) status = gguf_config(context, checkpoint->tensors, &config);
    if (status != MOE4_OK) return status;
    status = read_model(&config, checkpoint);
    config_close(&config);
    return status;
}

/* ---- Which layers are here --------------------------------------------------------------------------------------- */

enum { LAYER_SEEN = 1, LAYER_MXFP4 = 2, LAYER_OTHER = 4 };

/* The spelling of the first tensor that is an expert's by any.  Gate and up tell more than down does: spellings may
 * share the name of the latter. */
static int find_spelling(moe4_checkpoint *checkpoint)
{
    checkpoint->spelling = spelling_first(checkpoint->family);
    for (int32_t matrix = 0; matrix < N_MATRICES; matrix++)
        for (int64_t i = 0; i < moe4_tensors_count(checkpoint->tensors); i++) {
            const moe4_tensor *tensor = moe4_tensors_get(checkpoint->tensors, i);
            if (spelling_find(checkpoint->family, tensor->name, matrix, &checkpoint->spelling)) return 1;
        }
    return 0;
}

/* Extra layers have a stem of their own only where a tensor's name has it; else they are numbered on. */
static void settle_extra_stem(moe4_checkpoint *checkpoint)
{
    struct spelling *spelling = &checkpoint->spelling;
    size_t prefix_bytes = strlen(spelling->prefix),
           stem_bytes = spelling->extra_stem ? strlen(spelling->extra_stem) : 0;
    for (int64_t i = 0; stem_bytes && i < moe4_tensors_count(checkpoint->tensors); i++) {
        const char *name = moe4_tensors_get(checkpoint->tensors, i)->name;
        if (strncmp(name, spelling->prefix, prefix_bytes) == 0 &&
            strncmp(name + prefix_bytes, spelling->extra_stem, stem_bytes) == 0)
            return;
    }
    spelling->extra_stem = NULL;
}

/* The family and spelling of the tensors; where none is an expert's, the first there is. */
static void settle_spelling(moe4_checkpoint *checkpoint)
{
    const struct family *first = checkpoint->family;
    for (; checkpoint->family; checkpoint->family = checkpoint->family->or_else)
        if (find_spelling(checkpoint)) return;
    checkpoint->family = first;
    checkpoint->spelling = spelling_first(first);
}

/* The names that stacked, dequantised gpt-oss weights have. */
static int is_dequantised(const struct family *family, const char *name)
{
    static const char *const ends[] = {"gate_up_proj", "down_proj"};
    size_t length = strlen(name);
    for (size_t i = 0; i < sizeof ends / sizeof *ends && family->storage == STORED_STACKED; i++) {
        size_t end = strlen(ends[i]);
        if (length > end && name[length - end - 1] == '.' && strcmp(name + length - end, ends[i]) == 0) return 1;
    }
    return 0;
}

static moe4_status refuse_tensor(moe4_context *context, const struct family *family, const moe4_tensor *tensor,
                                 const struct suffix *suffix)
{
    int dequantised = !suffix && is_dequantised(family, tensor->name);
    const char *reason = suffix        ? "not supported beside MXFP4 codes and scales,"
                         : dequantised ? "dequantised weights,"
                                       : "unknown expert tensor,";
    return context_fail(context, suffix || dequantised ? MOE4_EUNSUPPORTED : MOE4_EFORMAT,
                        "%s: tensor \"%s\": %s %s, expected only codes, scales and biases of MXFP4 experts",
                        show_file(tensor->file).text, show_name(tensor->name).text, reason,
                        show_type(tensor->dtype, tensor->rank, tensor->shape).text);
}

/* A config that speaks of no quantisation, beside a tensor that only makes sense with one. */
static moe4_status refuse_silence(moe4_context *context, const moe4_tensor *tensor)
{
    return context_fail(context, MOE4_EUNSUPPORTED,
                        "%s: tensor \"%s\" is %s, but in config.json quantization_config.quant_method is missing",
                        show_file(tensor->file).text, show_name(tensor->name).text,
                        show_type(tensor->dtype, tensor->rank, tensor->shape).text);
}

static int is_float_dtype(const char *dtype)
{
    return strcmp(dtype, "BF16") == 0 || strcmp(dtype, "F16") == 0 || strcmp(dtype, "F32") == 0;
}

/* What an expert tensor says of its layer. */
static int32_t layer_mark(const moe4_tensor *tensor, enum piece piece)
{
    switch (piece) {
    case PIECE_CODES: return is_code_dtype(tensor->dtype) ? LAYER_MXFP4 : LAYER_OTHER;
    case PIECE_BLOCKS: return strcmp(tensor->dtype, "MXFP4") == 0 ? LAYER_MXFP4 : LAYER_OTHER;
    case PIECE_UNQUANTISED:
    case PIECE_DENSE: return LAYER_OTHER;
    default: return LAYER_SEEN;
    }
}

/* An MXFP4 tensor of a module that the config excludes from quantisation: one of the two is wrong. */
static moe4_status check_excluded(moe4_context *context, const struct model *model, const moe4_tensor *tensor,
                                  const struct suffix *suffix)
{
    size_t module_bytes = strlen(tensor->name) - strlen(suffix->name) - 1; /* without ".weight" */
    const char *pattern = excluded_find(&model->excluded, tensor->name, module_bytes);
    if (!pattern) return MOE4_OK;
    char module[256];
    snprintf(module, sizeof module, "%.*s", (int)module_bytes, tensor->name);
    return context_fail(context, MOE4_EFORMAT,
                        "%s: tensor \"%s\" is %s, but config.json excludes \"%s\" from quantisation",
                        show_file(tensor->file).text, show_name(tensor->name).text,
                        show_type(tensor->dtype, tensor->rank, tensor->shape).text,
                        show_name(pattern == tensor->name ? module : pattern).text);
}

/* Marks the layer that a tensor is an expert tensor of. */
static moe4_status mark_layer(moe4_context *context, moe4_checkpoint *checkpoint, const moe4_tensor *tensor)
{
    struct place place;
    const char *config_name = checkpoint->family == &family_gguf ? "its metadata" : "config.json";
    int32_t E = checkpoint->model.layer.n_experts;
    if (!spelling_parse(checkpoint->family, &checkpoint->spelling, checkpoint->model.n_layers, tensor->name, &place))
        return MOE4_OK;
    if (family_is_dense(checkpoint->family) &&
        (!place.suffix || (place.suffix->piece == PIECE_DENSE && !is_float_dtype(tensor->dtype))))
        return refuse_silence(context, tensor);
    if (!place.suffix || place.suffix->piece == PIECE_REFUSED)
        return refuse_tensor(context, checkpoint->family, tensor, place.suffix);
    if (place.layer_number >= checkpoint->n_all)
        return context_fail(
            context, MOE4_EFORMAT, "%s: tensor \"%s\" is of layer %" PRId32 ", but config.json has %" PRId32 " layers",
            show_file(tensor->file).text, show_name(tensor->name).text, place.layer_number, checkpoint->n_all);
    if (place.expert >= E)
        return context_fail(context, MOE4_EFORMAT,
                            "%s: tensor \"%s\" is of expert %" PRId32 ", but %s has %" PRId32 " experts",
                            show_file(tensor->file).text, show_name(tensor->name).text, place.expert, config_name, E);
    int32_t mark = layer_mark(tensor, place.suffix->piece);
    checkpoint->layers[place.layer_number] |= mark;
    return mark == LAYER_MXFP4 ? check_excluded(context, &checkpoint->model, tensor, place.suffix) : MOE4_OK;
}

/* A layer none of whose expert tensors is here is not listed: a folder may hold a part of a model. */
static moe4_status list_layers(moe4_context *context, moe4_checkpoint *checkpoint)
{
    size_t bytes = (size_t)checkpoint->n_all * sizeof *checkpoint->layers;
    checkpoint->layers = memory_allocate_zeroed(&checkpoint->allocator, bytes);
    if (!checkpoint->layers) return context_fail_memory(context, "a list of layers", bytes);
    settle_spelling(checkpoint);
    settle_extra_stem(checkpoint);
    for (int64_t i = 0; i < moe4_tensors_count(checkpoint->tensors); i++) {
        moe4_status status = mark_layer(context, checkpoint, moe4_tensors_get(checkpoint->tensors, i));
        if (status != MOE4_OK) return status;
    }
    for (int32_t number = 0; number < checkpoint->n_all; number++) {
        int32_t marks = checkpoint->layers[number];
        if (marks && (marks & LAYER_MXFP4 || !(marks & LAYER_OTHER)))
            checkpoint->layers[checkpoint->n_layers++] = number;
        else if (marks)
            checkpoint->n_other++;
    }
    return MOE4_OK;
}

moe4_status moe4_checkpoint_open(moe4_context *context, const char *path, moe4_checkpoint **result)
{
    moe4_checkpoint *checkpoint = NULL;
    moe4_status status = check_argument(context, "checkpoint", result);
    if (status != MOE4_OK) return status;
    *result = NULL;
    status = check_argument(context, "path", path);
    if (status != MOE4_OK) return status;
    checkpoint = memory_allocate_zeroed(&context->allocator, sizeof *checkpoint);
    if (!checkpoint) return context_fail_memory(context, "a checkpoint", sizeof *checkpoint);
    checkpoint->allocator = context->allocator;
    status = gguf_is_at(path) ? open_gguf(context, checkpoint, path) : open_folder(context, checkpoint, path);
    if (status == MOE4_OK) status = list_layers(context, checkpoint);
    if (status == MOE4_OK)
        *result = checkpoint;
    else
        moe4_checkpoint_close(checkpoint);
    return status;
}

void moe4_checkpoint_close(moe4_checkpoint *checkpoint)
{
    if (!checkpoint) return;
    moe4_allocator allocator = checkpoint->allocator;
    memory_release(&allocator, checkpoint->layers, (size_t)checkpoint->n_all * sizeof *checkpoint->layers);
    model_release(&checkpoint->model, &allocator);
    moe4_tensors_close(checkpoint->tensors);
    memory_release(&allocator, checkpoint, sizeof *checkpoint);
}

/* ---- Questions --------------------------------------------------------------------------------------------------- */

moe4_status moe4_checkpoint_describe(const moe4_checkpoint *checkpoint, moe4_checkpoint_info *info)
{
    if (!checkpoint || !info || !is_struct_size(info->size)) return MOE4_EINVAL;
    const struct model *model = &checkpoint->model;
    const moe4_checkpoint_info made = {
        .family = model->name,
        .layout = checkpoint->family->layout,
        .n_model_layers = model->n_layers,
        .n_moe_layers = checkpoint->n_layers,
        .n_extra_layers = model->n_extra_layers,
        .n_other_layers = checkpoint->n_other,
        .n_shared_experts = model->n_shared_experts,
        .model_hidden_size = model->router_size,
    };
    fill_struct(info, &made, sizeof made);
    return MOE4_OK;
}

int32_t moe4_checkpoint_layer_number(const moe4_checkpoint *checkpoint, int32_t index)
{
    return checkpoint && index >= 0 && index < checkpoint->n_layers ? checkpoint->layers[index] : -1;
}

const moe4_tensors *moe4_checkpoint_tensors(const moe4_checkpoint *checkpoint)
{
    return checkpoint ? checkpoint->tensors : NULL;
}

/* Whether what follows the block in a tensor's name is one of a router's names. */
static int is_router_tensor(const struct router_names *names, const char *rest)
{
    if (strcmp(rest, names->weight) == 0 || (names->bias && strcmp(rest, names->bias) == 0)) return 1;
    for (int i = 0; i < MAX_SYNONYMS; i++)
        if ((names->selection_bias[i] && strcmp(rest, names->selection_bias[i]) == 0) ||
            (names->hash_table[i] && strcmp(rest, names->hash_table[i]) == 0))
            return 1;
    return 0;
}

moe4_tensor_role moe4_checkpoint_role(const moe4_checkpoint *checkpoint, const moe4_tensor *tensor,
                                      int32_t *layer_number)
{
    static const struct {
        const char *word;
        moe4_tensor_role role;
    } around[] = {
        {"shared_expert", MOE4_ROLE_SHARED_EXPERT},
        {"shexp", MOE4_ROLE_SHARED_EXPERT},
        {"latent", MOE4_ROLE_LATENT},
        {"routed_expert_", MOE4_ROLE_LATENT},
    };
    struct place place;
    int32_t number = -1;
    if (layer_number) *layer_number = -1;
    if (!checkpoint || !tensor) return MOE4_ROLE_OTHER;
    const struct family *family = checkpoint->family;
    int32_t n_layers = checkpoint->model.n_layers;
    const char *rest = spelling_block(family, &checkpoint->spelling, n_layers, tensor->name, &number);
    if (!rest) return MOE4_ROLE_OTHER;
    moe4_tensor_role role = MOE4_ROLE_OTHER;
    for (size_t i = 0; i < sizeof around / sizeof *around; i++)
        if (strstr(rest, around[i].word)) role = around[i].role;
    if (is_router_tensor(checkpoint->model.router, rest)) role = MOE4_ROLE_ROUTER;
    if (spelling_parse(family, &checkpoint->spelling, n_layers, tensor->name, &place))
        role = place.suffix && place.suffix->piece == PIECE_IGNORED ? MOE4_ROLE_UNUSED : MOE4_ROLE_EXPERT;
    if (layer_number && role != MOE4_ROLE_OTHER) *layer_number = number;
    return role;
}
