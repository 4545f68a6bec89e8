/* The tile intrinsics of AMX in plain C, as Intel documents the instructions: LDTILECFG, TILERELEASE, TILEZERO,
 * TILELOADD, TILESTORED and TDPBF16PS.  Whatever the processor would refuse fails the running cmocka test.
 *
 * Include this before a file that uses them: it gets these instead of the compiler's. */
#ifndef MOE4_TEST_AMX_TILES_H
#define MOE4_TEST_AMX_TILES_H

#include <immintrin.h>
#include <setjmp.h>
#include <stdarg.h> /* for cmocka.h, as the one before */
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

enum { N_TILES = 8, TILE_ROWS = 16, TILE_ROW_BYTES = 64 };

static _Thread_local struct tiles {
    int is_configured;
    int rows[N_TILES], row_bytes[N_TILES];
    uint8_t data[N_TILES][TILE_ROWS][TILE_ROW_BYTES];
} tiles;

static inline void tiles_configure(const void *memory)
{
    uint8_t bytes[64];
    memcpy(bytes, memory, sizeof bytes);
    if (bytes[0] != 1) fail_msg("palette %d", bytes[0]);
    for (int i = 1; i < 16; i++) assert_int_equal(bytes[i], 0);  /* start row and reserved */
    for (int i = 32; i < 48; i++) assert_int_equal(bytes[i], 0); /* tiles that palette 1 does not have */
    for (int i = 56; i < 64; i++) assert_int_equal(bytes[i], 0);
    memset(&tiles, 0xFF, sizeof tiles); /* data becomes zeros; NaN here, lest somebody counts on it */
    for (int tile = 0; tile < N_TILES; tile++) {
        int row_bytes = bytes[16 + 2 * tile] | bytes[17 + 2 * tile] << 8, rows = bytes[48 + tile];
        if (rows > TILE_ROWS || row_bytes > TILE_ROW_BYTES || !rows != !row_bytes)
            fail_msg("tile %d: %d rows of %d bytes", tile, rows, row_bytes);
        tiles.rows[tile] = rows;
        tiles.row_bytes[tile] = row_bytes;
    }
    tiles.is_configured = 1;
}

static inline void tiles_release(void)
{
    memset(&tiles, 0, sizeof tiles);
}

static inline void tile_check(int tile)
{
    if (!tiles.is_configured || !tiles.rows[tile]) fail_msg("tile %d is not configured", tile);
}

static inline void tile_zero(int tile)
{
    tile_check(tile);
    memset(tiles.data[tile], 0, sizeof tiles.data[tile]);
}

static inline void tile_load(int tile, const void *base, int64_t stride)
{
    tile_check(tile);
    memset(tiles.data[tile], 0, sizeof tiles.data[tile]);
    for (int row = 0; row < tiles.rows[tile]; row++)
        memcpy(tiles.data[tile][row], (const char *)base + row * stride, (size_t)tiles.row_bytes[tile]);
}

static inline void tile_store(int tile, void *base, int64_t stride)
{
    tile_check(tile);
    for (int row = 0; row < tiles.rows[tile]; row++)
        memcpy((char *)base + row * stride, tiles.data[tile][row], (size_t)tiles.row_bytes[tile]);
}

static inline float tile_flush(float value)
{
    return fpclassify(value) == FP_SUBNORMAL ? copysignf(0, value) : value;
}

/* An element of a row of bf16, subnormals as zeros. */
static inline float tile_bf16(const uint8_t *row, int i)
{
    const uint32_t bits = (uint32_t)(row[2 * i] | row[2 * i + 1] << 8) << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return tile_flush(value);
}

/* A sum of the block: even and odd elements of the pairs each in a chain of their own, from zero, the two then added.
 */
static inline float tile_dot(const uint8_t *a_row, int b, int n)
{
    float chains[2] = {0, 0};
    for (int k = 0; k < tiles.rows[b]; k++)
        for (int i = 0; i < 2; i++) {
            float x = tile_bf16(a_row, 2 * k + i), y = tile_bf16(tiles.data[b][k], 2 * n + i);
            chains[i] = tile_flush(fmaf(x, y, chains[i]));
        }
    return tile_flush(chains[0] + chains[1]);
}

static inline void tile_multiply(int sums, int a, int b)
{
    tile_check(sums), tile_check(a), tile_check(b);
    if (sums == a || sums == b || a == b) fail_msg("tiles %d, %d, %d are not distinct", sums, a, b);
    if (tiles.rows[sums] != tiles.rows[a] || tiles.row_bytes[sums] != tiles.row_bytes[b] ||
        tiles.row_bytes[a] != 4 * tiles.rows[b] || tiles.row_bytes[b] % 4)
        fail_msg("tiles %d, %d, %d do not fit each other", sums, a, b);
    for (int m = 0; m < tiles.rows[sums]; m++)
        for (int n = 0; n < tiles.row_bytes[sums] / 4; n++) {
            float sum;
            memcpy(&sum, tiles.data[sums][m] + 4 * n, sizeof sum);
            sum = tile_flush(tile_flush(sum) + tile_dot(tiles.data[a][m], b, n));
            memcpy(tiles.data[sums][m] + 4 * n, &sum, sizeof sum);
        }
}

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#define _tile_loadconfig tiles_configure
#define _tile_release    tiles_release
#define _tile_zero       tile_zero
#define _tile_loadd      tile_load
#define _tile_stored     tile_store
#define _tile_dpbf16ps   tile_multiply

#endif
