#include "cpu/tame.h"

#include "base/convert.h"

float tame_row(uint16_t *packed, int32_t n_rows, int32_t run, int32_t row, int64_t K, uint16_t largest)
{
    if (!tame_is_wild(largest)) return 1.0f;
    const float factor = largest >= HUGE_BF16 ? 0x1p-16f : 0x1p64f;
    for (int64_t k = 0; k < K; k += run) {
        uint16_t *x = packed + k * n_rows + row * run;
        for (int32_t i = 0; i < run; i++) x[i] = bf16_from_f32(bf16_to_f32(x[i]) * factor);
    }
    return 1.0f / factor;
}

uint16_t tame_largest(const uint16_t *packed, int32_t n_rows, int32_t run, int32_t row, int64_t K)
{
    uint16_t largest = 0;
    for (int64_t k = 0; k < K; k += run) {
        const uint16_t *x = packed + k * n_rows + row * run;
        for (int32_t i = 0; i < run; i++)
            if ((x[i] & 0x7FFFu) > largest) largest = x[i] & 0x7FFFu;
    }
    return largest;
}
