/* bf16 <-> MXFP8. */
#include "base/mxfp8.h"

#include "cpu/fpenv.h"
#include "moe4/quant.h"

void moe4_mxfp8_quantize(const uint16_t *x, int64_t n_blocks, uint8_t *codes, uint8_t *scales)
{
    uint32_t host = fpenv_enter();
    for (int64_t b = 0; b < n_blocks; b++) scales[b] = mxfp8_quantize_block(x + b * BLOCK_SIZE, codes + b * BLOCK_SIZE);
    fpenv_leave(host);
}

void moe4_mxfp8_dequantize(const uint8_t *codes, const uint8_t *scales, int64_t n_blocks, uint16_t *x)
{
    uint32_t host = fpenv_enter();
    for (int64_t b = 0; b < n_blocks; b++)
        mxfp8_dequantize_block(codes + b * BLOCK_SIZE, scales[b], x + b * BLOCK_SIZE);
    fpenv_leave(host);
}
