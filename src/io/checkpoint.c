#include "io/checkpoint.h"

#include <inttypes.h>
#include <string.h>

#include "io/check.h"
#include "io/show.h"
#include "io/tensors.h"

/* config.json first: what it refuses needs no tensor looked at. */
static moe4_status read_config(moe4_context *context, moe4_checkpoint *checkpoint, const char *folder)
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
        status = family_find(&config, &checkpoint->family);
        if (status == MOE4_OK) status = checkpoint->family->read_config(&config, &checkpoint->model);
        config_close(&config);
    }
    memory_release(&checkpoint->allocator, path, bytes);
    return status;
}

/* Marks the layer that a tensor is an expert tensor of. */
static moe4_status mark_layer(moe4_context *context, moe4_checkpoint *checkpoint, const moe4_tensor *tensor)
{
    int32_t number;
    moe4_status status = checkpoint->family->classify(context, tensor, &number);
    if (status != MOE4_OK || number < 0) return status;
    if (number >= checkpoint->model.n_layers)
        return context_fail(
            context, MOE4_EFORMAT, "%s: tensor \"%s\" is of layer %" PRId32 ", but config.json has %" PRId32 " layers",
            show_file(tensor->file).text, show_name(tensor->name).text, number, checkpoint->model.n_layers);
    checkpoint->layers[number] = 1;
    return MOE4_OK;
}

/* A layer none of whose expert tensors is here is not listed: a folder may hold a part of a model. */
static moe4_status list_layers(moe4_context *context, moe4_checkpoint *checkpoint)
{
    size_t bytes = (size_t)checkpoint->model.n_layers * sizeof *checkpoint->layers;
    checkpoint->layers = memory_allocate_zeroed(&checkpoint->allocator, bytes);
    if (!checkpoint->layers) return context_fail_memory(context, "a list of layers", bytes);
    for (int64_t i = 0; i < moe4_tensors_count(checkpoint->tensors); i++) {
        moe4_status status = mark_layer(context, checkpoint, moe4_tensors_get(checkpoint->tensors, i));
        if (status != MOE4_OK) return status;
    }
    for (int32_t number = 0; number < checkpoint->model.n_layers; number++)
        if (checkpoint->layers[number]) checkpoint->layers[checkpoint->n_layers++] = number;
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
    status = read_config(context, checkpoint, path);
    if (status == MOE4_OK) status = moe4_tensors_open(context, path, &checkpoint->tensors);
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
    memory_release(&allocator, checkpoint->layers, (size_t)checkpoint->model.n_layers * sizeof *checkpoint->layers);
    moe4_tensors_close(checkpoint->tensors);
    memory_release(&allocator, checkpoint, sizeof *checkpoint);
}

moe4_status moe4_checkpoint_describe(const moe4_checkpoint *checkpoint, moe4_checkpoint_info *info)
{
    if (!checkpoint || !info || info->size != sizeof *info) return MOE4_EINVAL;
    info->family = checkpoint->family->name;
    info->layout = checkpoint->family->layout;
    info->n_model_layers = checkpoint->model.n_layers;
    info->n_moe_layers = checkpoint->n_layers;
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
