/* Packing with vectors of 16 bytes, which every architecture that we know has. */
#include <string.h>

#include "cpu/kernels/pack.h"

typedef uint32_t words __attribute__((vector_size(16)));

/* Eight codes, as a checkpoint has them, to the order of a word of a code line, by two swaps of neighbours:
 * k = 01234567 -> 02134657 -> 02461357. */
static inline words load_arranged(const uint8_t *codes)
{
    words x, t;
    memcpy(&x, codes, sizeof x);
    t = (x ^ x >> 4) & 0x00F000F0u;
    x ^= t ^ t << 4;
    t = (x ^ x >> 8) & 0x0000FF00u;
    return x ^ t ^ t << 8;
}

/* One block of four rows: a transposition of 4 x 4 words. */
static inline void pack_quad(const uint8_t *const codes[4], int64_t at, uint32_t (*lines)[SUBTILE_ROWS], int32_t row)
{
    words a = load_arranged(codes[0] + at), b = load_arranged(codes[1] + at);
    words c = load_arranged(codes[2] + at), d = load_arranged(codes[3] + at);
    words even = __builtin_shufflevector(a, c, 0, 4, 1, 5), odd = __builtin_shufflevector(b, d, 0, 4, 1, 5);
    words line0 = __builtin_shufflevector(even, odd, 0, 4, 1, 5),
          line1 = __builtin_shufflevector(even, odd, 2, 6, 3, 7);
    even = __builtin_shufflevector(a, c, 2, 6, 3, 7);
    odd = __builtin_shufflevector(b, d, 2, 6, 3, 7);
    words line2 = __builtin_shufflevector(even, odd, 0, 4, 1, 5),
          line3 = __builtin_shufflevector(even, odd, 2, 6, 3, 7);
    memcpy(&lines[0][row], &line0, sizeof line0);
    memcpy(&lines[1][row], &line1, sizeof line1);
    memcpy(&lines[2][row], &line2, sizeof line2);
    memcpy(&lines[3][row], &line3, sizeof line3);
}

static inline void pack_subtile(const uint8_t *const codes[SUBTILE_ROWS], uint32_t (*lines)[4][SUBTILE_ROWS])
{
    for (int32_t row = 0; row < SUBTILE_ROWS; row += 4)
        for (int block = 0; block < GROUP_BLOCKS; block++)
            pack_quad(codes + row, block * BLOCK_BYTES, lines[block], row);
}

static inline void stream_line(void *out, const void *line)
{
    memcpy(out, line, LINE_BYTES);
}

static inline void stream_end(void) {}

#define PACK_ROWS  pack_rows_c
#define PACK_RUN   GROUP_BLOCKS
#define PACK_AHEAD (2 * LINE_BYTES)
#include "cpu/kernels/pack_template.h"
