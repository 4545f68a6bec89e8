#include "words.h"

#include <stddef.h>

const char *const isa_words[] = {"auto", "c",    "avx2",      "avx512", "avx512_vnni", "avx512_bf16",
                                 "amx",  "neon", "neon_bf16", "sm_80",  "sm_90a",      NULL};
const char *const compute_words[] = {"bf16", "mxfp8", "fp8", "int8", NULL};
const char *const routing_words[] = {"default",       "renormalize",    "deepseek_v3", "llama4",  "renormalize_naive",
                                     "topk",          "sigmoid_renorm", "minimax2",    "sigmoid", "topk_sigmoid",
                                     "sqrt_softplus", "hash",           NULL};

const char *const backend_words[] = {"cpu", "cuda", NULL};
const char *const weight_words[] = {"output", "input", NULL};
const char *const output_words[] = {"bf16", "f16", "f32", NULL};

moe4_dtype output_dtype(int index)
{
    static const moe4_dtype dtypes[] = {MOE4_DTYPE_BF16, MOE4_DTYPE_F16, MOE4_DTYPE_F32};
    return dtypes[index];
}

const char *routing_word(moe4_routing_method method)
{
    return method == MOE4_ROUTING_NONE ? "none" : routing_words[method - 1];
}

const char *activation_word(moe4_activation activation)
{
    static const char *const names[] = {"none",       "silu",        "swiglu_oai", "situ",    "geglu",
                                        "geglu_tanh", "swiglu_step", "relu2",      "identity"};
    return names[activation];
}

const char *gate_up_word(moe4_gate_up order)
{
    static const char *const names[] = {"no gate", "interleaved", "gate first", "up first"};
    return names[order];
}
