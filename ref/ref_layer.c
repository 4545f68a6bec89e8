/* Experts, the sum over slots, and whole tokens. */
#include <math.h>
#include <stdlib.h>

#include "ref_internal.h"

static void expert_intermediate(const moe4_layer_config *config, const moe4_expert *expert, int32_t l, const double *x,
                                int64_t n, double *v)
{
    ref_columns columns = ref_columns_create(config, expert, x, n);
    for (int64_t i = 0; i < config->intermediate_size; i++) {
        ref_columns_compute(&columns, i);
        for (int64_t j = 0; j < n; j++)
            v[j * config->intermediate_size + i] =
                ref_activation(config, l, columns.gate[j].value, columns.up[j].value);
    }
    ref_columns_destroy(&columns);
}

/* bf16 of the f32 that an exact implementation would have. */
static void round_stage(double *values, int64_t count)
{
    for (int64_t i = 0; i < count; i++) values[i] = ref_round_bf16(ref_round_f32(values[i]));
}

void ref_expert(const moe4_layer_config *config, const moe4_expert *expert, int32_t l, const double *x, int64_t n,
                ref_mode mode, double *intermediate, double *rows)
{
    int64_t I = config->intermediate_size, output_size = ref_output_size(config);
    double *own = intermediate ? NULL : ref_allocate(n * I, sizeof *own), *v = own ? own : intermediate;
    expert_intermediate(config, expert, l, x, n, v);
    if (mode != REF_MODE_UNROUNDED) round_stage(v, n * I);
    for (int64_t j = 0; j < n; j++) ref_requantize(mode, v + j * I, I);
    ref_gemm(&expert->down, output_size, I, v, n, rows, NULL);
    if (mode != REF_MODE_UNROUNDED) round_stage(rows, n * output_size);
    free(own);
}

void ref_combine(int64_t output_size, int32_t top_k, const uint16_t *const *rows, const float *weights, float *out_f32)
{
    for (int64_t h = 0; h < output_size; h++) {
        float acc = 0;
        for (int32_t a = 0; a < top_k; a++)
            if (rows[a]) acc = fmaf(weights[a], (float)ref_bf16(rows[a][h]), acc);
        out_f32[h] = acc;
    }
}

double ref_output(float acc, moe4_write write, double before, moe4_dtype dtype)
{
    double sum = write == MOE4_WRITE_ADD ? ref_round_f32(before + acc) : acc;
    return dtype == MOE4_DTYPE_BF16 ? ref_round_bf16(sum) : dtype == MOE4_DTYPE_F16 ? ref_round_f16(sum) : sum;
}

void ref_token(const moe4_layer_config *config, const moe4_expert *const *experts, const int32_t *locals, int32_t top_k,
               const double *weights, const double *x, ref_mode mode, double *out)
{
    int64_t output_size = ref_output_size(config);
    double *row = ref_allocate(output_size, sizeof *row);
    for (int64_t h = 0; h < output_size; h++) out[h] = 0;
    for (int32_t a = 0; a < top_k; a++) {
        if (!experts[a]) continue;
        ref_expert(config, experts[a], locals[a], x, 1, mode, NULL, row);
        for (int64_t h = 0; h < output_size; h++)
            out[h] = mode == REF_MODE_UNROUNDED ? out[h] + weights[a] * row[h]
                                                : fmaf((float)weights[a], (float)row[h], (float)out[h]);
    }
    free(row);
}
