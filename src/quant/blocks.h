/* Quantising loops, compiled once an instruction set from blocks_template.h. */
#ifndef MOE4_QUANT_BLOCKS_H
#define MOE4_QUANT_BLOCKS_H

#include <stdint.h>

#include "moe4/quant.h"

struct block_kernels {
    void (*from_f32)(const float *x, int64_t n_blocks, moe4_scale_rule rule, uint8_t *codes, uint8_t *scales);
    void (*from_bf16)(const uint16_t *x, int64_t n_blocks, moe4_scale_rule rule, uint8_t *codes, uint8_t *scales);

    /* Adds what codes and scales, which the functions above have made of x, lose of it: the sums and n_saturated, of
     * blocks with scale bytes from LOWEST_MEASURED to HIGHEST_SCALE.  n_blocks: LOSS_BLOCKS at most. */
    void (*measure_f32)(const float *x, const uint8_t *codes, const uint8_t *scales, int32_t n_blocks,
                        moe4_mxfp4_loss *loss);
    void (*measure_bf16)(const uint16_t *x, const uint8_t *codes, const uint8_t *scales, int32_t n_blocks,
                         moe4_mxfp4_loss *loss);
};

extern const struct block_kernels blocks_c, blocks_avx2, blocks_avx512;

/* The largest scale byte that a rule may choose, 2^125: its code of 6 is the largest that f32 can hold, and all that a
 * larger scale can hold is there, too. */
enum { HIGHEST_SCALE = 252 };

/* Elements over the scale of NOTHING, 2^-47 as f32 bits, and below are left out of sums: their squares are nothing
 * beside that of the largest, and could be subnormal, which some CPUs are slow at.  Under smaller scales than
 * LOWEST_MEASURED a zero, whose bits are moved like any other's, would be more than that. */
enum { LOSS_BLOCKS = 32, LOWEST_MEASURED = 48, NOTHING = 0x28000000 };

/* 2^(scale-127), of bytes below 255. */
double block_unit(int32_t scale);

/* A block that the loops do not take: zeros, something not finite, or a scale near the bottom of the range, where
 * limits between codes are subnormal.  bits: 32 elements as f32. */
void block_quantize_rare(const int32_t *bits, moe4_scale_rule rule, uint8_t *codes, uint8_t *scale);

/* What is added to amax's bits so that their exponent field becomes the scale's exponent + 2. */
int32_t block_carry(moe4_scale_rule rule);

#endif
