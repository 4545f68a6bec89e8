/* The packed layout's bit and row arithmetic, for the host and for kernels (layout.h). */
#ifndef MOE4_CUDA_PACK_H
#define MOE4_CUDA_PACK_H

#include "base/mxfp4.h"
#include "cuda/layout.h"

#ifdef __CUDACC__
#define MOE4_BOTH __host__ __device__
#else
#define MOE4_BOTH
#endif

#define PAIR_MASK 0x81C081C0u

static MOE4_BOTH inline uint32_t rotate_left(uint32_t word, int32_t n)
{
    return word << n | word >> (32 - n);
}

static MOE4_BOTH inline int64_t gate_up_row(const struct cuda_row_order *order, int64_t i, int64_t is_up)
{
    switch (order->gate_up) {
    case MOE4_GATE_UP_INTERLEAVED: return 2 * i + is_up;
    case MOE4_GATE_UP_GATE_FIRST: return is_up ? order->stored_rows + i : i;
    case MOE4_GATE_UP_UP_FIRST: return is_up ? i : order->stored_rows + i;
    default: return i;
    }
}

/* cuda_source_row. */
static MOE4_BOTH inline int64_t source_row(const struct cuda_row_order *order, int64_t tile, int32_t r)
{
    int32_t warp = r / 16, half = r / 8 % 2, g = r % 8;
    if (order->is_gated) {
        int64_t i = tile * CUDA_GATED_COLUMNS + warp * 8 + g;
        return i < order->rows ? gate_up_row(order, i, half) : -1;
    }
    int64_t row = tile * CUDA_TILE_ROWS + warp * 16 + 2 * g + half;
    return row < order->rows ? row : -1;
}

/* Whether a row of the checkpoint's matrix is one of the layer's, not what pads a stored half. */
static MOE4_BOTH inline int is_used_row(const struct cuda_row_order *order, int64_t row)
{
    const int has_halves = order->is_gated && order->gate_up != MOE4_GATE_UP_INTERLEAVED;
    return !has_halves || row % order->stored_rows < order->rows;
}

/* The low byte's two codes to their places in a register: magnitudes to bits 6 and 22, signs to 15 and 31.  A product
 * copies both codes twice, without overlap, and the mask keeps one of each. */
static MOE4_BOTH inline uint32_t spread_pair(uint32_t byte)
{
    return ((byte & 0x77u) * 0x00040040u & 0x01C001C0u) | ((byte & 0x88u) * 0x01001000u & 0x80008000u);
}

/* The row of a tile, and the lower k of a step, that register n of word j of a warpgroup's thread holds. */
static MOE4_BOTH inline int32_t word_row(int32_t thread, int32_t n)
{
    return thread / 32 * 16 + thread % 32 / 4 + n % 2 * 8;
}

static MOE4_BOTH inline int32_t word_k(int32_t thread, int32_t j, int32_t n)
{
    return 16 * j + thread % 4 * 2 + n / 2 * 8;
}

/* The word that decodes to four registers of codes, each already spread over a pair. */
static MOE4_BOTH inline uint32_t join_registers(const uint32_t pairs[4])
{
    /* the first three own their bits; what they leave is bits 0, 1, 9, 10 of each half */
    uint32_t word = pairs[0] | pairs[1] >> 4 | rotate_left(pairs[2], 22);
    /* in r = rotl(word, 6) those are bits 6, 7, 15 and 0 of each half; `wrong` is what they, still 0, leave amiss in
     * (r ^ r << 8) & PAIR_MASK: at bits 6 and 22 themselves, at 8 and 24 through bits 0 and 16, and bits 7, 15, 23, 31
     * each shift into the next */
    const uint32_t r = rotate_left(word, 6), wrong = (r ^ r << 8 ^ pairs[3]) & PAIR_MASK;
    uint32_t chain = wrong & 0x80808080u;
    chain ^= chain << 8;
    chain ^= chain << 16;
    return rotate_left(r ^ (wrong & 0x00400040u) ^ (wrong >> 8 & 0x00010001u) ^ chain, 26);
}

static MOE4_BOTH inline void split_word(uint32_t word, uint32_t pairs[4])
{
    uint32_t r = rotate_left(word, 6);
    pairs[0] = word & PAIR_MASK;
    pairs[1] = word << 4 & PAIR_MASK;
    pairs[2] = rotate_left(word, 10) & PAIR_MASK;
    pairs[3] = (r ^ r << 8) & PAIR_MASK;
}

/* The fp8 arrangement: word j of a thread holds k = first .. first+3 and first+16 .. first+19 of one row. */
static MOE4_BOTH inline int32_t fp8_word_row(int32_t thread, int32_t j)
{
    return thread / 32 * 16 + thread % 32 / 4 + j % 2 * 8;
}

static MOE4_BOTH inline int32_t fp8_word_k(int32_t thread, int32_t j)
{
    return j / 2 * 32 + thread % 4 * 4;
}

/* Bits 3, 7, 11, 15 to 3, 11, 19, 27. */
static MOE4_BOTH inline uint32_t spread_signs(uint32_t codes)
{
    uint32_t signs = codes & 0x8888u;
    signs = (signs | signs << 8) & 0x00880088u;
    return (signs | signs << 4) & 0x08080808u;
}

/* Eight codes, each nibble's low three bits a magnitude, to the word that decodes to two registers: the signs of the
 * first four go to the top bits of the bytes, those of the others four bits below. */
static MOE4_BOTH inline uint32_t fp8_join(uint32_t codes)
{
    return (codes & 0x77777777u) | spread_signs(codes) << 4 | spread_signs(codes >> 16);
}

static MOE4_BOTH inline uint32_t fp8_split(uint32_t word)
{
    uint32_t codes = word & 0x77777777u;
    for (int32_t n = 0; n < 4; n++) {
        codes |= (word >> (8 * n + 7) & 1u) << (4 * n + 3);
        codes |= (word >> (8 * n + 3) & 1u) << (4 * n + 19);
    }
    return codes;
}

/* Whether e5m2 holds a tile whose blocks of non-zero codes have scales least .. most: 27 binades of them, and a unit
 * that leaves sums room. */
static MOE4_BOTH inline int fp8_holds(int32_t least, int32_t most)
{
    return most < least || (least >= CUDA_FP8_LEAST && most <= CUDA_FP8_MOST && most - least <= CUDA_FP8_SPAN);
}

/* What a scale is stored as.  A block of zeros is zero under any scale but NaN: one byte for all of them. */
static MOE4_BOTH inline uint8_t stored_scale(uint8_t scale, int is_zero_block, int32_t base)
{
    if (is_zero_block && scale != SCALE_NAN) return CUDA_SCALE_OFFSET + 1;
    return (uint8_t)(scale - base + CUDA_SCALE_OFFSET);
}

/* The row of a tile, and the block of its step, whose scale is byte i of a step. */
static MOE4_BOTH inline int32_t scale_row(int32_t i)
{
    return i / 32 * 16 + i % 2 * 8 + i % 32 / 4;
}

static MOE4_BOTH inline int32_t scale_block(int32_t i)
{
    return i % 4 / 2;
}

/* The base of a matrix whose blocks of non-zero codes have scales least .. most; -1 where no base is exact. */
static MOE4_BOTH inline int32_t base_of(int32_t least, int32_t most)
{
    if (most == SCALE_NAN) return -1;
    int32_t base = most > CUDA_SCALE_MAX ? most - CUDA_SCALE_MAX : 0;
    return least >= base + CUDA_SCALE_MIN && base <= CUDA_BASE_MAX ? base : -1;
}

#endif
