#include "io/check.h"
#include "moe4/io.h"

moe4_status moe4_checkpoint_load(moe4_context *context, const moe4_checkpoint *checkpoint, int32_t layer_number,
                                 const moe4_reader_options *options, moe4_layer **layer)
{
    moe4_layer_reader *reader = NULL;
    moe4_status status = check_argument(context, "layer", layer);
    if (status != MOE4_OK) return status;
    *layer = NULL;
    status = moe4_layer_reader_open(context, checkpoint, layer_number, options, &reader);
    if (status != MOE4_OK) return status;
    const moe4_expert_source source = moe4_layer_reader_source(context, reader);
    status = moe4_layer_create_from(context, moe4_layer_reader_config(reader), &source, layer);
    moe4_layer_reader_close(reader);
    return status;
}
