/* The packing of pack.h.  Included by one file an instruction set, which names the function PACK_ROWS and defines
 *
 *   pack_subtile  64 bytes of each of 16 rows, which are GROUP_BLOCKS blocks, to the code lines of these blocks
 *   stream_line   64 aligned bytes to memory, past the caches if there is a way
 *   stream_end    after the last of them
 *   PACK_RUN      whole groups: blocks of 16 rows that are packed before those of the next 16
 *   PACK_AHEAD    bytes ahead of their use that a row's codes are asked for; the hardware foresees too little */
#include <string.h>

#include "base/mxfp4.h"

enum {
    SCALE_BLOCKS = 16, /* blocks whose scales are transposed together: 16 bytes of every row */
    UNIT_SCALE = 127
};

/* Where n blocks of a subtile's rows from block b on can be read as GROUP_BLOCKS: where they are, or copied to the
 * front of zeros. */
static inline void find_rows(const uint8_t *const rows[SUBTILE_ROWS], int64_t b, int64_t n,
                             uint8_t copies[SUBTILE_ROWS][LINE_BYTES], const uint8_t *codes[SUBTILE_ROWS])
{
    for (int i = 0; i < SUBTILE_ROWS; i++) {
        if (rows[i] && n == GROUP_BLOCKS) {
            codes[i] = rows[i] + b * BLOCK_BYTES;
            __builtin_prefetch(codes[i] + PACK_AHEAD, 0, 2);
            continue;
        }
        memset(copies[i], 0, LINE_BYTES);
        if (rows[i]) memcpy(copies[i], rows[i] + b * BLOCK_BYTES, (size_t)n * BLOCK_BYTES);
        codes[i] = copies[i];
    }
}

/* Which rows of a block, given its code lines, have nothing but zeros. */
static inline void find_zeros(const uint32_t lines[4][SUBTILE_ROWS], uint8_t is_zero[SUBTILE_ROWS])
{
    const uint32_t magnitudes = 0x77777777u;
    for (int row = 0; row < SUBTILE_ROWS; row++)
        is_zero[row] = ((lines[0][row] | lines[1][row] | lines[2][row] | lines[3][row]) & magnitudes) == 0;
}

/* Scale bytes of n blocks from block b on, n <= SCALE_BLOCKS, transposed: [SCALE_BLOCKS][PANEL_ROWS].  A perfect
 * shuffle of 16 vectors, four times, is a transposition. */
static void pack_scales(const struct panel_rows *rows, int64_t b, int64_t n, uint8_t out[SCALE_BLOCKS][PANEL_ROWS])
{
    typedef uint8_t bytes __attribute__((vector_size(SCALE_BLOCKS)));
    for (int32_t row = 0; row < PANEL_ROWS; row += SCALE_BLOCKS) {
        bytes v[SCALE_BLOCKS] = {0}, w[SCALE_BLOCKS];
        for (int i = 0; i < SCALE_BLOCKS; i++)
            if (rows->scales[row + i]) memcpy(&v[i], rows->scales[row + i] + b, (size_t)n);
        for (int round = 0; round < 4; round++) {
            for (int i = 0; i < SCALE_BLOCKS / 2; i++) {
                bytes x = v[i], y = v[i + SCALE_BLOCKS / 2];
                w[2 * i] = __builtin_shufflevector(x, y, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
                w[2 * i + 1] =
                    __builtin_shufflevector(x, y, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
            }
            memcpy(v, w, sizeof v);
        }
        for (int i = 0; i < SCALE_BLOCKS; i++) memcpy(&out[i][row], &v[i], sizeof v[i]);
    }
}

/* The scale line of a block, in place.  A block of zeros is zero under any scale but NaN: one scale byte for all of
 * them, so that what quantisers leave there (mostly 0) does not look extreme.  Returns whether a scale is one that the
 * fast kernels do not hold. */
static inline uint8_t finish_scales(uint8_t scales[PANEL_ROWS], const uint8_t is_zero[PANEL_ROWS])
{
    uint8_t is_extreme = 0;
    for (int row = 0; row < PANEL_ROWS; row++) {
        uint8_t scale = scales[row], replaced = (uint8_t) - (is_zero[row] & (scale != SCALE_NAN));
        scale = (uint8_t)((scale & ~replaced) | (UNIT_SCALE & replaced));
        scales[row] = scale;
        is_extreme |= (uint8_t)(scale - SCALE_FAST_MIN) > SCALE_FAST_MAX - SCALE_FAST_MIN;
    }
    return is_extreme;
}

/* The codes of n blocks from block b on, n <= GROUP_BLOCKS, of 16 rows from `row` on. */
static inline void pack_codes(const struct panel_rows *rows, int32_t row, int64_t b, int64_t n, uint8_t *packed,
                              uint8_t is_zero[][PANEL_ROWS])
{
    uint32_t lines[GROUP_BLOCKS][4][SUBTILE_ROWS] __attribute__((aligned(LINE_BYTES)));
    uint8_t copies[SUBTILE_ROWS][LINE_BYTES], *out = packed + CODES_OFFSET + row / SUBTILE_ROWS * SUBTILE_BYTES;
    const uint8_t *codes[SUBTILE_ROWS];
    find_rows(&rows->codes[row], b, n, copies, codes);
    pack_subtile(codes, lines);
    for (int i = 0; i < GROUP_BLOCKS; i++) find_zeros((const uint32_t(*)[SUBTILE_ROWS])lines[i], &is_zero[i][row]);
    for (int64_t i = 0; i < n; i++)
        for (int line = 0; line < 4; line++)
            stream_line(out + i * PANEL_BLOCK_BYTES + line * LINE_BYTES, lines[i][line]);
}

int PACK_ROWS(const struct panel_rows *rows, int64_t n_blocks, uint8_t *packed)
{
    uint8_t scales[SCALE_BLOCKS][PANEL_ROWS] __attribute__((aligned(LINE_BYTES)));
    uint8_t is_zero[PACK_RUN][PANEL_ROWS], is_extreme = 0;
    for (int64_t run = 0; run < n_blocks; run += PACK_RUN) {
        const int64_t end = n_blocks - run < PACK_RUN ? n_blocks : run + PACK_RUN;
        for (int32_t row = 0; row < PANEL_ROWS; row += SUBTILE_ROWS)
            for (int64_t b = run; b < end; b += GROUP_BLOCKS)
                pack_codes(rows, row, b, end - b < GROUP_BLOCKS ? end - b : GROUP_BLOCKS,
                           packed + b * PANEL_BLOCK_BYTES, is_zero + (b - run));
        for (int64_t b = run; b < end; b++) {
            const int64_t left = n_blocks - b;
            uint8_t *line = scales[b % SCALE_BLOCKS];
            if (b % SCALE_BLOCKS == 0) pack_scales(rows, b, left < SCALE_BLOCKS ? left : SCALE_BLOCKS, scales);
            is_extreme |= finish_scales(line, is_zero[b - run]);
            stream_line(packed + b * PANEL_BLOCK_BYTES, line);
        }
    }
    stream_end();
    return !is_extreme;
}
