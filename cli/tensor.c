#include "tensor.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "command.h"
#include "memory.h"
#include "message.h"

static const struct {
    const char *word;
    size_t bytes;
} dtypes[] = {
    [MOE4_DTYPE_F32] = {"F32", 4}, [MOE4_DTYPE_F16] = {"F16", 2},         [MOE4_DTYPE_BF16] = {"BF16", 2},
    [MOE4_DTYPE_I16] = {"I16", 2}, [MOE4_DTYPE_F8_E4M3] = {"F8_E4M3", 1}, [MOE4_DTYPE_E8M0] = {"F8_E8M0", 1},
    [MOE4_DTYPE_I32] = {"I32", 4}, [MOE4_DTYPE_I64] = {"I64", 8},         [MOE4_DTYPE_I8] = {"I8", 1},
};
enum { N_DTYPES = sizeof dtypes / sizeof *dtypes };

const char *dtype_word(moe4_dtype dtype)
{
    return dtypes[dtype].word;
}

moe4_dtype dtype_named(const char *word)
{
    for (int i = 0; i < N_DTYPES; ++i)
        if (dtypes[i].word && !strcmp(dtypes[i].word, word)) return (moe4_dtype)i;
    return strcmp(word, "U8") ? MOE4_DTYPE_NONE : MOE4_DTYPE_E8M0; /* how most files type scale bytes */
}

size_t dtype_bytes(moe4_dtype dtype)
{
    return dtypes[dtype].bytes;
}

int tensor_is_float(const moe4_tensor *tensor)
{
    return !strcmp(tensor->dtype, "BF16") || !strcmp(tensor->dtype, "F16") || !strcmp(tensor->dtype, "F32");
}

struct shape_text shape_show(int32_t rank, const int64_t *shape)
{
    struct shape_text result = {"["};
    size_t used = 1;
    for (int32_t i = 0; i < rank && used < sizeof result.text; ++i) {
        const char *comma = i ? ", " : "";
        int length = shape[i] == ANY_SIZE ? snprintf(result.text + used, sizeof result.text - used, "%sany", comma)
                                          : snprintf(result.text + used, sizeof result.text - used, "%s%lld", comma,
                                                     (long long)shape[i]);
        used += (size_t)length;
    }
    if (used + 1 < sizeof result.text) memcpy(result.text + used, "]", 2);
    return result;
}

static int dtype_is_wanted(const struct tensor_want *want, moe4_dtype dtype)
{
    for (int i = 0; i < 4 && want->dtypes[i]; ++i)
        if (want->dtypes[i] == dtype) return 1;
    return 0;
}

static int fail_dtype(const struct tensor_want *want, const moe4_tensor *tensor)
{
    char expected[64] = "";
    for (int i = 0; i < 4 && want->dtypes[i]; ++i) {
        size_t used = strlen(expected);
        snprintf(expected + used, sizeof expected - used, "%s%s", i ? " or " : "", dtype_word(want->dtypes[i]));
    }
    return fail("%s: tensor \"%s\": dtype %s, expected %s", tensor->file, tensor->name, tensor->dtype, expected);
}

static int shape_is_wanted(const struct tensor_want *want, const moe4_tensor *tensor)
{
    if (tensor->rank != want->rank) return 0;
    for (int32_t i = 0; i < want->rank; ++i)
        if (want->shape[i] != ANY_SIZE && want->shape[i] != tensor->shape[i]) return 0;
    return 1;
}

int tensor_load(moe4_context *context, const moe4_tensors *tensors, const struct tensor_want *want,
                struct tensor_data *result)
{
    *result = (struct tensor_data){.dtype = MOE4_DTYPE_NONE};
    const moe4_tensor *tensor = moe4_tensors_find(tensors, want->name);
    if (!tensor) {
        const moe4_tensor *any = moe4_tensors_get(tensors, 0);
        return fail("%s: no tensor \"%s\"", any ? any->file : "the file", want->name);
    }
    if (!shape_is_wanted(want, tensor))
        return fail("%s: tensor \"%s\": shape %s, expected %s", tensor->file, tensor->name,
                    shape_show(tensor->rank, tensor->shape).text, shape_show(want->rank, want->shape).text);
    result->dtype = dtype_named(tensor->dtype);
    if (!dtype_is_wanted(want, result->dtype)) return fail_dtype(want, tensor);
    result->shape[0] = tensor->shape[0];
    result->shape[1] = want->rank == 2 ? tensor->shape[1] : 1;
    int code = allocate(&result->data, tensor->n_bytes, 1, want->name);
    if (code) return code;
    if (moe4_tensors_read(context, tensors, tensor, 0, tensor->n_bytes, result->data) == MOE4_OK) return EXIT_OK;
    free(result->data);
    result->data = NULL;
    return fail_library(context);
}

int tensors_save(moe4_context *context, const char *path, const struct tensor_output *outputs, int32_t n_outputs)
{
    moe4_tensor tensors[16] = {0};
    moe4_writer *writer = NULL;
    for (int32_t i = 0; i < n_outputs; ++i) {
        const struct tensor_output *output = &outputs[i];
        tensors[i].name = output->name;
        tensors[i].dtype = dtype_word(output->dtype);
        tensors[i].rank = output->rank;
        memcpy(tensors[i].shape, output->shape, sizeof output->shape);
    }
    if (moe4_writer_create(context, path, tensors, n_outputs, NULL, &writer) != MOE4_OK) return fail_library(context);
    for (int32_t i = 0; i < n_outputs; ++i) {
        const struct tensor_output *output = &outputs[i];
        int64_t bytes = (int64_t)dtype_bytes(output->dtype);
        for (int32_t d = 0; d < output->rank; ++d) bytes *= output->shape[d];
        if (moe4_writer_write(context, writer, i, 0, bytes, output->data) != MOE4_OK) {
            int code = fail_library(context);
            moe4_writer_discard(writer);
            return code;
        }
    }
    return moe4_writer_commit(context, writer) == MOE4_OK ? EXIT_OK : fail_library(context);
}
