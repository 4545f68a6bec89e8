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

#endif
