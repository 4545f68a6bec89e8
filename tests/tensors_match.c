/* tensors_match RULE FILE NAME OTHER_FILE OTHER_NAME: whether two tensors of any dtypes agree.
 *
 *   equal         all elements are the same number
 *   rounded       at least 99 % are; the others (bf16) are one step apart
 *   frobenius=E   |first - second| / |second| is at most E
 *   rows=E        the same of matrices whose rows may be in any order
 *   begins, ends  the first tensor is equal to the beginning, or to the end, of the second */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "moe4/io.h"
#include "ref.h"

struct values {
    int64_t count, columns;
    double *numbers;
};

static void stop(const char *what, const char *detail)
{
    fprintf(stderr, "tensors_match: %s: %s\n", what, detail);
    exit(2);
}

static moe4_dtype dtype_find(const char *word)
{
    static const struct {
        const char *word;
        moe4_dtype dtype;
    } dtypes[] = {{"F32", MOE4_DTYPE_F32},
                  {"F16", MOE4_DTYPE_F16},
                  {"BF16", MOE4_DTYPE_BF16},
                  {"I32", MOE4_DTYPE_I32},
                  {"I16", MOE4_DTYPE_I16}};
    for (size_t i = 0; i < sizeof dtypes / sizeof *dtypes; ++i)
        if (!strcmp(dtypes[i].word, word)) return dtypes[i].dtype;
    stop("dtype", word);
    return MOE4_DTYPE_NONE;
}

static struct values values_read(moe4_context *context, const char *path, const char *name)
{
    moe4_tensors *tensors;
    if (moe4_tensors_open(context, path, &tensors) != MOE4_OK) stop(path, moe4_context_message(context));
    const moe4_tensor *tensor = moe4_tensors_find(tensors, name);
    if (!tensor) stop(path, name);
    struct values values = {.count = 1};
    for (int32_t i = 0; i < tensor->rank; ++i) values.count *= tensor->shape[i];
    values.columns = tensor->rank ? tensor->shape[tensor->rank - 1] : 1;
    void *data = malloc((size_t)tensor->n_bytes + 1);
    values.numbers = calloc((size_t)values.count + 1, sizeof *values.numbers);
    if (!data || !values.numbers) stop(path, "out of memory");
    if (moe4_tensors_read(context, tensors, tensor, 0, tensor->n_bytes, data) != MOE4_OK)
        stop(path, moe4_context_message(context));
    for (int64_t i = 0; i < values.count; ++i) values.numbers[i] = ref_load(data, dtype_find(tensor->dtype), i);
    free(data);
    moe4_tensors_close(tensors);
    return values;
}

static int compare_numbers(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void rows_sort(struct values *values)
{
    for (int64_t first = 0; first < values->count; first += values->columns)
        qsort(values->numbers + first, (size_t)values->columns, sizeof *values->numbers, compare_numbers);
}

/* Place of a bf16 value among all of them in ascending order. */
static int32_t bf16_rank(double value)
{
    int32_t bits = ref_to_bf16(value);
    return bits & 0x8000 ? -(bits & 0x7FFF) : bits;
}

static int matches(const char *rule, const struct values *first, const struct values *second)
{
    int64_t n_different = 0, n_far = 0;
    double error = 0, norm = 0;
    for (int64_t i = 0; i < second->count; ++i) {
        double a = first->numbers[i], b = second->numbers[i];
        n_different += a != b;
        n_far += abs(bf16_rank(a) - bf16_rank(b)) > 1;
        error += (a - b) * (a - b);
        norm += b * b;
    }
    error = norm > 0 ? sqrt(error / norm) : sqrt(error);
    fprintf(stderr, "%lld of %lld elements differ, %lld by more than a step of bf16, relative error %.3g\n",
            (long long)n_different, (long long)second->count, (long long)n_far, error);
    if (!strcmp(rule, "equal") || !strcmp(rule, "begins") || !strcmp(rule, "ends")) return n_different == 0;
    if (!strcmp(rule, "rounded")) return n_different * 100 <= second->count && n_far == 0;
    if (!strncmp(rule, "frobenius=", 10) || !strncmp(rule, "rows=", 5))
        return error <= strtod(strchr(rule, '=') + 1, NULL); /* false for NaN */
    stop("rule", rule);
    return 0;
}

int main(int argc, char **argv)
{
    if (argc != 6) stop("usage", "RULE FILE NAME OTHER_FILE OTHER_NAME");
    moe4_context *context;
    if (moe4_context_create(NULL, &context) != MOE4_OK) stop("context", "cannot be created");
    struct values first = values_read(context, argv[2], argv[3]), second = values_read(context, argv[4], argv[5]);
    if (!strncmp(argv[1], "rows=", 5)) {
        rows_sort(&first);
        rows_sort(&second);
    }
    struct values part = second;
    if ((!strcmp(argv[1], "begins") || !strcmp(argv[1], "ends")) && first.count < second.count) {
        part.count = first.count;
        if (argv[1][0] == 'e') part.numbers += second.count - first.count;
    }
    int good = first.count == part.count && first.count && matches(argv[1], &first, &part);
    if (!good) fprintf(stderr, "%s of %s does not match %s of %s (%s)\n", argv[3], argv[2], argv[5], argv[4], argv[1]);
    free(first.numbers);
    free(second.numbers);
    moe4_context_destroy(context);
    return !good;
}
