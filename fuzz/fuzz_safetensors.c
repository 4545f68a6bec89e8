/* A whole safetensors file.  What opens is described consistently, and reading stays inside the file. */
#include <string.h>

#include "fuzz.h"

static void check_tensor(const moe4_tensors *tensors, const moe4_tensor *tensor, size_t file_bytes)
{
    FUZZ_CHECK(tensor->rank >= 0 && tensor->rank <= MOE4_TENSOR_MAX_RANK);
    FUZZ_CHECK(tensor->n_bytes >= 0 && tensor->offset >= 8);
    FUZZ_CHECK(tensor->offset <= (int64_t)file_bytes && tensor->n_bytes <= (int64_t)file_bytes - tensor->offset);
    FUZZ_CHECK(moe4_tensors_find(tensors, tensor->name) == tensor);
}

static void read_tensor(moe4_context *context, const moe4_tensors *tensors, const moe4_tensor *tensor,
                        const uint8_t *data)
{
    static uint8_t buffer[1 << 16];
    int64_t n_bytes = tensor->n_bytes < (int64_t)sizeof buffer ? tensor->n_bytes : (int64_t)sizeof buffer;
    FUZZ_CHECK(moe4_tensors_read(context, tensors, tensor, tensor->n_bytes - n_bytes, n_bytes, buffer) == MOE4_OK);
    FUZZ_CHECK(memcmp(buffer, data + tensor->offset + tensor->n_bytes - n_bytes, (size_t)n_bytes) == 0);
    FUZZ_CHECK(moe4_tensors_read(context, tensors, tensor, 1, tensor->n_bytes, buffer) == MOE4_EINVAL);
    FUZZ_CHECK(moe4_tensors_read(context, tensors, tensor, -1, 1, buffer) == MOE4_EINVAL);
}

/* The file loses its last byte while it is open. */
static void read_shrunk(moe4_context *context, const moe4_tensors *tensors, size_t n_bytes)
{
    uint8_t byte;
    fuzz_file_shrink(n_bytes - 1);
    for (int64_t i = 0; i < moe4_tensors_count(tensors); i++) {
        const moe4_tensor *tensor = moe4_tensors_get(tensors, i);
        if (!tensor->n_bytes) continue;
        moe4_status expected = tensor->offset + tensor->n_bytes == (int64_t)n_bytes ? MOE4_EIO : MOE4_OK;
        FUZZ_CHECK(moe4_tensors_read(context, tensors, tensor, tensor->n_bytes - 1, 1, &byte) == expected);
    }
}

static void body(moe4_context *context, const uint8_t *data, size_t n_bytes)
{
    moe4_tensors *tensors;
    moe4_status status = moe4_tensors_open(context, fuzz_file(data, n_bytes), &tensors);
    fuzz_check_status(context, status);
    FUZZ_CHECK((status == MOE4_OK) == (tensors != NULL));
    if (status != MOE4_OK) return;
    int64_t end = 8;
    for (int64_t i = 0; i < moe4_tensors_count(tensors); i++) {
        const moe4_tensor *tensor = moe4_tensors_get(tensors, i);
        check_tensor(tensors, tensor, n_bytes);
        read_tensor(context, tensors, tensor, data);
        FUZZ_CHECK(tensor->offset >= end);
        end = tensor->offset + tensor->n_bytes;
    }
    const char *format = moe4_tensors_metadata(tensors, "format");
    if (format) fuzz_touch(format, strlen(format));
    read_shrunk(context, tensors, n_bytes);
    moe4_tensors_close(tensors);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
    return fuzz_run(data, n_bytes, body);
}
