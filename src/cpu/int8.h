/* Activations of int8 compute as its kernels read them.
 *
 * Weights are the same packed panels that every mode uses (layout.h).  Of a lane's 8 codes the low halves of the four
 * bytes are k = 0, 4, 1, 5, the high halves k = 2, 6, 3, 7; so a byte look-up turns a code line into two vectors whose
 * 32-bit lanes hold those four weights each, and activations come in the same order.  The look-up gives 2w + 12, which
 * is 0..24: dot products of bytes want one side unsigned.  A block's sum therefore starts at -12 times the sum of its
 * activations, and is then twice the sum of x w, an integer of at most 17 bits.
 *
 * A tile of n rows is a run of blocks of 32 k, each of 11 n words of 32 bits:
 *
 *   [8][n]   codes: word 2g of a row holds k = 8g + {0, 4, 1, 5}, word 2g+1 k = 8g + {2, 6, 3, 7}
 *   [n]      int32: -12 times the sum of the codes
 *   [n]      f32: the scale
 *   [n]      two int16: -12 times the sum of the codes of even k, and of odd k, for sums of 16 bits */
#ifndef MOE4_CPU_INT8_H
#define MOE4_CPU_INT8_H

#include <stdint.h>

enum {
    INT8_CODE_WORDS = 8,   /* of a row in a block */
    INT8_BLOCK_WORDS = 11, /* 44 bytes for 32 k: less than bf16 takes, whose buffers are used */
    INT8_WEIGHT_OFFSET = 12
};

/* The tile that begins with routed row first_row in a buffer of rows of K bf16. */
static inline int32_t *int8_tile(uint16_t *buffer, int64_t first_row, int64_t K)
{
    return (int32_t *)(void *)(buffer + first_row * K);
}

/* Puts n_blocks blocks of a row, codes [n_blocks][32] and scales [n_blocks], into a tile of n_rows rows, of which tile
 * points at the first of the blocks.  Returns where the next blocks go. */
int32_t *int8_pack(const int8_t *codes, const float *scales, int64_t n_blocks, int32_t n_rows, int32_t row,
                   int32_t *tile);

/* 2w of each code. */
static inline int int8_weight(unsigned code)
{
    static const int8_t doubled[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
    return doubled[code];
}

#endif
