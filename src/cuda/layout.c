#include "cuda/layout.h"

#include <math.h>
#include <string.h>

#include "base/checked.h"
#include "base/convert.h"
#include "base/mxfp4.h"

static const uint32_t pair_mask = 0x81C081C0u;

static uint32_t rotate_left(uint32_t word, int32_t n)
{
    return word << n | word >> (32 - n);
}

int64_t cuda_tile_count(const struct cuda_row_order *order)
{
    return ceil_div(order->rows, order->is_gated ? CUDA_GATED_COLUMNS : CUDA_TILE_ROWS);
}

int64_t cuda_step_count(int64_t K)
{
    return ceil_div(K, CUDA_STEP_K);
}

static int64_t gate_up_row(const struct cuda_row_order *order, int64_t i, int64_t is_up)
{
    switch (order->gate_up) {
    case MOE4_GATE_UP_INTERLEAVED: return 2 * i + is_up;
    case MOE4_GATE_UP_GATE_FIRST: return is_up ? order->stored_rows + i : i;
    case MOE4_GATE_UP_UP_FIRST: return is_up ? i : order->stored_rows + i;
    default: return i;
    }
}

int64_t cuda_source_row(const struct cuda_row_order *order, int64_t tile, int32_t r)
{
    int32_t warp = r / 16, half = r / 8 % 2, g = r % 8;
    if (order->is_gated) {
        int64_t i = tile * CUDA_GATED_COLUMNS + warp * 8 + g;
        return i < order->rows ? gate_up_row(order, i, half) : -1;
    }
    int64_t row = tile * CUDA_TILE_ROWS + warp * 16 + 2 * g + half;
    return row < order->rows ? row : -1;
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

int32_t cuda_scale_base(const moe4_matrix *matrix, int64_t rows, int64_t K)
{
    int32_t least = SCALE_NAN, most = 0;
    for (int64_t row = 0; row < rows; row++) {
        const uint8_t *codes = codes_of(matrix, row, K), *scales = scales_of(matrix, row, K);
        for (int64_t b = 0; b < K / BLOCK_SIZE; b++) {
            if (scales[b] == SCALE_NAN) return -1;
            if (is_zero_block(codes + b * BLOCK_BYTES)) continue;
            if (scales[b] < least) least = scales[b];
            if (scales[b] > most) most = scales[b];
        }
    }
    int32_t base = most > CUDA_SCALE_MAX ? most - CUDA_SCALE_MAX : 0;
    return least >= base + CUDA_SCALE_MIN ? base : -1;
}

/* A code's place in a register's half. */
static uint32_t spread(unsigned code)
{
    return (code & 8u) << 12 | (code & 7u) << 6;
}

/* The word that decodes to four registers of codes, each already spread over a pair. */
static uint32_t join_registers(const uint32_t pairs[4])
{
    /* the first three own their bits; what they leave is bits 0, 1, 9, 10 of each half */
    uint32_t word = pairs[0] | pairs[1] >> 4 | rotate_left(pairs[2], 22);
    /* in r = rotl(word, 6) those are bits 6, 7, 15 and 0 of each half, found from what is known upwards */
    static const int8_t order[8][2] = {{6, 6}, {7, 7}, {8, 0}, {15, 15}, {24, 16}, {22, 22}, {23, 23}, {31, 31}};
    uint32_t r = rotate_left(word, 6);
    for (int32_t n = 0; n < 8; n++) {
        uint32_t wrong = (r ^ r << 8 ^ pairs[3]) >> order[n][0] & 1u;
        r ^= wrong << order[n][1];
    }
    return rotate_left(r, 26);
}

static void split_word(uint32_t word, uint32_t pairs[4])
{
    uint32_t r = rotate_left(word, 6);
    pairs[0] = word & pair_mask;
    pairs[1] = word << 4 & pair_mask;
    pairs[2] = rotate_left(word, 10) & pair_mask;
    pairs[3] = (r ^ r << 8) & pair_mask;
}

/* A row's part in the codes of a step: which of its codes lane and word want is a matter of k alone. */
struct step_codes {
    uint8_t of[CUDA_TILE_ROWS][CUDA_STEP_K];
};

static void pack_codes(const struct step_codes *codes, uint8_t *packed)
{
    for (int32_t warp = 0; warp < 4; warp++)
        for (int32_t lane = 0; lane < 32; lane++)
            for (int32_t j = 0; j < 4; j++, packed += 4) {
                uint32_t pairs[4];
                for (int32_t n = 0; n < 4; n++) {
                    const uint8_t *row = codes->of[warp * 16 + lane / 4 + n % 2 * 8];
                    int32_t k = 16 * j + 2 * (lane % 4) + n / 2 * 8;
                    pairs[n] = spread(row[k]) | spread(row[k + 1]) << 16;
                }
                uint32_t word = join_registers(pairs);
                memcpy(packed, &word, sizeof word);
            }
}

/* Codes and scales of row r of a step; zeros under a harmless scale past the matrix's end. */
static void gather_row(const moe4_matrix *matrix, int64_t K, int64_t row, int64_t first_k, int32_t base, int32_t r,
                       struct step_codes *codes, uint8_t *packed)
{
    for (int32_t b = 0; b < 2; b++) {
        int64_t block = first_k / BLOCK_SIZE + b;
        uint8_t *scale = packed + r / 16 * 32 + r % 8 * 4 + b * 2 + r / 8 % 2;
        *scale = CUDA_SCALE_OFFSET + 1;
        memset(codes->of[r] + b * BLOCK_SIZE, 0, BLOCK_SIZE);
        if (row < 0 || block >= K / BLOCK_SIZE) continue;
        const uint8_t *in = codes_of(matrix, row, K) + block * BLOCK_BYTES;
        if (is_zero_block(in)) continue;
        *scale = (uint8_t)(scales_of(matrix, row, K)[block] - base + CUDA_SCALE_OFFSET);
        for (int32_t k = 0; k < BLOCK_SIZE; k++) codes->of[r][b * BLOCK_SIZE + k] = (uint8_t)mxfp4_code(in, k);
    }
}

void cuda_pack_tile(const moe4_matrix *matrix, int64_t K, const struct cuda_row_order *order, int64_t tile,
                    int32_t base, uint8_t *packed, float *bias)
{
    for (int32_t r = 0; r < CUDA_TILE_ROWS; r++) {
        int64_t row = cuda_source_row(order, tile, r);
        bias[r] = row < 0 || !matrix->bias ? 0.0f : load_f32(matrix->bias, matrix->bias_dtype, row);
    }
    for (int64_t k = 0; k < K; k += CUDA_STEP_K, packed += CUDA_STEP_BYTES) {
        struct step_codes codes;
        for (int32_t r = 0; r < CUDA_TILE_ROWS; r++)
            gather_row(matrix, K, cuda_source_row(order, tile, r), k, base, r, &codes, packed);
        pack_codes(&codes, packed + CUDA_STEP_SCALES);
    }
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
