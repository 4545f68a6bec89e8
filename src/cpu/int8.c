#include "cpu/int8.h"

#include <string.h>

#include "base/dims.h"

/* The eight words of a block in the order of its weights: in every 8, byte k of the first half beside byte k of the
 * second. */
static void order_codes(const int8_t *codes, int32_t *words)
{
    int8_t ordered[BLOCK_SIZE];
    for (int i = 0; i < BLOCK_SIZE; i += 8)
        for (int k = 0; k < 4; k++) {
            ordered[i + 2 * k] = codes[i + k];
            ordered[i + 2 * k + 1] = codes[i + 4 + k];
        }
    memcpy(words, ordered, sizeof ordered);
}

int32_t *int8_pack(const int8_t *codes, const float *scales, int64_t n_blocks, int32_t n_rows, int32_t row,
                   int32_t *tile)
{
    for (int64_t b = 0; b < n_blocks; b++, codes += BLOCK_SIZE, tile += INT8_BLOCK_WORDS * n_rows) {
        int32_t words[INT8_BLOCK_WORDS], sum = 0;
        for (int k = 0; k < BLOCK_SIZE; k++) sum += codes[k];
        order_codes(codes, words);
        words[INT8_CODE_WORDS] = -INT8_WEIGHT_OFFSET * sum;
        memcpy(&words[INT8_CODE_WORDS + 1], &scales[b], sizeof scales[b]);
        for (int i = 0; i < INT8_BLOCK_WORDS; i++) tile[i * n_rows + row] = words[i];
    }
    return tile;
}
