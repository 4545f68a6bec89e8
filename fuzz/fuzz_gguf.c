/* A whole GGUF file: described consistently, read inside its bounds, and its layers prepared and run. */
#include <string.h>

#include "fuzz.h"

static const char name[] = "model.gguf";

static void check_tensor(moe4_context *context, const moe4_tensors *tensors, const moe4_tensor *tensor,
                         const uint8_t *data, size_t file_bytes)
{
    uint8_t byte;
    FUZZ_CHECK(tensor->rank >= 1 && tensor->rank <= MOE4_TENSOR_MAX_RANK);
    FUZZ_CHECK(tensor->n_bytes > 0 && tensor->offset >= 24);
    FUZZ_CHECK(tensor->offset <= (int64_t)file_bytes && tensor->n_bytes <= (int64_t)file_bytes - tensor->offset);
    FUZZ_CHECK(moe4_tensors_find(tensors, tensor->name) == tensor);
    FUZZ_CHECK(moe4_tensors_read(context, tensors, tensor, tensor->n_bytes - 1, 1, &byte) == MOE4_OK);
    FUZZ_CHECK(byte == data[tensor->offset + tensor->n_bytes - 1]);
    FUZZ_CHECK(moe4_tensors_read(context, tensors, tensor, tensor->n_bytes, 1, &byte) == MOE4_EINVAL);
}

static void body(moe4_context *context, const uint8_t *data, size_t n_bytes)
{
    moe4_tensors *tensors;
    fuzz_folder_put(name, data, n_bytes);
    moe4_status status = moe4_tensors_open(context, fuzz_folder_path(name), &tensors);
    fuzz_check_status(context, status);
    FUZZ_CHECK((status == MOE4_OK) == (tensors != NULL));
    for (int64_t i = 0; i < moe4_tensors_count(tensors); i++)
        check_tensor(context, tensors, moe4_tensors_get(tensors, i), data, n_bytes);
    const char *architecture = moe4_tensors_metadata(tensors, "general.architecture");
    if (architecture) fuzz_touch(architecture, strlen(architecture));
    moe4_tensors_close(tensors);
    fuzz_use_checkpoint(context, fuzz_folder_path(name));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
    return fuzz_run(data, n_bytes, body);
}
