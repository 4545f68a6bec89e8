/* Finding a tensor that must be of a certain type and shape. */
#include <string.h>

#include "base/dims.h"
#include "io/family.h"
#include "io/show.h"
#include "io/tensors.h"

static moe4_status fail_missing(moe4_context *context, const moe4_tensors *tensors, const char *name,
                                struct shown expected)
{
    return context_fail(context, MOE4_EFORMAT, "%s: tensor \"%s\" is missing, expected %s",
                        show_file(tensors->path).text, show_name(name).text, expected.text);
}

static moe4_status fail_type(moe4_context *context, const moe4_tensor *tensor, struct shown expected)
{
    return context_fail(context, MOE4_EFORMAT, "%s: tensor \"%s\" is %s, expected %s", show_file(tensor->file).text,
                        show_name(tensor->name).text, show_type(tensor->dtype, tensor->rank, tensor->shape).text,
                        expected.text);
}

static int has_shape(const moe4_tensor *tensor, int32_t rank, const int64_t *shape)
{
    return tensor->rank == rank && memcmp(tensor->shape, shape, (size_t)rank * sizeof *shape) == 0;
}

moe4_status find_exact(moe4_context *context, const moe4_tensors *tensors, const char *name, const char *dtype,
                       int32_t rank, const int64_t *shape, const moe4_tensor **tensor)
{
    struct shown expected = show_type(dtype, rank, shape);
    *tensor = moe4_tensors_find(tensors, name);
    if (!*tensor) return fail_missing(context, tensors, name, expected);
    if (strcmp((*tensor)->dtype, dtype) != 0 || !has_shape(*tensor, rank, shape))
        return fail_type(context, *tensor, expected);
    return MOE4_OK;
}

static moe4_dtype float_of(const char *dtype)
{
    static const struct {
        const char *name;
        moe4_dtype dtype;
    } floats[] = {{"BF16", MOE4_DTYPE_BF16}, {"F32", MOE4_DTYPE_F32}, {"F16", MOE4_DTYPE_F16}};
    for (size_t i = 0; i < sizeof floats / sizeof *floats; i++)
        if (strcmp(floats[i].name, dtype) == 0) return floats[i].dtype;
    return MOE4_DTYPE_NONE;
}

moe4_status find_float(moe4_context *context, const moe4_tensors *tensors, const char *name, int32_t rank,
                       const int64_t *shape, const moe4_tensor **tensor, moe4_dtype *dtype)
{
    struct shown expected = show_type("BF16", rank, shape);
    *tensor = moe4_tensors_find(tensors, name);
    if (!*tensor) return fail_missing(context, tensors, name, expected);
    *dtype = float_of((*tensor)->dtype);
    if (*dtype && has_shape(*tensor, rank, shape)) return MOE4_OK;
    return fail_type(context, *tensor, *dtype ? expected : show_type("BF16, F16 or F32", rank, shape));
}

/* The same bytes by several names: how many consecutive elements of a row one element of the tensor holds. */
static const struct form {
    int32_t part;
    const char *dtype;
    int64_t elements;
} forms[] = {
    {PART_CODES, "U8", 2},   {PART_CODES, "I8", 2},   {PART_CODES, "U32", 8},       {PART_CODES, "F4", 1},
    {PART_SCALES, "U8", 32}, {PART_SCALES, "I8", 32}, {PART_SCALES, "F8_E8M0", 32},
};
enum { N_FORMS = sizeof forms / sizeof *forms };

int is_code_dtype(const char *dtype)
{
    for (int i = 0; i < N_FORMS; i++)
        if (forms[i].part == PART_CODES && strcmp(forms[i].dtype, dtype) == 0) return 1;
    return 0;
}

/* Whether behind the leading dimensions come K elements: in one dimension, or in blocks of 32. */
static int has_packed_shape(const moe4_tensor *tensor, int32_t n_leading, const int64_t *leading, int64_t K,
                            int64_t elements)
{
    if (memcmp(tensor->shape, leading, (size_t)n_leading * sizeof *leading) != 0) return 0;
    const int64_t *rest = tensor->shape + n_leading;
    switch (tensor->rank - n_leading) {
    case 1: return rest[0] == K / elements;
    case 2: return rest[0] == K / BLOCK_SIZE && rest[1] == BLOCK_SIZE / elements && elements < BLOCK_SIZE;
    default: return 0;
    }
}

moe4_status find_packed(moe4_context *context, const moe4_tensors *tensors, const char *name, int32_t part,
                        int32_t n_leading, const int64_t *leading, int64_t K, const moe4_tensor **tensor)
{
    int64_t usual[MOE4_TENSOR_MAX_RANK];
    memcpy(usual, leading, (size_t)n_leading * sizeof *leading);
    usual[n_leading] = K / BLOCK_SIZE;
    usual[n_leading + 1] = BLOCK_BYTES;
    *tensor = moe4_tensors_find(tensors, name);
    if (*tensor)
        for (int i = 0; i < N_FORMS; i++)
            if (forms[i].part == part && strcmp(forms[i].dtype, (*tensor)->dtype) == 0 &&
                has_packed_shape(*tensor, n_leading, leading, K, forms[i].elements))
                return MOE4_OK;
    struct shown expected = show_type("U8", part == PART_CODES ? n_leading + 2 : n_leading + 1, usual);
    return *tensor ? fail_type(context, *tensor, expected) : fail_missing(context, tensors, name, expected);
}
