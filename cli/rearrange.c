#include "rearrange.h"

#include <string.h>

#include "tensor.h"

struct row_place row_place(const moe4_layer_config *config, enum projection_role role)
{
    int64_t I = config->intermediate_size;
    if (role == ROLE_DOWN) return (struct row_place){0, 1, config->hidden_size};
    if (config->gate_up == MOE4_GATE_UP_INTERLEAVED) return (struct row_place){role == ROLE_UP, 2, I};
    int is_second = (role == ROLE_UP) == (config->gate_up == MOE4_GATE_UP_GATE_FIRST);
    return (struct row_place){is_second ? I : 0, 1, I};
}

const moe4_matrix *projection_matrix(const moe4_expert *expert, enum projection_role role)
{
    return role == ROLE_DOWN ? &expert->down : &expert->gate_up;
}

int64_t row_bytes(const moe4_matrix *matrix, enum matrix_part part, int64_t K)
{
    if (part == PART_BIAS) return (int64_t)dtype_bytes(matrix->bias_dtype);
    return part == PART_CODES ? K / 2 : K / 32;
}

static const char *part_base(const moe4_matrix *matrix, enum matrix_part part)
{
    const char *const bases[] = {(const char *)matrix->codes, (const char *)matrix->scales, matrix->bias};
    return bases[part];
}

static int64_t part_stride(const moe4_matrix *matrix, enum matrix_part part, int64_t K)
{
    const int64_t given[] = {matrix->codes_row_bytes, matrix->scales_row_bytes, 0};
    return given[part] ? given[part] : row_bytes(matrix, part, K);
}

const char *rows_in_place(const moe4_matrix *matrix, enum matrix_part part, int64_t K, struct row_place from,
                          int64_t to_step)
{
    int64_t stride = part_stride(matrix, part, K);
    if (from.step != to_step || stride != row_bytes(matrix, part, K)) return NULL;
    return part_base(matrix, part) + from.first * stride;
}

void rows_gather(const moe4_matrix *matrix, enum matrix_part part, int64_t K, struct row_place from, int64_t to_first,
                 int64_t to_step, char *to)
{
    const char *base = part_base(matrix, part);
    int64_t bytes = row_bytes(matrix, part, K), stride = part_stride(matrix, part, K);
    for (int64_t i = 0; i < from.count; ++i)
        memcpy(to + (to_first + i * to_step) * bytes, base + (from.first + i * from.step) * stride, (size_t)bytes);
}
