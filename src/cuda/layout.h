/* How the CUDA backend keeps an expert's weights: tiles of 64 rows, each one contiguous run that a bulk copy can move,
 * in the order in which a warpgroup's registers want them as wgmma's operand A.
 *
 * A matrix [rows, K] is cut into TILES of 64 rows; a tile is one run of ceil(K/64) STEPS, each 2176 bytes:
 *
 *   bytes 0..127      scales   [4 warps][8 g][4]         rows g and g+8 of the warp's 16, both blocks of 32 k:
 *                              (g, k<32) (g+8, k<32) (g, k>=32) (g+8, k>=32)
 *   bytes 128..2175   codes    [4 warps][32 lanes][4]    32-bit words, word j holding k = 16j .. 16j+15
 *
 * Lane l of a warp has g = l/4, t = l%4.  Its word j decodes to the four registers of an m64n.k16 fragment, each a pair
 * of bf16, lower k in the low half:
 *
 *   register 0: row g, k = 2t, 2t+1     1: row g+8, the same k     2: row g, k + 8     3: row g+8, k + 8
 *
 * Decoding a word.  A code's bits s eem, at bits 15 and 8..6 of a half, are the bf16 code's value times 2^-126; the
 * product with the scale's power of two is then exact, subnormal pattern or not.  With M = 0x81C081C0 the registers are
 *
 *   0: w & M    1: (w << 4) & M    2: rotl(w, 10) & M    3: (r ^ r << 8) & M, r = rotl(w, 6)
 *
 * (no four masked rotations of a word are disjoint, which is why one takes an exclusive or).  The stored scale byte is
 * the exponent field of the bf16 factor: E8M0 byte - base + 126, `base` being one number an expert, 0 unless it has
 * scales above 2^1.  Products and sums are 2^-base too small, which the epilogue undoes.  Exact for E8M0 bytes
 * base+2 .. base+128, base being at most 14.
 *
 * The fp8 arrangement, for layers that compute in fp8, has the same bytes but other words: word j holds eight codes of
 * row g (j = 0, 2) or g+8 (1, 3) and of the step's first (0, 1) or second (2, 3) block, k = 4t .. 4t+3 and 16+4t ..
 * 16+4t+3 of it.  Each nibble's low three bits are a magnitude, which selects a byte of a table; the signs of the first
 * four codes are the top bits of the bytes, those of the others four bits below.  They decode to the registers
 *
 *   (row g, k = 4t ..) (row g+8, same k) (row g, k + 16) (row g+8, k + 16)
 *
 * of an m64n.k32 fragment in e5m2, exact where a tile's scales span up to 27 binades: a number a tile, its base, is the
 * stored scale byte under which 0.5 becomes the least normal number.  Experts with wider tiles are stored raw.
 *
 * Rows.  Row r of a tile belongs to warp r/16, g = r%8 and half h = r/8%2.  A gated gate/up tile holds gates (h = 0)
 * and ups (h = 1) of i = 32*tile + 8*warp + g, so that one thread has both; every other matrix has row
 * 64*tile + 16*warp + 2g + h, so that one thread has neighbours.  Rows and k past the end are zero codes. */
#ifndef MOE4_CUDA_LAYOUT_H
#define MOE4_CUDA_LAYOUT_H

#include <stdint.h>

#include "moe4/moe4.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    CUDA_TILE_ROWS = 64,
    CUDA_STEP_K = 64,
    CUDA_STEP_SCALES = 128, /* bytes of scales in front of a step's codes */
    CUDA_STEP_BYTES = CUDA_STEP_SCALES + CUDA_TILE_ROWS * CUDA_STEP_K / 2,
    CUDA_GATED_COLUMNS = 32, /* columns of I that a gated tile yields */
    CUDA_SCALE_OFFSET = 126, /* stored byte = E8M0 byte - base + this */
    CUDA_SCALE_MIN = 2,      /* of E8M0 byte - base, for exact decoding */
    CUDA_SCALE_MAX = 128,
    CUDA_BASE_MAX = 14,  /* products are as much too small: those of small weights and activations must not vanish */
    CUDA_FP8_SPAN = 26,  /* binades between a tile's scales that the fp8 arrangement allows */
    CUDA_FP8_LEAST = 40, /* its least and largest E8M0 byte */
    CUDA_FP8_MOST = 180,
    CUDA_RAW_BASE = CUDA_SCALE_OFFSET /* stores E8M0 bytes as they are: experts that take the exact kernel */
};

/* What it takes to find a tile's rows in a checkpoint matrix. */
struct cuda_row_order {
    int is_gated;
    moe4_gate_up gate_up;
    int64_t rows;        /* of the matrix; gated: I */
    int64_t stored_rows; /* gated: rows of one stored half */
};

int64_t cuda_tile_count(const struct cuda_row_order *order);
int64_t cuda_step_count(int64_t K);

/* The matrix row behind row r of a tile; -1 where the tile is padding. */
int64_t cuda_source_row(const struct cuda_row_order *order, int64_t tile, int32_t r);

/* Rows of the checkpoint's matrix, what pads its stored halves included. */
int64_t cuda_stored_rows(const struct cuda_row_order *order);

/* The base that lets a matrix [.., K] be decoded exactly, or -1 where none does: the scales of blocks that are not all
 * zeros decide. */
int32_t cuda_scale_base(const moe4_matrix *matrix, const struct cuda_row_order *order, int64_t K);

/* Packs a tile of an MXFP4 matrix [.., K] and its biases (64 floats, 0 where there is none). */
void cuda_pack_tile(const moe4_matrix *matrix, int64_t K, const struct cuda_row_order *order, int64_t tile,
                    int32_t base, uint8_t *packed, float *bias);

/* The weight at row r, k = 0..63 of a packed step, as the kernels decode it (2^-base of the true one). */
float cuda_step_weight(const uint8_t *step, int32_t r, int32_t k);

#ifdef __cplusplus
}
#endif
#endif
