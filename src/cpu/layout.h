/* How a prepared layer keeps an expert's weights: one layout for every kernel.
 *
 * A matrix [rows, K] is cut into PANELS of 64 rows; a panel is one run of K/32 BLOCKS, each 17 cache lines:
 *
 *   line 0       64 E8M0 scale bytes, one a row
 *   line 1..4    codes of rows  0..15    line 1 holds k = 0..7 of the block, line 2 k = 8..15, ...
 *   line 5..8    codes of rows 16..31
 *   line 9..12   codes of rows 32..47
 *   line 13..16  codes of rows 48..63
 *
 * A code line is 16 lanes of 32 bits, one a row.  A lane's 8 codes lie so that shifting the lane right by 4j brings the
 * pair (k = 2j, 2j+1) into the lowest 4 bits of its two 16-bit words, where vpermw looks them up as a pair of bf16:
 *
 *   bits 31..28 27..24 23..20 19..16 | 15..12 11..8  7..4   3..0
 *        k=7    k=5    k=3    k=1    | k=6    k=4    k=2    k=0
 *
 * The fast kernels add up a block with unscaled weights and multiply the sum by its scale, in f32, or look up weights
 * with their scales.  That is exact for E8M0 bytes 2..240; experts with others (but for blocks of zeros, whose scale
 * is immaterial) take the exact kernel.
 *
 * A gated gate/up matrix: panel p holds gate and up rows of i = 32p .. 32p+31, in rows 0..15 gates of the first 16 i,
 * 16..31 their ups, 32..47 gates of the second 16, 48..63 their ups.  Every other matrix: row r is panel r/64, row
 * r%64, and rows past the end are zeros.
 *
 * Activations are packed by token tiles of up to 12 or 96 rows: [K/run][rows of the tile][run] bf16, where a run is a
 * pair, or for kernels that like that a whole block. */
#ifndef MOE4_CPU_LAYOUT_H
#define MOE4_CPU_LAYOUT_H

#include <stdint.h>

#include "base/dims.h"
#include "moe4/moe4.h"

enum {
    PANEL_ROWS = 64,
    SUBTILE_ROWS = 16, /* lanes of a code line */
    LINE_BYTES = 64,
    CODES_OFFSET = LINE_BYTES, /* of the first code line in a block */
    SUBTILE_BYTES = 4 * LINE_BYTES,
    PANEL_BLOCK_BYTES = 17 * LINE_BYTES,
    GATED_PANEL_COLUMNS = 32, /* columns of I that a gated panel yields */
    TILE_TOKENS = 12,         /* routed rows of a token tile, at most, */
    LARGE_TILE_TOKENS = 96,   /* or that many, if the kernel likes that */
    PAIR = 2,                 /* k of a run */
    SCALE_FAST_MIN = 2,  /* E8M0 bytes under which each code is a normal bf16, and none overflows, nor the sum of */
    SCALE_FAST_MAX = 240 /* a block of codes times int8 */
};

/* The three places where a panel's rows come from. */
enum panel_order { PANEL_GATED, PANEL_PLAIN };

/* What it takes to find row `lane` of panel p in a checkpoint matrix. */
struct row_order {
    enum panel_order order;
    moe4_gate_up gate_up;
    int64_t rows;        /* PLAIN: of the matrix; GATED: I */
    int64_t stored_rows; /* GATED: rows of one stored half */
};

static inline int64_t panel_count(const struct row_order *order)
{
    int64_t rows_a_panel = order->order == PANEL_GATED ? GATED_PANEL_COLUMNS : PANEL_ROWS;
    return (order->rows + rows_a_panel - 1) / rows_a_panel;
}

/* The matrix row behind row `lane` of a panel; -1 where the panel is padding. */
int64_t layout_source_row(const struct row_order *order, int64_t panel, int32_t lane);

/* Where the rows of a panel lie.  NULL = padding, zeros; that comes in whole subtiles. */
struct panel_rows {
    const uint8_t *codes[PANEL_ROWS];  /* 16 bytes a block */
    const uint8_t *scales[PANEL_ROWS]; /* 1 byte a block */
};

/* Packs n_blocks blocks of a panel (kernels/pack.h); packed is 64-byte aligned and will not be read soon.
 * Returns 1 when every scale is one that the fast kernels hold exactly, else 0. */
typedef int pack_rows_fn(const struct panel_rows *rows, int64_t n_blocks, uint8_t *packed);

/* Packs a panel of an MXFP4 matrix [.., K] and its biases (64 floats, 0 where there is none).
 * Returns what `pack` returns. */
int layout_pack_panel(pack_rows_fn *pack, const moe4_matrix *matrix, int64_t K, const struct row_order *order,
                      int64_t panel, uint8_t *packed, float *bias);

/* E8M0 byte of row `row` in a packed block. */
static inline uint8_t layout_scale(const uint8_t *block, int32_t row)
{
    return block[row];
}

/* Code of element k (0..31) of row `row` in a packed block. */
static inline unsigned layout_code(const uint8_t *block, int32_t row, int32_t k)
{
    const uint8_t *lane = block + CODES_OFFSET + row / SUBTILE_ROWS * SUBTILE_BYTES + k / 8 * LINE_BYTES +
                          row % SUBTILE_ROWS * 4 + (k & 1) * 2;
    return (lane[k % 8 / 4] >> (k % 4 / 2 * 4)) & 15u;
}

#endif
