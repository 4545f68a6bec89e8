/* A whole GGUF file, or where the magic comes once more the two files of a model: described consistently, read inside
 * its bounds, and its layers prepared and run. */
#include <string.h>

#include "fuzz.h"

static const char name[] = "model.gguf", magic[] = "GGUF";
static const char *const parts[] = {"model-00001-of-00002.gguf", "model-00002-of-00002.gguf"};

/* Where the second file begins; NULL if there is none. */
static const uint8_t *second_file(const uint8_t *data, size_t n_bytes)
{
    enum { HEADER_BYTES = 24 };
    if (n_bytes <= HEADER_BYTES) return NULL;
    return memmem(data + HEADER_BYTES, n_bytes - HEADER_BYTES, magic, sizeof magic - 1);
}

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

/* `first` is the path that is opened; the second file is empty where there is but one. */
static void use(moe4_context *context, const char *first, const uint8_t *data, size_t n_bytes, const uint8_t *second,
                size_t second_bytes)
{
    moe4_tensors *tensors;
    moe4_status status = moe4_tensors_open(context, fuzz_folder_path(first), &tensors);
    fuzz_check_status(context, status);
    FUZZ_CHECK((status == MOE4_OK) == (tensors != NULL));
    for (int64_t i = 0; i < moe4_tensors_count(tensors); i++) {
        const moe4_tensor *tensor = moe4_tensors_get(tensors, i);
        int is_second = strstr(tensor->file, parts[1]) != NULL;
        check_tensor(context, tensors, tensor, is_second ? second : data, is_second ? second_bytes : n_bytes);
    }
    const char *architecture = moe4_tensors_metadata(tensors, "general.architecture");
    if (architecture) fuzz_touch(architecture, strlen(architecture));
    moe4_tensors_close(tensors);
    fuzz_use_checkpoint(context, fuzz_folder_path(first));
}

static void body(moe4_context *context, const uint8_t *data, size_t n_bytes)
{
    const uint8_t *second = second_file(data, n_bytes);
    if (!second) {
        fuzz_folder_put(name, data, n_bytes);
        use(context, name, data, n_bytes, data, 0);
        return;
    }
    size_t cut = (size_t)(second - data);
    fuzz_folder_put(parts[0], data, cut);
    fuzz_folder_put(parts[1], second, n_bytes - cut);
    use(context, parts[0], data, cut, second, n_bytes - cut);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
    return fuzz_run(data, n_bytes, body);
}
