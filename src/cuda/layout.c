#include "cuda/layout.h"

#include <math.h>
#include <string.h>

#include "base/checked.h"
#include "base/convert.h"
#include "cuda/pack.h"

int64_t cuda_tile_count(const struct cuda_row_order *order)
{
    return ceil_div(order->rows, order->is_gated ? CUDA_GATED_COLUMNS : CUDA_TILE_ROWS);
}

int64_t cuda_step_count(int64_t K)
{
    return ceil_div(K, CUDA_STEP_K);
}

int64_t cuda_source_row(const struct cuda_row_order *order, int64_t tile, int32_t r)
{
    return source_row(order, tile, r);
}

static const uint8_t *codes_of(const moe4_matrix *matrix, int64_t row, int64_t K)
{
    return matrix->codes + row * (matrix->codes_row_bytes ? matrix->codes_row_bytes : K / 2);
}

static const uint8_t *scales_of(const moe4_matrix *matrix, int64_t row, int64_t K)
{
    return matrix->scales + row * (matrix->scales_row_bytes ? matrix->scales_row_bytes : K / BLOCK_SIZE);
}

static int is_zero_block(const uint8_t *codes)
{
    uint64_t words[2];
    memcpy(words, codes, sizeof words);
    return ((words[0] | words[1]) & 0x7777777777777777u) == 0;
}

int64_t cuda_stored_rows(const struct cuda_row_order *order)
{
    if (!order->is_gated) return order->rows;
    return order->gate_up == MOE4_GATE_UP_INTERLEAVED ? 2 * order->rows : order->stored_rows + order->rows;
}

int32_t cuda_scale_base(const moe4_matrix *matrix, const struct cuda_row_order *order, int64_t K)
{
    int32_t least = SCALE_NAN, most = 0;
    for (int64_t row = 0; row < cuda_stored_rows(order); row++) {
        if (!is_used_row(order, row)) continue;
        const uint8_t *codes = codes_of(matrix, row, K), *scales = scales_of(matrix, row, K);
        for (int64_t b = 0; b < K / BLOCK_SIZE; b++) {
            if (scales[b] != SCALE_NAN && is_zero_block(codes + b * BLOCK_BYTES)) continue;
            if (scales[b] < least) least = scales[b];
            if (scales[b] > most) most = scales[b];
        }
    }
    return base_of(least, most);
}

/* The byte of codes k, k+1 of a row; 0 past the matrix's end. */
static uint8_t code_pair(const moe4_matrix *matrix, int64_t K, int64_t row, int64_t k)
{
    return row < 0 || k >= K ? 0 : codes_of(matrix, row, K)[k / 2];
}

static void pack_step(const moe4_matrix *matrix, int64_t K, const int64_t *rows, int64_t first_k, int32_t base,
                      uint8_t *step)
{
    for (int32_t i = 0; i < CUDA_STEP_SCALES; i++) {
        int64_t row = rows[scale_row(i)], block = first_k / BLOCK_SIZE + scale_block(i);
        step[i] = stored_scale(0, 1, base);
        if (row >= 0 && block < K / BLOCK_SIZE)
            step[i] = stored_scale(scales_of(matrix, row, K)[block],
                                   is_zero_block(codes_of(matrix, row, K) + block * BLOCK_BYTES), base);
    }
    uint8_t *out = step + CUDA_STEP_SCALES;
    for (int32_t thread = 0; thread < 128; thread++)
        for (int32_t j = 0; j < 4; j++, out += 4) {
            uint32_t pairs[4];
            for (int32_t n = 0; n < 4; n++)
                pairs[n] = spread_pair(code_pair(matrix, K, rows[word_row(thread, n)], first_k + word_k(thread, j, n)));
            uint32_t word = join_registers(pairs);
            memcpy(out, &word, sizeof word);
        }
}

void cuda_pack_tile(const moe4_matrix *matrix, int64_t K, const struct cuda_row_order *order, int64_t tile,
                    int32_t base, uint8_t *packed, float *bias)
{
    int64_t rows[CUDA_TILE_ROWS];
    for (int32_t r = 0; r < CUDA_TILE_ROWS; r++) {
        rows[r] = source_row(order, tile, r);
        bias[r] = rows[r] < 0 || !matrix->bias ? 0.0f : load_f32(matrix->bias, matrix->bias_dtype, rows[r]);
    }
    for (int64_t k = 0; k < K; k += CUDA_STEP_K, packed += CUDA_STEP_BYTES) pack_step(matrix, K, rows, k, base, packed);
}

float cuda_step_weight(const uint8_t *step, int32_t r, int32_t k)
{
    int32_t warp = r / 16, half = r / 8 % 2, lane = r % 8 * 4 + k % 8 / 2;
    uint32_t word, pairs[4];
    memcpy(&word, step + CUDA_STEP_SCALES + (warp * 32 + lane) * 16 + k / 16 * 4, sizeof word);
    split_word(word, pairs);
    uint16_t code = (uint16_t)(pairs[k % 16 / 8 * 2 + half] >> k % 2 * 16);
    uint8_t factor = step[warp * 32 + r % 8 * 4 + k / 32 * 2 + half];
    return bf16_to_f32(code) * ldexpf(1.0f, factor - 127);
}
