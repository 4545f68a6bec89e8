#include "witness.h"

#include <setjmp.h>
#include <stdarg.h> /* for cmocka.h, as the next two */
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "cpu/activation.h"
#include "cpu/route.h"

golden_file *witness_open(const char *name)
{
    char path[256];
    snprintf(path, sizeof path, "witness/%s.safetensors", name);
    golden_file *file = golden_file_open(path);
    if (!golden_metadata(file, "witness")) fail_msg("%s names no witness", path);
    return file;
}

int32_t witness_integer(const golden_file *file, const char *key)
{
    const char *text = golden_metadata(file, key);
    return text ? (int32_t)strtol(text, NULL, 10) : 0;
}

float witness_number(const golden_file *file, const char *key)
{
    const char *text = golden_metadata(file, key);
    return text ? strtof(text, NULL) : 0.0f;
}

int witness_says(const golden_file *file, const char *key, const char *word)
{
    const char *text = golden_metadata(file, key);
    return text && strcmp(text, word) == 0;
}

moe4_routing_method witness_method(const golden_file *file)
{
    for (int m = MOE4_ROUTING_DEFAULT; m <= MOE4_ROUTING_HASH; m++)
        if (witness_says(file, "method", route_method_name((moe4_routing_method)m))) return (moe4_routing_method)m;
    return MOE4_ROUTING_NONE;
}

moe4_activation witness_activation(const golden_file *file)
{
    for (int a = MOE4_ACTIVATION_SILU; a <= MOE4_ACTIVATION_IDENTITY; a++)
        if (witness_says(file, "activation", activation_name((moe4_activation)a))) return (moe4_activation)a;
    return MOE4_ACTIVATION_NONE;
}

void witness_set_bias(moe4_routing *routing, const golden_tensor *bias)
{
    routing->correction_bias = bias->data;
    routing->correction_bias_dtype = MOE4_DTYPE_F32;
}

void witness_set_table(moe4_routing *routing, const golden_tensor *table)
{
    routing->hash_table = table->data;
    routing->hash_table_dtype = MOE4_DTYPE_I32;
    routing->vocab_size = table->shape[0];
}

moe4_routing witness_routing(const golden_file *file)
{
    moe4_routing routing = MOE4_ROUTING_INIT;
    const golden_tensor *bias = golden_look(file, "correction_bias"), *table = golden_look(file, "hash_table");
    routing.method = witness_method(file);
    routing.top_k = witness_integer(file, "top_k");
    routing.n_group = witness_integer(file, "n_group");
    routing.topk_group = witness_integer(file, "topk_group");
    routing.scaling_factor = witness_number(file, "scaling_factor");
    routing.renormalize = witness_says(file, "renormalize", "no") ? MOE4_RENORMALIZE_NO : MOE4_RENORMALIZE_DEFAULT;
    if (bias) witness_set_bias(&routing, bias);
    if (table) witness_set_table(&routing, table);
    return routing;
}
