#include "cuda/tiling.h"

#include "cuda/gemm.h"

/* Kernels by the most rows of a token tile, each for experts of up to so many rows on average.  Narrow tiles decode an
 * expert's weights more often; wide ones leave less room for what hides latency. */
static const struct tile_choice {
    int32_t rows, mean;
} choices[] = {{STREAM_ROWS, 5}, {RESIDENT_ROWS - 8, 10}, {RESIDENT_ROWS, 17}, {NARROW_TOKENS, 64}};

int tile_rows_fit(int32_t rows, int32_t n_steps, int32_t mean)
{
    if (rows <= STREAM_ROWS) return stream_slots(n_steps) && stream_slots(n_steps) >= 2 * mean;
    return rows > RESIDENT_ROWS || resident_stages(n_steps, rows) > 0;
}

int32_t choose_tile_rows(int32_t mean, int32_t gate_up_steps, int32_t down_steps)
{
    for (size_t i = 0; i < sizeof choices / sizeof *choices; i++)
        if (mean <= choices[i].mean && tile_rows_fit(choices[i].rows, gate_up_steps, mean) &&
            tile_rows_fit(choices[i].rows, down_steps, mean))
            return choices[i].rows;
    return MAX_TOKENS;
}
