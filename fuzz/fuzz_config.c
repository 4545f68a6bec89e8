/* config.json of a folder whose only shard has no tensors; after a line "---" the hf_quant_config.json beside it. */
#include <string.h>

#include "fuzz.h"

static const char no_tensors[] = "\2\0\0\0\0\0\0\0{}";
static const char separator[] = "\n---\n";

static void body(moe4_context *context, const uint8_t *data, size_t n_bytes)
{
    fuzz_folder_put("model.safetensors", no_tensors, sizeof no_tensors - 1);
    const uint8_t *end = memmem(data, n_bytes, separator, sizeof separator - 1);
    const uint8_t *beside = end ? end + sizeof separator - 1 : NULL;
    fuzz_folder_put("config.json", data, end ? (size_t)(end - data) : n_bytes);
    fuzz_folder_put("hf_quant_config.json", beside, beside ? (size_t)(data + n_bytes - beside) : 0);
    fuzz_use_checkpoint(context, fuzz_folder());
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
    return fuzz_run(data, n_bytes, body);
}
