#include "model.h"

#include "command.h"
#include "message.h"
#include "progress.h"

static moe4_status model_read(void *user, int32_t local_expert, moe4_expert *expert)
{
    struct model *self = user;
    moe4_status status = moe4_layer_reader_read(self->context, self->reader, local_expert, expert);
    if (status != MOE4_OK) fail_library(self->context);
    return status;
}

moe4_expert_source model_source(struct model *model)
{
    return (moe4_expert_source){model_read, model};
}

static moe4_reader_options reader_options(const struct model *model)
{
    moe4_reader_options options = MOE4_READER_OPTIONS_INIT;
    options.first_expert = (int32_t)model->experts.first;
    options.n_experts = (int32_t)model->experts.second;
    return options;
}

int model_open(moe4_context *context, const char *path, int64_t layer, struct integer_pair experts, struct model *model)
{
    moe4_checkpoint_info info = MOE4_CHECKPOINT_INFO_INIT;
    *model = (struct model){.context = context, .info = info, .experts = experts};
    int code = EXIT_OK;
    if (moe4_checkpoint_open(context, path, &model->checkpoint) != MOE4_OK) return fail_library(context);
    moe4_checkpoint_describe(model->checkpoint, &model->info);
    model->layer = layer == FIRST_LAYER ? moe4_checkpoint_layer_number(model->checkpoint, 0) : (int32_t)layer;
    moe4_reader_options options = reader_options(model);
    if (model->layer < 0)
        code = fail("%s: no MoE layer that can be read", path);
    else if (moe4_layer_reader_open(context, model->checkpoint, model->layer, &options, &model->reader) != MOE4_OK)
        code = fail_library(context);
    if (code)
        model_close(model);
    else
        model->config = moe4_layer_reader_config(model->reader);
    return code;
}

int model_prepare(struct model *model, moe4_context *context, moe4_layer **layer)
{
    struct progress bar = progress_begin("reading");
    moe4_reader_options options = reader_options(model);
    options.progress = progress_update;
    options.user = &bar;
    moe4_status status = moe4_checkpoint_load(context, model->checkpoint, model->layer, &options, layer);
    progress_end(&bar);
    return status == MOE4_OK ? EXIT_OK : fail_library(context);
}

void model_close(struct model *model)
{
    moe4_layer_reader_close(model->reader);
    moe4_checkpoint_close(model->checkpoint);
    model->reader = NULL;
    model->checkpoint = NULL;
}
