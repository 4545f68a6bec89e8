#include "supports.h"

#include <string.h>

#include "backend.h"
#include "base/dims.h"
#include "base/dtype.h"
#include "layer.h"

enum { MAX_STRUCT_BYTES = 4096 };

int is_struct_size(size_t size)
{
    return size >= sizeof size && size <= MAX_STRUCT_BYTES;
}

void fill_struct(void *taken, const void *made, size_t known)
{
    size_t size;
    memcpy(&size, taken, sizeof size);
    memcpy((char *)taken + sizeof size, (const char *)made + sizeof size, (size < known ? size : known) - sizeof size);
}

moe4_status adopt_struct(struct moe4_context *context, const char *name, const void *given, void *copy, size_t known)
{
    size_t size;
    if (!given) return context_fail(context, MOE4_EINVAL, "%s is NULL", name);
    memcpy(&size, given, sizeof size);
    if (!is_struct_size(size))
        return context_fail(context, MOE4_EINVAL, "%s.size is %zu, expected %zu: set it with its INIT macro", name,
                            size, known);
    memset(copy, 0, known);
    memcpy(copy, given, size < known ? size : known);
    for (size_t i = known; i < size; i++)
        if (((const char *)given)[i])
            return context_fail(context, MOE4_EUNSUPPORTED, "%s uses a field that this version (%s) does not know",
                                name, moe4_version());
    memcpy(copy, &known, sizeof known);
    return MOE4_OK;
}

moe4_status read_token_count(struct moe4_context *context, int64_t n_tokens, const int32_t *on_device, int64_t *T)
{
    *T = n_tokens;
    if (n_tokens < 0)
        return context_fail(context, MOE4_EINVAL, "n_tokens is %lld, expected 0 or more", (long long)n_tokens);
    if (!on_device || context->backend != &backend_cpu) return MOE4_OK;
    if (*on_device < 0 || *on_device > n_tokens)
        return context_fail(context, MOE4_EINVAL, "*n_tokens_device is %d, expected 0 to n_tokens %lld", *on_device,
                            (long long)n_tokens);
    *T = *on_device;
    return MOE4_OK;
}

moe4_status require_cpu(struct moe4_context *context, const char *what)
{
    if (context->backend == &backend_cpu) return MOE4_OK;
    return context_fail(context, MOE4_EUNSUPPORTED, "%s works on a cpu context only, and this is one of %s", what,
                        context->device_name);
}

static moe4_status refuse_dtype(struct moe4_context *context, const char *name, moe4_dtype dtype, const char *expected)
{
    return context_fail(context, MOE4_EINVAL, "%s is %s, expected %s", name, dtype_name(dtype), expected);
}

static moe4_status supports_compute(struct moe4_context *context, const moe4_query *query)
{
    int quantised = query->x_dtype == MOE4_DTYPE_F8_E4M3;
    switch (query->compute) {
    case MOE4_COMPUTE_BF16:
        if (quantised) return refuse_dtype(context, "x_dtype", query->x_dtype, "bf16, f16 or f32 in bf16 compute");
        break;
    case MOE4_COMPUTE_INT8:
        if (quantised) return refuse_dtype(context, "x_dtype", query->x_dtype, "bf16, f16 or f32 in int8 compute");
        break;
    case MOE4_COMPUTE_MXFP8:
    case MOE4_COMPUTE_FP8: break;
    default:
        return context_fail(context, MOE4_EINVAL, "compute is %d, expected bf16, mxfp8, fp8 or int8", query->compute);
    }
    if (query->x_dtype && !quantised && !dtype_is_float(query->x_dtype))
        return refuse_dtype(context, "x_dtype", query->x_dtype, "bf16, f16, f32 or f8_e4m3");
    return MOE4_OK;
}

