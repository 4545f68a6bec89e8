/* AMX: bf16 tiles, on top of AVX-512.  Where there is no such hardware tests/kernel_amx_emulated.c runs it on tiles
 * made of C (docs/performance-cpu.md).
 *
 * A block of 32 k is one tile product for each 16 rows and up to 16 tokens: [token][row] += x [token][pair] . weights
 * [pair][row].  Pairs of weights for 16 rows are what a look-up yields, so that 16 of them, stored one after another,
 * are the second operand as it must lie in memory; tokens are packed by whole blocks, which is how the first one must.
 * Weights carry their scale, a power of two, so that sums stay in tiles from the first block to the last.
 *
 * While a block is decoded the one before is multiplied: its stores must have left the core's queue of stores before
 * tiles are loaded from where they went. */
#include <immintrin.h>

#include "base/dims.h"
#include "cpu/kernels/decode_avx512.h"
#include "cpu/kernels/kernel.h"
#include "cpu/kernels/unroll.h"
#include "cpu/layout.h"

enum {
    LINES = 4,       /* code lines of a subtile in a block */
    PAIRS = 4,       /* pairs of k in a line */
    TILE_LINES = 16, /* rows of a tile: pairs of weights, or tokens */
    SUBTILES = PANEL_ROWS / SUBTILE_ROWS,
    SUMS_BYTES = PANEL_ROWS * sizeof(float), /* of a token */
    LARGEST = SCALE_FAST_MAX,
    RAISED = LARGEST - 127 /* binary orders of magnitude that weights are looked up too large: room to go down */
};

typedef __m512i weights_tile[TILE_LINES];

/* What LDTILECFG reads. */
struct tile_config {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16]; /* 8 tiles; the rest is reserved */
    uint8_t rows[16];
};
_Static_assert(sizeof(struct tile_config) == 64, "a tile configuration is 64 bytes");

/* Tile registers; the intrinsics want them as literals.  Sums of up to 16 tokens, four subtiles, or of two tiles of
 * tokens, two subtiles: 0 and 1 of the first tokens, 2 and 3 of the second. */
#define TOKENS        4
#define OTHER_TOKENS  5
#define WEIGHTS       6
#define OTHER_WEIGHTS 7

/* Tiles of n_tokens, the first `first` of them apart if they are less. */
static void configure(int32_t n_tokens, int32_t first)
{
    const int32_t second = n_tokens > first ? n_tokens - first : first;
    struct tile_config config = {.palette = 1};
    for (int tile = 0; tile <= OTHER_WEIGHTS; tile++) {
        const int is_second = tile == OTHER_TOKENS || tile == 2 || tile == 3;
        config.row_bytes[tile] = LINE_BYTES;
        config.rows[tile] = (uint8_t)(tile >= WEIGHTS ? TILE_LINES : is_second ? second : first);
    }
    __asm__ volatile("" ::: "memory"); /* gcc does not know that this reads memory */
    _tile_loadconfig(&config);
}

/* bf16 bits of each code, raised.  Those of -0 are 0, too: nothing can be subtracted from them. */
static inline __m512i raised_table(void)
{
    const short sign = (short)0x8000, up = RAISED << 7;
    const short half = 0x3F00 + up, one = 0x3F80 + up, one_half = 0x3FC0 + up, two = 0x4000 + up, three = 0x4040 + up,
                four = 0x4080 + up, six = 0x40C0 + up;
    return _mm512_broadcast_i64x4(_mm256_setr_epi16(0, half, one, one_half, two, three, four, six, 0, sign | half,
                                                    sign | one, sign | one_half, sign | two, sign | three, sign | four,
                                                    sign | six));
}

/* What has to be subtracted from the bits of 16 rows, both elements of a pair. */
static inline __m512i load_descents(const uint8_t *scales)
{
    __m512i bytes = _mm512_cvtepu8_epi32(_mm_load_si128((const __m128i *)scales));
    bytes = _mm512_or_si512(bytes, _mm512_slli_epi32(bytes, 16));
    return _mm512_slli_epi16(_mm512_sub_epi16(_mm512_set1_epi16(LARGEST), bytes), 7);
}

/* The pair j of a line's 16 rows (layout.h).  Shifts and half of a look-up want port 0, as does the subtraction that
 * follows; multiplications have two. */
static inline __m512i raised_pair(__m512i codes, int j, __m512i table)
{
    const __m512i down = _mm512_set1_epi16((short)(1 << (16 - 4 * j)));
    return _mm512_permutexvar_epi16(j ? _mm512_mulhi_epu16(codes, down) : codes, table);
}

/* A subtile's weights with their scales.  Zeros stay what they are, since subtraction saturates. */
static inline __attribute__((always_inline)) void decode_subtile(const uint8_t *block, int subtile, __m512i table,
                                                                 weights_tile weights)
{
    const __m512i descents = load_descents(block + subtile * SUBTILE_ROWS);
    const uint8_t *codes = block + CODES_OFFSET + subtile * SUBTILE_BYTES;
    UNROLL
    for (int line = 0; line < LINES; line++) {
        const __m512i packed = load_line(codes + line * LINE_BYTES);
        UNROLL
        for (int j = 0; j < PAIRS; j++)
            _mm512_store_si512(weights + line * PAIRS + j, _mm512_subs_epu16(raised_pair(packed, j, table), descents));
    }
}

/* A tile from memory, of which gcc does not know that it is read. */
#define LOAD_TILE(tile, from)                                                                                          \
    __asm__ volatile("" ::: "memory");                                                                                 \
    _tile_loadd(tile, from, LINE_BYTES)

