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

/* Eight codes of a row, as the checkpoint has them, to the order of a lane: even k in the low half, odd in the high. */
static uint32_t split_pairs(uint32_t codes)
{
    uint32_t even = codes & 0x0F0F0F0Fu, odd = codes >> 4 & 0x0F0F0F0Fu;
    even = (even | even >> 4) & 0x00FF00FFu;
    odd = (odd | odd >> 4) & 0x00FF00FFu;
    even = (even | even >> 8) & 0xFFFFu;
    odd = (odd | odd >> 8) & 0xFFFFu;
    return even | odd << 16;
}

/* A block of zeros is zero under any scale but NaN: one byte for all of them, so that what quantisers leave there
 * (mostly 0) does not look extreme. */
static uint8_t canonical_scale(uint8_t scale, const uint8_t *codes)
{
    if (scale == SCALE_NAN) return scale;
    uint64_t words[2];
    memcpy(words, codes, sizeof words);
    return (words[0] | words[1]) & 0x7777777777777777u ? scale : 127;
}

static int pack_row(const uint8_t *codes, const uint8_t *scales, int64_t n_blocks, int32_t lane, uint8_t *packed)
{
    int is_fast = 1;
    uint8_t *out = packed + CODES_OFFSET + lane / SUBTILE_ROWS * SUBTILE_BYTES + lane % SUBTILE_ROWS * 4;
    for (int64_t b = 0; b < n_blocks; b++, out += PANEL_BLOCK_BYTES, packed += PANEL_BLOCK_BYTES) {
        const uint8_t *in = codes + b * BLOCK_BYTES;
        uint8_t scale = canonical_scale(scales[b], in);
        is_fast &= scale >= SCALE_FAST_MIN && scale <= SCALE_FAST_MAX;
        packed[lane] = (uint8_t)(SCALE_ORIGIN - scale);
        for (int line = 0; line < 4; line++) {
            uint32_t word;
            memcpy(&word, in + 4 * line, 4);
            word = split_pairs(word);
            memcpy(out + line * LINE_BYTES, &word, 4);
        }
    }
    return is_fast;
}

static void pack_padding_row(int64_t n_blocks, int32_t lane, uint8_t *packed)
{
    static const uint8_t zeros[BLOCK_BYTES];
    static const uint8_t scale = 127;
    for (int64_t b = 0; b < n_blocks; b++) pack_row(zeros, &scale, 1, lane, packed + b * PANEL_BLOCK_BYTES);
}

int layout_pack_panel(const moe4_matrix *matrix, int64_t K, const struct row_order *order, int64_t panel,
                      uint8_t *packed, float *bias)
{
    int is_fast = 1;
    int64_t codes_stride = matrix->codes_row_bytes ? matrix->codes_row_bytes : K / 2;
    int64_t scales_stride = matrix->scales_row_bytes ? matrix->scales_row_bytes : K / BLOCK_SIZE;
    for (int32_t lane = 0; lane < PANEL_ROWS; lane++) {
        int64_t row = layout_source_row(order, panel, lane);
        bias[lane] = row < 0 || !matrix->bias ? 0.0f : load_f32(matrix->bias, matrix->bias_dtype, row);
        if (row < 0)
            pack_padding_row(K / BLOCK_SIZE, lane, packed);
        else
            is_fast &= pack_row(matrix->codes + row * codes_stride, matrix->scales + row * scales_stride,
                                K / BLOCK_SIZE, lane, packed);
    }
    return is_fast;
}
