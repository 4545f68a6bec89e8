/* Tensor files as the command reads and writes them. */
#ifndef MOE4_CLI_TENSOR_H
#define MOE4_CLI_TENSOR_H

#include "moe4/io.h"

/* A safetensors file's word for a dtype, and back; NULL and NONE where there is none. */
const char *dtype_word(moe4_dtype dtype);
moe4_dtype dtype_named(const char *word);

/* Bytes of one element. */
size_t dtype_bytes(moe4_dtype dtype);

/* Whether a tensor's values are bf16, f16 or f32. */
int tensor_is_float(const moe4_tensor *tensor);

/* "[17, 64]" */
struct shape_text {
    char text[128];
};
struct shape_text shape_show(int32_t rank, const int64_t *shape);

enum { ANY_SIZE = -1 };

/* What a tensor must be. */
struct tensor_want {
    const char *name;
    int32_t rank;         /* 1 or 2 */
    int64_t shape[2];     /* ANY_SIZE = whatever the file has */
    moe4_dtype dtypes[4]; /* those allowed, then NONE */
};

/* A tensor in memory; data is the owner's to free(). */
struct tensor_data {
    moe4_dtype dtype;
    int64_t shape[2];
    void *data;
};

/* Reads a tensor that must be there.  On failure says why, and result->data is NULL. */
int tensor_load(moe4_context *context, const moe4_tensors *tensors, const struct tensor_want *want,
                struct tensor_data *result);

/* A tensor to write. */
struct tensor_output {
    const char *name;
    moe4_dtype dtype;
    int32_t rank;
    int64_t shape[2];
    const void *data;
};

/* Writes a file of them; it appears only when complete. */
int tensors_save(moe4_context *context, const char *path, const struct tensor_output *outputs, int32_t n_outputs);

#endif
