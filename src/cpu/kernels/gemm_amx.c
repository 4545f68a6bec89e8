/* AMX: bf16 tiles, on top of AVX-512.  Where there is no such hardware tests/kernel_amx_emulated.c runs it on tiles
 * made of C (docs/performance-cpu.md).
 *
 * A block of 32 k is one tile product for each 16 rows: [token][row] = x [token][pair] . weights [pair][row].  Pairs of
 * weights for 16 rows are what decode_pair yields, so that 16 of them, stored one after another, are the second operand
 * as it must lie in memory.  Activations, packed pair by pair, are turned into rows of tokens.  A block's products come
 * back through memory to be scaled. */
#include <immintrin.h>
#include <string.h>

#include "base/dims.h"
#include "cpu/kernels/decode_avx512.h"
#include "cpu/kernels/kernel.h"
#include "cpu/layout.h"

enum {
    LINES = 4,                    /* code lines of a subtile in a block */
    PAIRS = 4,                    /* pairs of k in a line */
    BLOCK_PAIRS = BLOCK_SIZE / 2, /* = rows of a weight tile = pairs in a row of the token tile */
    SUBTILES = PANEL_ROWS / SUBTILE_ROWS
};

/* Tile registers; the intrinsics want them as literals. */
#define TOKENS  4 /* 0..3 are the products of the 4 subtiles */
#define WEIGHTS 5

/* What a block takes on its way: second operands, first operand, products. */
struct scratch {
    uint32_t weights[SUBTILES][BLOCK_PAIRS][SUBTILE_ROWS];
    uint32_t tokens[TILE_TOKENS][BLOCK_PAIRS];
    float products[TILE_TOKENS][PANEL_ROWS];
} __attribute__((aligned(64)));

/* What LDTILECFG reads. */
struct tile_config {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16]; /* 8 tiles; the rest is reserved */
    uint8_t rows[16];
};
_Static_assert(sizeof(struct tile_config) == 64, "a tile configuration is 64 bytes");

static void configure(int32_t n_tokens)
{
    struct tile_config config = {.palette = 1};
    for (int tile = 0; tile <= WEIGHTS; tile++) {
        config.rows[tile] = (uint8_t)(tile == WEIGHTS ? BLOCK_PAIRS : n_tokens);
        config.row_bytes[tile] = LINE_BYTES;
    }
    __asm__ volatile("" ::: "memory"); /* gcc does not know that all of it is read */
    _tile_loadconfig(&config);
}

static void decode_block(const uint8_t *block, struct scratch *s)
{
    const __m512i table = decode_table();
    const uint8_t *codes = block + CODES_OFFSET;
    for (int subtile = 0; subtile < SUBTILES; subtile++)
        for (int line = 0; line < LINES; line++, codes += LINE_BYTES) {
            __m512i packed = load_line(codes);
#pragma GCC unroll 4
            for (int j = 0; j < PAIRS; j++)
                _mm512_store_si512(s->weights[subtile][line * PAIRS + j], decode_pair(packed, j, table));
        }
}

/* x [16][n_tokens] pairs -> tokens [n_tokens][16] pairs */
static void turn_block(const uint32_t *x, int32_t n_tokens, struct scratch *s)
{
    const __m512i pair = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i places = _mm512_mullo_epi32(pair, _mm512_set1_epi32(n_tokens));
    for (int32_t t = 0; t < n_tokens; t++) _mm512_store_si512(s->tokens[t], _mm512_i32gather_epi32(places, x + t, 4));
}

/* One subtile's product; `tile` is a literal. */
#define MULTIPLY(tile)                                                                                                 \
    _tile_zero(tile);                                                                                                  \
    _tile_loadd(WEIGHTS, s->weights[tile], LINE_BYTES);                                                                \
    _tile_dpbf16ps(tile, TOKENS, WEIGHTS);                                                                             \
    _tile_stored(tile, s->products[0] + (tile)*SUBTILE_ROWS, sizeof s->products[0])

static void multiply_block(struct scratch *s)
{
    __asm__ volatile("" ::: "memory"); /* gcc does not know that tile loads read memory */
    _tile_loadd(TOKENS, s->tokens, LINE_BYTES);
    MULTIPLY(0);
    MULTIPLY(1);
    MULTIPLY(2);
    MULTIPLY(3);
}

static void add_scaled(const struct scratch *s, const uint8_t *scales, int32_t n_tokens, float *sums)
{
    for (int row = 0; row < PANEL_ROWS; row += SUBTILE_ROWS) {
        const __m512 scale = load_scales(scales + row);
        for (int32_t t = 0; t < n_tokens; t++) {
            float *sum = sums + t * PANEL_ROWS + row;
            __m512 product = _mm512_load_ps(s->products[t] + row);
            _mm512_store_ps(sum, _mm512_fmadd_ps(product, scale, _mm512_load_ps(sum)));
        }
    }
}

static void gemm_tile_amx(const uint8_t *panel, int64_t n_blocks, const uint16_t *x, int32_t n_tokens, float *sums,
                          struct read_ahead *ahead)
{
    struct scratch scratch;
    memset(sums, 0, (size_t)n_tokens * PANEL_ROWS * sizeof *sums);
    configure(n_tokens);
    for (int64_t b = 0; b < n_blocks; b++, panel += PANEL_BLOCK_BYTES, x += BLOCK_SIZE * n_tokens) {
        read_block(ahead);
        decode_block(panel, &scratch);
        turn_block((const uint32_t *)(const void *)x, n_tokens, &scratch);
        multiply_block(&scratch);
        add_scaled(&scratch, panel, n_tokens, sums);
    }
    _tile_release();
}

const struct kernel kernel_amx = {.name = "gemm_amx",
                                  .order = "blocks of tdpbf16ps, scaled by fma",
                                  .isa = MOE4_ISA_AMX,
                                  .tile_tokens = TILE_TOKENS,
                                  .gemm_tile = gemm_tile_amx};
