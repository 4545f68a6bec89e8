#include "cpu/int8.h"

#include <string.h>

#include "base/dims.h"

/* Four bytes to the even ones of eight. */
static uint64_t spread(uint32_t bytes)
{
    uint64_t x = bytes;
    x = (x | x << 16) & 0x0000FFFF0000FFFFu;
    return (x | x << 8) & 0x00FF00FF00FF00FFu;
}

/* The eight words of a block in the order of its weights: of every 8 codes the first four and the last four take
 * turns. */
static void order_codes(const int8_t *codes, int32_t *words)
{
    for (int i = 0; i < BLOCK_SIZE; i += 8) {
        uint32_t halves[2];
        memcpy(halves, codes + i, sizeof halves);
        uint64_t pair = spread(halves[0]) | spread(halves[1]) << 8;
        memcpy(words + i / 4, &pair, sizeof pair);
    }
}

int32_t *int8_pack(const int8_t *codes, const float *scales, int64_t n_blocks, int32_t n_rows, int32_t row,
                   int32_t *tile)
{
    for (int64_t b = 0; b < n_blocks; b++, codes += BLOCK_SIZE, tile += INT8_BLOCK_WORDS * n_rows) {
        int32_t words[INT8_BLOCK_WORDS], even = 0, odd = 0;
        for (int k = 0; k < BLOCK_SIZE; k += 2) even += codes[k], odd += codes[k + 1];
        const int16_t halves[2] = {(int16_t)(-INT8_WEIGHT_OFFSET * even), (int16_t)(-INT8_WEIGHT_OFFSET * odd)};
        order_codes(codes, words);
        words[INT8_CODE_WORDS] = -INT8_WEIGHT_OFFSET * (even + odd);
        memcpy(&words[INT8_CODE_WORDS + 1], &scales[b], sizeof scales[b]);
        memcpy(&words[INT8_CODE_WORDS + 2], halves, sizeof halves);
        for (int i = 0; i < INT8_BLOCK_WORDS; i++) tile[i * n_rows + row] = words[i];
    }
    return tile;
}
