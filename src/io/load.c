#include "io/check.h"
#include "moe4/io.h"

struct source {
    moe4_context *context;
    moe4_layer_reader *reader;
};

static moe4_status read_expert(void *user, int32_t local_expert, moe4_expert *expert)
{
    const struct source *source = user;
    return moe4_layer_reader_read(source->context, source->reader, local_expert, expert);
}

moe4_status moe4_checkpoint_load(moe4_context *context, const moe4_checkpoint *checkpoint, int32_t layer_number,
                                 const moe4_reader_options *options, moe4_layer **layer)
{
    struct source source = {context, NULL};
    moe4_status status = check_argument(context, "layer", layer);
    if (status != MOE4_OK) return status;
    *layer = NULL;
    status = moe4_layer_reader_open(context, checkpoint, layer_number, options, &source.reader);
    if (status != MOE4_OK) return status;
    const moe4_expert_source experts = {read_expert, &source};
    status = moe4_layer_create_from(context, moe4_layer_reader_config(source.reader), &experts, layer);
    moe4_layer_reader_close(source.reader);
    return status;
}
