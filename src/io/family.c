#include "io/family.h"

#include <string.h>

#include "base/dims.h"
#include "io/show.h"
#include "io/tensors.h"

enum { LARGEST_DIMENSION = 1 << 20 };

static const struct family *const families[] = {&family_gpt_oss};
enum { N_FAMILIES = sizeof families / sizeof *families };

moe4_status family_find(const struct config *config, const struct family **family)
{
    const char *model_type;
    moe4_status status = config_string(config, "model_type", &model_type);
    if (status != MOE4_OK) return status;
    for (int i = 0; i < N_FAMILIES; i++) {
        *family = families[i];
        if (strcmp(families[i]->model_type, model_type) == 0) return MOE4_OK;
    }
    return config_fail(config, MOE4_EUNSUPPORTED, "model_type", "a family that is supported (\"%s\")",
                       family_gpt_oss.model_type);
}

moe4_status family_read_dimension(const struct config *config, const char *key, int64_t *value)
{
    moe4_status status = config_integer(config, key, BLOCK_SIZE, LARGEST_DIMENSION, value);
    if (status == MOE4_OK && *value % BLOCK_SIZE)
        status = config_fail(config, MOE4_EUNSUPPORTED, key, "a multiple of %d", BLOCK_SIZE);
    return status;
}

/* ---- Types and shapes -------------------------------------------------------------------------------------------- */

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

moe4_status family_find_tensor(moe4_context *context, const moe4_tensors *tensors, const char *name, const char *dtype,
                               int32_t rank, const int64_t *shape, const moe4_tensor **tensor)
{
    struct shown expected = show_type(dtype, rank, shape);
    *tensor = moe4_tensors_find(tensors, name);
    if (!*tensor) return fail_missing(context, tensors, name, expected);
    if (strcmp((*tensor)->dtype, dtype) != 0 || !has_shape(*tensor, rank, shape))
        return fail_type(context, *tensor, expected);
    return MOE4_OK;
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

moe4_status family_find_packed(moe4_context *context, const moe4_tensors *tensors, const char *name, int32_t part,
                               int32_t n_leading, const int64_t *leading, int64_t K, const moe4_tensor **tensor)
{
    int64_t usual[MOE4_TENSOR_MAX_RANK];
    memcpy(usual, leading, (size_t)n_leading * sizeof *leading);
    usual[n_leading] = K / BLOCK_SIZE;
    usual[n_leading + 1] = BLOCK_BYTES;
    struct shown expected = show_type("U8", part == PART_CODES ? n_leading + 2 : n_leading + 1, usual);
    *tensor = moe4_tensors_find(tensors, name);
    if (!*tensor) return fail_missing(context, tensors, name, expected);
    for (size_t i = 0; i < sizeof forms / sizeof *forms; i++)
        if (forms[i].part == part && strcmp(forms[i].dtype, (*tensor)->dtype) == 0 &&
            has_packed_shape(*tensor, n_leading, leading, K, forms[i].elements))
            return MOE4_OK;
    return fail_type(context, *tensor, expected);
}

void family_plan_stacked(struct plan *plan, int32_t index, int32_t matrix, int32_t part, const moe4_tensor *tensor)
{
    int64_t n_bytes = tensor->n_bytes / tensor->shape[0];
    plan->part_bytes[matrix][part] = n_bytes;
    for (int32_t l = 0; l < plan->n_local; l++)
        plan->slices[(int64_t)l * plan->family->n_slices + index] = (struct slice){
            .tensor = tensor,
            .first = (plan->first_expert + l) * n_bytes,
            .n_bytes = n_bytes,
            .matrix = matrix,
            .part = part,
        };
}
