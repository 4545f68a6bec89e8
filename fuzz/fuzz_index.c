/* model.safetensors.index.json of a folder with three shards.  Whatever it says, only files of the folder are opened.
 */
#include <string.h>

#include "fuzz.h"

static const struct shard {
    const char *name, *header;
} shards[] = {
    {"a.safetensors", "{\"x\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0,2]},"
                      "\"y\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[2,2]}}"},
    {"b.safetensors", "{\"z\":{\"dtype\":\"F16\",\"shape\":[],\"data_offsets\":[0,2]}}"},
    {"model.safetensors", "{\"x\":{\"dtype\":\"BF16\",\"shape\":[1],\"data_offsets\":[0,2]}}"},
};
enum { N_SHARDS = sizeof shards / sizeof *shards, DATA_BYTES = 2 };

static void write_shards(void)
{
    static int is_written;
    if (is_written) return;
    is_written = 1;
    for (int i = 0; i < N_SHARDS; i++) {
        char file[512] = {0};
        size_t n_bytes = strlen(shards[i].header);
        file[0] = (char)n_bytes;
        memcpy(file + 8, shards[i].header, n_bytes);
        FUZZ_CHECK(n_bytes < 128);
        fuzz_folder_put(shards[i].name, file, 8 + n_bytes + DATA_BYTES);
    }
}

static void body(moe4_context *context, const uint8_t *data, size_t n_bytes)
{
    moe4_tensors *tensors;
    write_shards();
    fuzz_folder_put("model.safetensors.index.json", data, n_bytes);
    const char *folder = fuzz_folder();
    size_t length = strlen(folder);
    moe4_status status = moe4_tensors_open(context, folder, &tensors);
    fuzz_check_status(context, status);
    FUZZ_CHECK((status == MOE4_OK) == (tensors != NULL));
    for (int64_t i = 0; i < moe4_tensors_count(tensors); i++) {
        const moe4_tensor *tensor = moe4_tensors_get(tensors, i);
        uint8_t bytes[DATA_BYTES];
        FUZZ_CHECK(strncmp(tensor->file, folder, length) == 0 && tensor->file[length] == '/');
        FUZZ_CHECK(!strchr(tensor->file + length + 1, '/'));
        FUZZ_CHECK(moe4_tensors_find(tensors, tensor->name) == tensor);
        FUZZ_CHECK(moe4_tensors_read(context, tensors, tensor, 0, tensor->n_bytes, bytes) == MOE4_OK);
    }
    moe4_tensors_close(tensors);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
    return fuzz_run(data, n_bytes, body);
}
