/* config.json of a folder whose only shard has no tensors. */
#include "fuzz.h"

static const char no_tensors[] = "\2\0\0\0\0\0\0\0{}";

static void body(moe4_context *context, const uint8_t *data, size_t n_bytes)
{
    fuzz_folder_put("model.safetensors", no_tensors, sizeof no_tensors - 1);
    fuzz_folder_put("config.json", data, n_bytes);
    fuzz_use_checkpoint(context, fuzz_folder());
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
    return fuzz_run(data, n_bytes, body);
}
