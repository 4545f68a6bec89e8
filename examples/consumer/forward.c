/* forward FOLDER: runs the first MoE layer of a checkpoint on four tokens. */
#include <moe4/io.h>
#include <stdio.h>
#include <stdlib.h>

int main(int argc, char **argv)
{
    moe4_context *context = NULL;
    moe4_checkpoint *checkpoint = NULL;
    moe4_layer *layer = NULL;
    moe4_layer_info info = MOE4_LAYER_INFO_INIT;
    moe4_batch batch = MOE4_BATCH_INIT;
    moe4_result result = MOE4_RESULT_INIT;
    int64_t T = batch.n_tokens = 4;

    moe4_status status = moe4_context_create(NULL, &context);
    if (!status) status = moe4_checkpoint_open(context, argc > 1 ? argv[1] : ".", &checkpoint);
    if (!status)
        status = moe4_checkpoint_load(context, checkpoint, moe4_checkpoint_layer_number(checkpoint, 0), NULL, &layer);
    if (!status) status = moe4_layer_describe(layer, &info);
    if (!status) status = moe4_workspace_bytes(context, layer, batch.compute, T, 0, &batch.workspace_bytes);
    if (!status) {
        float *x = calloc(T * info.hidden_size, sizeof *x), *y = calloc(T * info.output_size, sizeof *y);
        for (int64_t t = 0; x && t < T; t++) x[t * info.hidden_size + t] = 1.0f;
        batch.x = x;
        batch.x_dtype = result.y_dtype = MOE4_DTYPE_F32;
        batch.workspace = aligned_alloc(256, (batch.workspace_bytes + 255) / 256 * 256);
        result.y = y;
        status = moe4_forward_router(context, layer, &batch, NULL, &result); /* logits by the checkpoint's router */
        for (int64_t t = 0; !status && t < T; t++) printf("y[%d][0] = %g\n", (int)t, y[t * info.output_size]);
        free(batch.workspace), free(x), free(y);
    }
    if (status) fprintf(stderr, "%s\n", context ? moe4_context_message(context) : moe4_status_name(status));
    moe4_layer_destroy(layer);
    moe4_checkpoint_close(checkpoint);
    moe4_context_destroy(context);
    return status != MOE4_OK;
}
