#include "cpu/layout.h"

#include <string.h>

#include "base/convert.h"
#include "base/mxfp4.h"

static int64_t gate_up_row(const struct row_order *order, int64_t i, int is_up)
{
    switch (order->gate_up) {
    case MOE4_GATE_UP_INTERLEAVED: return 2 * i + is_up;
    case MOE4_GATE_UP_GATE_FIRST: return is_up ? order->stored_rows + i : i;
    case MOE4_GATE_UP_UP_FIRST: return is_up ? i : order->stored_rows + i;
    default: return i;
    }
}

int64_t layout_source_row(const struct row_order *order, int64_t panel, int32_t lane)
{
    if (order->order == PANEL_GATED) {
        int32_t subtile = lane / SUBTILE_ROWS;
        int64_t i = panel * GATED_PANEL_COLUMNS + subtile / 2 * SUBTILE_ROWS + lane % SUBTILE_ROWS;
        return gate_up_row(order, i, subtile % 2);
    }
    int64_t row = panel * PANEL_ROWS + lane;
    return row < order->rows ? row : -1;
}

/* Sixteen codes of a row, as the checkpoint has them, to the order of two lanes: even k in the low half, odd in the
 * high. */
static uint64_t split_pairs(uint64_t codes)
{
    uint64_t even = codes & 0x0F0F0F0F0F0F0F0Fu, odd = codes >> 4 & 0x0F0F0F0F0F0F0F0Fu;
    even = (even | even >> 4) & 0x00FF00FF00FF00FFu;
    odd = (odd | odd >> 4) & 0x00FF00FF00FF00FFu;
    even = (even | even >> 8) & 0x0000FFFF0000FFFFu;
    odd = (odd | odd >> 8) & 0x0000FFFF0000FFFFu;
    return even | odd << 16;
}

/* One block of one row.  A block of zeros is zero under any scale but NaN: one scale byte for all of them, so that what
 * quantisers leave there (mostly 0) does not look extreme.  Returns whether the fast kernels hold the scale. */
static int pack_block(const uint8_t *codes, uint8_t scale, int32_t lane, uint8_t *packed)
{
    const uint64_t magnitudes = 0x7777777777777777u;
    uint8_t *out = packed + CODES_OFFSET + lane / SUBTILE_ROWS * SUBTILE_BYTES + lane % SUBTILE_ROWS * 4;
    uint64_t low, high;
    memcpy(&low, codes, 8);
    memcpy(&high, codes + 8, 8);
    if (((low | high) & magnitudes) == 0 && scale != SCALE_NAN) scale = 127;
    packed[lane] = scale;
    low = split_pairs(low);
    high = split_pairs(high);
    const uint32_t lines[4] = {(uint32_t)low, (uint32_t)(low >> 32), (uint32_t)high, (uint32_t)(high >> 32)};
    for (int i = 0; i < 4; i++) memcpy(out + i * LINE_BYTES, &lines[i], 4);
    return scale >= SCALE_FAST_MIN && scale <= SCALE_FAST_MAX;
}

int layout_pack_panel(const moe4_matrix *matrix, int64_t K, const struct row_order *order, int64_t panel,
                      uint8_t *packed, float *bias)
{
    static const uint8_t zeros[BLOCK_BYTES];
    const int64_t codes_stride = matrix->codes_row_bytes ? matrix->codes_row_bytes : K / 2;
    const int64_t scales_stride = matrix->scales_row_bytes ? matrix->scales_row_bytes : K / BLOCK_SIZE;
    int64_t rows[PANEL_ROWS];
    for (int32_t lane = 0; lane < PANEL_ROWS; lane++) {
        rows[lane] = layout_source_row(order, panel, lane);
        bias[lane] = rows[lane] < 0 || !matrix->bias ? 0.0f : load_f32(matrix->bias, matrix->bias_dtype, rows[lane]);
    }
    int is_fast = 1;
    for (int64_t b = 0; b < K / BLOCK_SIZE; b++, packed += PANEL_BLOCK_BYTES)
        for (int32_t lane = 0; lane < PANEL_ROWS; lane++) {
            int64_t row = rows[lane];
            const uint8_t *codes = row < 0 ? zeros : matrix->codes + row * codes_stride + b * BLOCK_BYTES;
            is_fast &= pack_block(codes, row < 0 ? 0 : matrix->scales[row * scales_stride + b], lane, packed);
        }
    return is_fast;
}
