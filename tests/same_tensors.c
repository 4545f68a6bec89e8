/* same_tensors PATH OTHER [NAME]: whether two files or folders hold the same tensors, or the same tensor of that name:
 * names, types, shapes and bytes. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "moe4/io.h"

static void *read_all(moe4_context *context, const moe4_tensors *tensors, const moe4_tensor *tensor)
{
    void *bytes = malloc((size_t)tensor->n_bytes + 1);
    if (bytes && moe4_tensors_read(context, tensors, tensor, 0, tensor->n_bytes, bytes) == MOE4_OK) return bytes;
    fprintf(stderr, "same_tensors: %s\n", moe4_context_message(context));
    exit(2);
}

static int is_same(moe4_context *context, const moe4_tensors *const files[2], const moe4_tensor *a)
{
    const moe4_tensor *b = moe4_tensors_find(files[1], a->name);
    if (!b || strcmp(a->dtype, b->dtype) || a->rank != b->rank || a->n_bytes != b->n_bytes) return 0;
    if (memcmp(a->shape, b->shape, (size_t)a->rank * sizeof *a->shape)) return 0;
    void *bytes[2] = {read_all(context, files[0], a), read_all(context, files[1], b)};
    int same = !memcmp(bytes[0], bytes[1], (size_t)a->n_bytes);
    free(bytes[0]);
    free(bytes[1]);
    return same;
}

int main(int argc, char **argv)
{
    moe4_context *context;
    moe4_tensors *files[2];
    if (argc < 3 || argc > 4 || moe4_context_create(NULL, &context) != MOE4_OK) return 2;
    for (int i = 0; i < 2; i++)
        if (moe4_tensors_open(context, argv[1 + i], &files[i]) != MOE4_OK) {
            fprintf(stderr, "same_tensors: %s\n", moe4_context_message(context));
            return 2;
        }
    int64_t n = moe4_tensors_count(files[0]), n_other = moe4_tensors_count(files[1]);
    int failed = argc == 3 && n != n_other;
    if (failed) fprintf(stderr, "same_tensors: %lld tensors and %lld\n", (long long)n, (long long)n_other);
    if (argc == 4 && !moe4_tensors_find(files[0], argv[3])) {
        fprintf(stderr, "same_tensors: no %s\n", argv[3]);
        failed = 1;
    }
    for (int64_t i = 0; i < n; i++) {
        const moe4_tensor *tensor = moe4_tensors_get(files[0], i);
        if (argc == 4 && strcmp(tensor->name, argv[3])) continue;
        if (is_same(context, (const moe4_tensors *const[]){files[0], files[1]}, tensor)) continue;
        fprintf(stderr, "same_tensors: %s differs\n", tensor->name);
        failed = 1;
    }
    moe4_tensors_close(files[0]);
    moe4_tensors_close(files[1]);
    moe4_context_destroy(context);
    return failed;
}