/* Up to 16 tokens: four subtiles at once. */
static void multiply_few(const uint8_t *panel, int64_t n_blocks, const uint16_t *x, int32_t n_tokens, float *sums,
                         struct read_ahead *ahead)
{
    const __m512i table = raised_table();
    weights_tile weights[2][SUBTILES];
    struct line_pair pair = ahead->pair;
    configure(n_tokens, n_tokens);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int s = 0; s < SUBTILES; s++) decode_subtile(panel, s, table, weights[0][s]);
    for (int64_t b = 0; b < n_blocks; b++, x += BLOCK_SIZE * n_tokens) {
        weights_tile *const now = weights[b % 2], *const next = weights[1 - b % 2];
        if (b + 1 < n_blocks) panel += PANEL_BLOCK_BYTES; /* the last is decoded again, for nothing */
        read_on(ahead, &pair);
        read_pairs(&pair, 1);
        LOAD_TILE(TOKENS, x);
        LOAD_TILE(WEIGHTS, now[0]);
        _tile_dpbf16ps(0, TOKENS, WEIGHTS);
        read_pairs(&pair, 2);
        decode_subtile(panel, 0, table, next[0]);
        LOAD_TILE(OTHER_WEIGHTS, now[1]);
        _tile_dpbf16ps(1, TOKENS, OTHER_WEIGHTS);
        read_pairs(&pair, 2);
        decode_subtile(panel, 1, table, next[1]);
        LOAD_TILE(WEIGHTS, now[2]);
        _tile_dpbf16ps(2, TOKENS, WEIGHTS);
        read_pairs(&pair, 2);
        decode_subtile(panel, 2, table, next[2]);
        LOAD_TILE(OTHER_WEIGHTS, now[3]);
        _tile_dpbf16ps(3, TOKENS, OTHER_WEIGHTS);
        read_pairs(&pair, 2);
        decode_subtile(panel, 3, table, next[3]);
    }
    ahead->pair = pair;
    _tile_stored(0, sums, SUMS_BYTES);
    _tile_stored(1, sums + SUBTILE_ROWS, SUMS_BYTES);
    _tile_stored(2, sums + 2 * SUBTILE_ROWS, SUMS_BYTES);
    _tile_stored(3, sums + 3 * SUBTILE_ROWS, SUMS_BYTES);
}

/* 17 to 32 tokens, the first of them in a tile of their own: two subtiles, from `subtile` on. */
static void multiply_many(const uint8_t *panel, int64_t n_blocks, const uint16_t *x, int32_t n_tokens, int32_t first,
                          int subtile, float *sums, struct read_ahead *ahead)
{
    const __m512i table = raised_table();
    weights_tile weights[2][2];
    struct line_pair pair = ahead->pair;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int s = 0; s < 2; s++) decode_subtile(panel, subtile + s, table, weights[0][s]);
    for (int64_t b = 0; b < n_blocks; b++, x += BLOCK_SIZE * n_tokens) {
        weights_tile *const now = weights[b % 2], *const next = weights[1 - b % 2];
        if (b + 1 < n_blocks) panel += PANEL_BLOCK_BYTES;
        read_on(ahead, &pair);
        read_pairs(&pair, 1);
        LOAD_TILE(TOKENS, x);
        LOAD_TILE(WEIGHTS, now[0]);
        _tile_dpbf16ps(0, TOKENS, WEIGHTS);
        LOAD_TILE(OTHER_TOKENS, x + BLOCK_SIZE * first);
        _tile_dpbf16ps(2, OTHER_TOKENS, WEIGHTS);
        read_pairs(&pair, 2);
        decode_subtile(panel, subtile, table, next[0]);
        LOAD_TILE(OTHER_WEIGHTS, now[1]);
        _tile_dpbf16ps(1, TOKENS, OTHER_WEIGHTS);
        _tile_dpbf16ps(3, OTHER_TOKENS, OTHER_WEIGHTS);
        read_pairs(&pair, 2);
        decode_subtile(panel, subtile + 1, table, next[1]);
    }
    ahead->pair = pair;
    sums += subtile * SUBTILE_ROWS;
    _tile_stored(0, sums, SUMS_BYTES);
    _tile_stored(1, sums + SUBTILE_ROWS, SUMS_BYTES);
    _tile_stored(2, sums + first * PANEL_ROWS, SUMS_BYTES);
    _tile_stored(3, sums + first * PANEL_ROWS + SUBTILE_ROWS, SUMS_BYTES);
}

/* Tiles are configured and released once a call, so that threads keep no tile state. */
static void gemm_tile_amx(const uint8_t *panel, int64_t n_blocks, const uint16_t *x, int32_t n_tokens, float *sums,
                          struct read_ahead *ahead)
{
    if (n_tokens <= TILE_LINES) {
        multiply_few(panel, n_blocks, x, n_tokens, sums, ahead);
    } else {
        const int32_t first = (n_tokens + 1) / 2;
        configure(n_tokens, first);
        multiply_many(panel, n_blocks, x, n_tokens, first, 0, sums, ahead);
        multiply_many(panel, n_blocks, x, n_tokens, first, 2, sums, ahead);
    }
    _tile_release();
}

const struct kernel kernel_amx = {.name = "gemm_amx",
                                  .order = "blocks of tdpbf16ps with scaled weights, added",
                                  .isa = MOE4_ISA_AMX,
                                  .tile_tokens = 2 * TILE_LINES,
                                  .grain = TILE_LINES,
                                  .run = BLOCK_SIZE,
                                  .gemm_tile = gemm_tile_amx};