static moe4_status supports_topk(struct moe4_context *context, const moe4_query *query)
{
    if (query->topk_format == MOE4_TOPK_PACKED) {
        if (query->weights_dtype != MOE4_DTYPE_BF16)
            return refuse_dtype(context, "weights_dtype", query->weights_dtype, "bf16 in packed form");
    } else if (query->topk_format != MOE4_TOPK_UNPACKED) {
        return context_fail(context, MOE4_EINVAL, "topk.format is %d, expected unpacked or packed", query->topk_format);
    } else if (query->weights_dtype != MOE4_DTYPE_F32 && query->weights_dtype != MOE4_DTYPE_BF16) {
        return refuse_dtype(context, "weights_dtype", query->weights_dtype, "f32 or bf16");
    }
    if (query->weight_use == MOE4_WEIGHT_ON_OUTPUT) return MOE4_OK;
    if (query->weight_use != MOE4_WEIGHT_ON_INPUT)
        return context_fail(context, MOE4_EINVAL, "weight_use is %d, expected on output or on input",
                            query->weight_use);
    if (query->top_k > 1)
        return context_fail(context, MOE4_EUNSUPPORTED,
                            "router weights on the input need one expert a token, but top_k is %d", query->top_k);
    if (query->x_dtype == MOE4_DTYPE_F8_E4M3)
        return context_fail(context, MOE4_EUNSUPPORTED, "router weights on the input need x unquantised, but it is %s",
                            dtype_name(query->x_dtype));
    return MOE4_OK;
}

moe4_status supports_call(struct moe4_context *context, const moe4_query *query)
{
    moe4_status status = supports_compute(context, query);
    if (status) return status;
    if (query->y_dtype && !dtype_is_float(query->y_dtype))
        return refuse_dtype(context, "y_dtype", query->y_dtype, "bf16, f16 or f32");
    if (query->write != MOE4_WRITE_OVERWRITE && query->write != MOE4_WRITE_ADD)
        return context_fail(context, MOE4_EINVAL, "write is %d, expected overwrite or add", query->write);
    if (query->logits_dtype && !dtype_is_float(query->logits_dtype))
        return refuse_dtype(context, "logits dtype", query->logits_dtype, "f32, bf16 or f16");
    if (query->logits_dtype && query->weights_dtype)
        return context_fail(context, MOE4_EINVAL, "both logits and ids with weights are given, expected one of them");
    if (query->weights_dtype && (status = supports_topk(context, query))) return status;
    if (query->n_tokens < 0)
        return context_fail(context, MOE4_EINVAL, "n_tokens is %lld, expected 0 or more", (long long)query->n_tokens);
    return context->backend->supports(context, query);
}

static moe4_status supports_parallel(struct moe4_context *context, const moe4_query *query)
{
    const moe4_parallel *parallel = &query->parallel;
    if (parallel->tensor_size < 0 || parallel->expert_size < 0 || parallel->data_size < 0 ||
        parallel->context_size < 0 || parallel->sequence_size < 0)
        return context_fail(
            context, MOE4_EINVAL,
            "parallel sizes are %d, %d, %d, %d, %d (tensor, expert, data, context, sequence), expected 0 or more",
            parallel->tensor_size, parallel->expert_size, parallel->data_size, parallel->context_size,
            parallel->sequence_size);
    if (parallel->expert_size > 1 && parallel->data_size > 1)
        return context_fail(context, MOE4_EUNSUPPORTED,
                            "expert parallel over %d with data parallel over %d needs tokens to be dispatched first",
                            parallel->expert_size, parallel->data_size);
    return MOE4_OK;
}

moe4_status supports_query(struct moe4_context *context, const moe4_query *given)
{
    moe4_layer_config config;
    moe4_query resolved = *given;
    const moe4_query *query = &resolved;
    moe4_status status = adopt_struct(context, "config", given->config, &config, sizeof config);
    if (!status) status = layer_validate(context, &config);
    resolved.config = &config;
    if (!status && !given->top_k) resolved.top_k = config.routing.top_k;
    if (!status) status = supports_call(context, query);
    if (!status) status = supports_parallel(context, query);
    if (status) return status;
    int32_t largest = config.n_experts < MAX_TOP_K ? config.n_experts : MAX_TOP_K;
    if (query->weights_dtype && query->top_k && (query->top_k < 0 || query->top_k > largest))
        return context_fail(context, MOE4_EINVAL, "top_k is %d, expected 1 to %d", query->top_k, largest);
    if (!query->weights_dtype && query->logits_dtype && config.routing.method == MOE4_ROUTING_NONE)
        return context_fail(context, MOE4_EINVAL, "logits are given, but routing.method is none");
    return MOE4_OK;
}
