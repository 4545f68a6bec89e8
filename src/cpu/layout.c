#include "cpu/layout.h"

#include "base/convert.h"

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

int layout_pack_panel(pack_rows_fn *pack, const moe4_matrix *matrix, int64_t K, const struct row_order *order,
                      int64_t panel, uint8_t *packed, float *bias)
{
    const int64_t codes_stride = matrix->codes_row_bytes ? matrix->codes_row_bytes : K / 2;
    const int64_t scales_stride = matrix->scales_row_bytes ? matrix->scales_row_bytes : K / BLOCK_SIZE;
    struct panel_rows rows = {0};
    for (int32_t lane = 0; lane < PANEL_ROWS; lane++) {
        int64_t row = layout_source_row(order, panel, lane);
        bias[lane] = row < 0 || !matrix->bias ? 0.0f : load_f32(matrix->bias, matrix->bias_dtype, row);
        if (row < 0) continue;
        rows.codes[lane] = matrix->codes + row * codes_stride;
        rows.scales[lane] = matrix->scales + row * scales_stride;
    }
    return pack(&rows, K / BLOCK_SIZE, packed);
}
