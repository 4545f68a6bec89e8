#include "io/dtype.h"

#include <inttypes.h>
#include <string.h>

#include "base/checked.h"
#include "io/show.h"

static const struct dtype {
    const char *name;
    int bits; /* of an element; F4 is counted by elements, not by bytes that hold two */
} dtypes[] = {
    {"BF16", 16},   {"U8", 8},      {"F32", 32},        {"F16", 16},        {"I8", 8},   {"F8_E8M0", 8},
    {"F8_E4M3", 8}, {"F8_E5M2", 8}, {"F4", 4},          {"U32", 32},        {"I32", 32}, {"I64", 64},
    {"U64", 64},    {"F64", 64},    {"U16", 16},        {"I16", 16},        {"BOOL", 8}, {"C64", 64},
    {"F6_E2M3", 6}, {"F6_E3M2", 6}, {"F8_E4M3FNUZ", 8}, {"F8_E5M2FNUZ", 8},
};

static const struct dtype *lookup(const char *name)
{
    for (size_t i = 0; i < sizeof dtypes / sizeof *dtypes; i++)
        if (strcmp(dtypes[i].name, name) == 0) return &dtypes[i];
    return NULL;
}

const char *dtype_find(const char *name)
{
    const struct dtype *dtype = lookup(name);
    return dtype ? dtype->name : NULL;
}

moe4_status tensor_size(moe4_context *context, moe4_status refusal, const char *path, const moe4_tensor *tensor,
                        int64_t *n_bytes)
{
    int64_t size = 1;
    const char *reason = NULL;
    for (int32_t i = 0; i < tensor->rank && !reason; i++) {
        if (tensor->shape[i] < 0)
            reason = "has a negative dimension";
        else if (!i64_multiply(size, tensor->shape[i], &size))
            reason = "has more elements than 63 bits count";
    }
    if (!reason && !i64_multiply(size, lookup(tensor->dtype)->bits, &size)) reason = "is larger than 63 bits count";
    if (!reason && size % 8) reason = "does not fill whole bytes";
    if (!reason) {
        *n_bytes = size / 8;
        return MOE4_OK;
    }
    return context_fail(context, refusal, "%s: tensor \"%s\": %s %s", show_file(path).text,
                        show_name(tensor->name).text, show_type(tensor->dtype, tensor->rank, tensor->shape).text,
                        reason);
}
