/* How an expert's rows are cut into token tiles. */
#ifndef MOE4_CUDA_TILING_H
#define MOE4_CUDA_TILING_H

#include <stdint.h>

#include "cuda/pack.h"

/* Tiles of nearly equal size, whole eights but for the last, at most `most` rows. */
struct tiling {
    int32_t n, rows;
};

static MOE4_BOTH inline struct tiling tile_rows(int32_t n_rows, int32_t most)
{
    const int32_t n = (n_rows + most - 1) / most;
    const int32_t rows = n ? ((n_rows + n - 1) / n + 7) / 8 * 8 : 8;
    const struct tiling cut = {(n_rows + rows - 1) / rows, rows};
    return cut;
}

#ifdef __cplusplus
extern "C" {
#endif

/* The most rows of a token tile that suit experts of `mean` rows, on a GPU that has all kernels: which one takes a GEMM
 * follows from it.  The steps are those of K in either matrix. */
int32_t choose_tile_rows(int32_t mean, int32_t gate_up_steps, int32_t down_steps);

/* Whether the kernel for such tiles has room for x, and the streaming one for that of two experts of so many rows,
 * since it must wait for x where it has not. */
int tile_rows_fit(int32_t rows, int32_t n_steps, int32_t mean);

#ifdef __cplusplus
}
#endif
#endif
