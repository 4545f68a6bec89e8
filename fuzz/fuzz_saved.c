/* A saved prepared layer, as container.h describes its file.  What loads runs, and loads again when it is saved. */
#include <unistd.h>

#include "container.h"
#include "fuzz.h"

static void save_again(moe4_context *context, const moe4_layer *layer)
{
    moe4_layer *copy = NULL;
    const char *path = fuzz_folder_path("layer.safetensors");
    moe4_status status = moe4_layer_save(context, layer, "fuzz", path);
    fuzz_check_status(context, status);
    if (status != MOE4_OK) return;
    status = moe4_layer_load(context, path, "fuzz", MOE4_MAPPING_NONE, &copy);
    fuzz_check_status(context, status);
    FUZZ_CHECK(status == MOE4_OK || status == MOE4_ENOMEM);
    moe4_layer_destroy(copy);
    unlink(path);
}

static void body(moe4_context *context, const uint8_t *data, size_t n_bytes)
{
    static struct container container;
    container_build(context, (const char *)data, n_bytes, &container);
    fuzz_justify(container.n_bytes);
    const char *path = fuzz_file(container.bytes, container.n_bytes);
    static const moe4_mapping mappings[] = {MOE4_MAPPING_NONE, MOE4_MAPPING_SHARED};
    for (int i = 0; i < 2; i++) {
        moe4_layer *layer;
        moe4_status status = moe4_layer_load(context, path, NULL, mappings[i], &layer);
        fuzz_check_status(context, status);
        FUZZ_CHECK((status == MOE4_OK) == (layer != NULL));
        if (!layer) continue;
        fuzz_use_layer(context, layer);
        if (mappings[i] == MOE4_MAPPING_NONE) save_again(context, layer);
        moe4_layer_destroy(layer);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
    return fuzz_run(data, n_bytes, body);
}
