/* input_of SRC OUT TENSOR...: an input of `moe4 run` made from the tensors of another, in other forms:
 *
 *   hidden_states=DTYPE, router_logits=DTYPE, topk_weights=DTYPE   as F32, F16 or BF16
 *   topk_ids, topk_packed                                          the latter with the weights as bf16
 *   top=A             only the first A columns of ids and weights from here on
 *   shift=N           N is added to every id from here on
 *   addend=DTYPE[:N]  [T, N] numbers of no meaning; N is the width of hidden_states unless it is given,
 *                     which it must be for a deferred run's
 *   expert_map=0,-1,1,...
 *   gemm2_rows, row_map, expert_weights=DTYPE                      of a deferred run */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "moe4/io.h"
#include "ref.h"

enum { MAX_TENSORS = 8 };

static moe4_context *context;
static moe4_tensors *source;
static moe4_tensor tensors[MAX_TENSORS];
static void *data[MAX_TENSORS];
static int32_t n_tensors, top, shift;

static void must(int good, const char *what)
{
    if (good) return;
    fprintf(stderr, "input_of: %s: %s\n", what, moe4_context_message(context));
    exit(2);
}

static moe4_dtype dtype_of(const char *word)
{
    return !strcmp(word, "F32") ? MOE4_DTYPE_F32 : !strcmp(word, "F16") ? MOE4_DTYPE_F16 : MOE4_DTYPE_BF16;
}

/* A tensor of the source as numbers. */
static double *numbers_read(const char *name, int64_t shape[2])
{
    const moe4_tensor *tensor = moe4_tensors_find(source, name);
    must(tensor != NULL, name);
    void *bytes = malloc((size_t)tensor->n_bytes + 1);
    memcpy(shape, tensor->shape, 2 * sizeof *shape);
    double *numbers = calloc((size_t)(shape[0] * shape[1]) + 1, sizeof *numbers);
    must(bytes && numbers, "out of memory");
    must(moe4_tensors_read(context, source, tensor, 0, tensor->n_bytes, bytes) == MOE4_OK, name);
    moe4_dtype dtype = strcmp(tensor->dtype, "I32") ? dtype_of(tensor->dtype) : MOE4_DTYPE_I32;
    for (int64_t i = 0; i < shape[0] * shape[1]; i++) numbers[i] = ref_load(bytes, dtype, i);
    free(bytes);
    return numbers;
}

static void *tensor_add(const char *name, const char *dtype, int32_t rank, const int64_t *shape)
{
    must(n_tensors < MAX_TENSORS, "too many tensors");
    moe4_tensor *tensor = &tensors[n_tensors];
    *tensor = (moe4_tensor){.name = name, .dtype = dtype, .rank = rank, .n_bytes = strchr(dtype, '3') ? 4 : 2};
    for (int32_t i = 0; i < rank; i++) tensor->n_bytes *= tensor->shape[i] = shape[i];
    data[n_tensors] = malloc((size_t)tensor->n_bytes + 1);
    must(data[n_tensors] != NULL, "out of memory");
    return data[n_tensors++];
}

static void store(void *array, const char *dtype, int64_t index, double value)
{
    if (*dtype == 'I')
        ((int32_t *)array)[index] = (int32_t)value;
    else if (!strcmp(dtype, "F32"))
        ((float *)array)[index] = (float)value;
    else
        ((uint16_t *)array)[index] = *dtype == 'B' ? ref_to_bf16(value) : ref_to_f16(value);
}

/* The first `columns` of a matrix (0 = all), `added` to every element. */
static void add_converted(const char *name, const char *dtype, int32_t columns, int32_t added)
{
    int64_t shape[2];
    double *numbers = numbers_read(name, shape);
    const int64_t width = shape[1];
    if (columns) shape[1] = columns;
    void *array = tensor_add(name, dtype, 2, shape);
    for (int64_t i = 0; i < shape[0] * shape[1]; i++)
        store(array, dtype, i, numbers[i / shape[1] * width + i % shape[1]] + added);
    free(numbers);
}

static void add_packed(void)
{
    int64_t shape[2];
    double *ids = numbers_read("topk_ids", shape), *weights = numbers_read("topk_weights", shape);
    uint32_t *packed = tensor_add("topk_packed", "I32", 2, shape);
    for (int64_t i = 0; i < shape[0] * shape[1]; i++)
        packed[i] = (uint32_t)((int32_t)ids[i] + shift) << 16 | ref_to_bf16(weights[i]);
    free(ids);
    free(weights);
}

static void add_addend(char *dtype)
{
    int64_t shape[2];
    free(numbers_read(moe4_tensors_find(source, "gemm2_rows") ? "row_map" : "hidden_states", shape));
    char *width = strchr(dtype, ':');
    if (width) {
        *width = '\0';
        shape[1] = atoi(width + 1);
    }
    void *array = tensor_add("addend", dtype, 2, shape);
    for (int64_t i = 0; i < shape[0] * shape[1]; i++) store(array, dtype, i, (double)(i * 37 % 101 - 50) / 64);
}

static void add_map(const char *list)
{
    int64_t count = 1;
    for (const char *at = list; *at; at++) count += *at == ',';
    int32_t *map = tensor_add("expert_map", "I32", 1, &count);
    for (int64_t i = 0; i < count; i++) {
        map[i] = atoi(list);
        list = strchr(list, ',');
        list = list ? list + 1 : "";
    }
}

static void add(char *argument)
{
    char *value = strchr(argument, '=');
    if (value) *value++ = '\0';
    if (!strcmp(argument, "top"))
        top = atoi(value);
    else if (!strcmp(argument, "shift"))
        shift = atoi(value);
    else if (!strcmp(argument, "topk_packed"))
        add_packed();
    else if (!strcmp(argument, "gemm2_rows"))
        add_converted(argument, "BF16", 0, 0);
    else if (!strcmp(argument, "row_map"))
        add_converted(argument, "I32", 0, shift);
    else if (!strcmp(argument, "topk_ids"))
        add_converted(argument, "I32", top, shift);
    else if (!strcmp(argument, "addend"))
        add_addend(value);
    else if (!strcmp(argument, "expert_map"))
        add_map(value);
    else
        add_converted(argument, value, strcmp(argument, "topk_weights") ? 0 : top, 0);
}

int main(int argc, char **argv)
{
    moe4_writer *writer;
    if (argc < 4 || moe4_context_create(NULL, &context) != MOE4_OK) return 2;
    must(moe4_tensors_open(context, argv[1], &source) == MOE4_OK, argv[1]);
    for (int i = 3; i < argc; i++) add(argv[i]);
    must(moe4_writer_create(context, argv[2], tensors, n_tensors, NULL, &writer) == MOE4_OK, argv[2]);
    for (int32_t i = 0; i < n_tensors; i++)
        must(moe4_writer_write(context, writer, i, 0, tensors[i].n_bytes, data[i]) == MOE4_OK, argv[2]);
    must(moe4_writer_commit(context, writer) == MOE4_OK, argv[2]);
    for (int32_t i = 0; i < n_tensors; i++) free(data[i]);
    moe4_tensors_close(source);
    moe4_context_destroy(context);
    return 0;
}
