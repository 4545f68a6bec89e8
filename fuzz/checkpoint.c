/* What is done with a checkpoint, whatever it was made from. */
#include <string.h>

#include "fuzz.h"

enum { MAX_LAYERS = 2 };

static void touch_matrix(const moe4_matrix *matrix, int64_t rows, int64_t K)
{
    fuzz_touch(matrix->codes, (size_t)(rows * K / 2));
    fuzz_touch(matrix->scales, (size_t)(rows * K / 32));
    if (matrix->bias) fuzz_touch(matrix->bias, (size_t)rows * (matrix->bias_dtype == MOE4_DTYPE_F32 ? 4 : 2));
}

static int64_t matrix_bytes(const moe4_matrix *matrix, int64_t rows, int64_t K)
{
    return rows * K / 2 + rows * K / 32 + (matrix->bias ? rows * (matrix->bias_dtype == MOE4_DTYPE_F32 ? 4 : 2) : 0);
}

static int note_total(void *user, int64_t bytes_done, int64_t bytes_total)
{
    int64_t *total = user;
    FUZZ_CHECK(bytes_done > 0 && bytes_done <= bytes_total);
    *total = bytes_total;
    return 0;
}

/* The experts from first_expert on.  What the reader says that it reads must be what their shapes make of them. */
static void read_experts(moe4_context *context, const moe4_checkpoint *checkpoint, int32_t number, int32_t first_expert)
{
    moe4_reader_options options = MOE4_READER_OPTIONS_INIT;
    moe4_layer_reader *reader;
    char key[33];
    int64_t total = 0;
    options.first_expert = first_expert;
    options.progress = note_total;
    options.user = &total;
    moe4_status status = moe4_layer_reader_open(context, checkpoint, number, &options, &reader);
    fuzz_check_status(context, status);
    if (status != MOE4_OK) return;
    const moe4_layer_config *config = moe4_layer_reader_config(reader);
    int64_t H = config->hidden_size, I = config->intermediate_size;
    int64_t rows = config->gate_up == MOE4_GATE_UP_NONE ? I : 2 * I;
    FUZZ_CHECK(moe4_layer_reader_key(reader, key) == MOE4_OK && strlen(key) == 32);
    for (int32_t l = 0; l < config->n_local_experts; l++) {
        moe4_expert expert;
        status = moe4_layer_reader_read(context, reader, l, &expert);
        fuzz_check_status(context, status);
        if (status != MOE4_OK) break;
        int64_t n_bytes = matrix_bytes(&expert.gate_up, rows, H) + matrix_bytes(&expert.down, H, I);
        FUZZ_CHECK(total == n_bytes * config->n_local_experts);
        touch_matrix(&expert.gate_up, rows, H);
        touch_matrix(&expert.down, H, I);
    }
    moe4_layer_reader_close(reader);
}

/* Config and router alone, which a layer in any precision has. */
static void skip_experts(moe4_context *context, const moe4_checkpoint *checkpoint, int32_t number)
{
    moe4_reader_options options = MOE4_READER_OPTIONS_INIT;
    moe4_layer_reader *reader;
    moe4_expert expert;
    options.experts = MOE4_EXPERTS_SKIP;
    moe4_status status = moe4_layer_reader_open(context, checkpoint, number, &options, &reader);
    fuzz_check_status(context, status);
    if (status != MOE4_OK) return;
    const moe4_router *router = &moe4_layer_reader_config(reader)->router;
    fuzz_touch(router->weight, 1);
    FUZZ_CHECK(moe4_layer_reader_read(context, reader, 0, &expert) == MOE4_EINVAL);
    moe4_layer_reader_close(reader);
}

static void load_layer(moe4_context *context, const moe4_checkpoint *checkpoint, int32_t number)
{
    moe4_layer *layer;
    moe4_status status = moe4_checkpoint_load(context, checkpoint, number, NULL, &layer);
    fuzz_check_status(context, status);
    FUZZ_CHECK((status == MOE4_OK) == (layer != NULL));
    if (layer) fuzz_use_layer(context, layer);
    moe4_layer_destroy(layer);
}

static void check_roles(const moe4_checkpoint *checkpoint)
{
    const moe4_tensors *tensors = moe4_checkpoint_tensors(checkpoint);
    for (int64_t i = 0; i < moe4_tensors_count(tensors); i++) {
        int32_t number;
        moe4_tensor_role role = moe4_checkpoint_role(checkpoint, moe4_tensors_get(tensors, i), &number);
        FUZZ_CHECK(role >= MOE4_ROLE_OTHER && role <= MOE4_ROLE_UNUSED && number >= -1);
    }
}

void fuzz_use_checkpoint(moe4_context *context, const char *path)
{
    moe4_checkpoint *checkpoint;
    moe4_checkpoint_info info = MOE4_CHECKPOINT_INFO_INIT;
    moe4_status status = moe4_checkpoint_open(context, path, &checkpoint);
    fuzz_check_status(context, status);
    FUZZ_CHECK((status == MOE4_OK) == (checkpoint != NULL));
    if (!checkpoint) return;
    FUZZ_CHECK(moe4_checkpoint_describe(checkpoint, &info) == MOE4_OK);
    FUZZ_CHECK(info.family && info.layout && info.n_model_layers > 0 && info.n_extra_layers >= 0);
    FUZZ_CHECK(info.n_moe_layers >= 0 && info.n_moe_layers <= info.n_model_layers + info.n_extra_layers);
    FUZZ_CHECK(moe4_checkpoint_layer_number(checkpoint, info.n_moe_layers) == -1);
    check_roles(checkpoint);
    skip_experts(context, checkpoint, 0); /* whether it is listed or not */
    int32_t previous = -1;
    for (int32_t i = 0; i < info.n_moe_layers; i++) {
        int32_t number = moe4_checkpoint_layer_number(checkpoint, i);
        FUZZ_CHECK(number > previous && number < info.n_model_layers + info.n_extra_layers);
        previous = number;
        if (i >= MAX_LAYERS) continue;
        read_experts(context, checkpoint, number, 0);
        read_experts(context, checkpoint, number, 1);
        load_layer(context, checkpoint, number);
    }
    moe4_checkpoint_close(checkpoint);
}
