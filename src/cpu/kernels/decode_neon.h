/* Packed codes to bf16 weights without their scale, 16 at a time (NEON). */
#ifndef MOE4_CPU_KERNELS_DECODE_NEON_H
#define MOE4_CPU_KERNELS_DECODE_NEON_H

#include <arm_neon.h>
#include <string.h>

#include "cpu/layout.h"

/* Low and high byte of each code's bf16. */
struct decode_table {
    uint8x16_t low, high;
};

static inline struct decode_table decode_table(void)
{
    static const uint8_t low[16] = {0, 0, 0x80, 0xC0, 0, 0x40, 0x80, 0xC0, 0, 0, 0x80, 0xC0, 0, 0x40, 0x80, 0xC0};
    static const uint8_t high[16] = {0x00, 0x3F, 0x3F, 0x3F, 0x40, 0x40, 0x40, 0x40,
                                     0x80, 0xBF, 0xBF, 0xBF, 0xC0, 0xC0, 0xC0, 0xC0};
    return (struct decode_table){vld1q_u8(low), vld1q_u8(high)};
}

/* Low and high nibbles of 16 code bytes. */
static inline uint8x16_t nibbles_low(uint8x16_t codes)
{
    return vandq_u8(codes, vdupq_n_u8(15));
}

static inline uint8x16_t nibbles_high(uint8x16_t codes)
{
    return vshrq_n_u8(codes, 4);
}

/* The weights of the codes in bytes 0, 2, 4, ... and in bytes 1, 3, 5, ... */
static inline uint16x8x2_t decode_even_odd(uint8x16_t codes, struct decode_table table)
{
    uint8x16_t low = vqtbl1q_u8(table.low, codes), high = vqtbl1q_u8(table.high, codes);
    return (uint16x8x2_t){{vreinterpretq_u16_u8(vtrn1q_u8(low, high)), vreinterpretq_u16_u8(vtrn2q_u8(low, high))}};
}

/* The scales of 4 rows, E8M0 bytes 1..254. */
static inline float32x4_t load_scales(const uint8_t *scales)
{
    uint32_t bytes;
    memcpy(&bytes, scales, sizeof bytes);
    uint16x8_t exponents = vmovl_u8(vreinterpret_u8_u32(vdup_n_u32(bytes)));
    return vreinterpretq_f32_u32(vshlq_n_u32(vmovl_u16(vget_low_u16(exponents)), 23));
}

#endif
