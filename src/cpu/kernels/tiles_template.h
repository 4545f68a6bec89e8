/* Tiles of 1 to 12 tokens, for AVX-512 kernels that pass over a panel once or more, some of its four subtiles of 16
 * rows at a time.  Whoever includes this has written pass() and defined
 *
 *   TILE_X   the type of the activations that pass() takes
 *
 * A tile is compiled for its number of tokens, which pass() needs as a constant.  tiles[n] is the one of n. */
#define GEMM_TILE(n)                                                                                                   \
    static void gemm_tile_##n(const uint8_t *panel, int64_t n_blocks, const TILE_X *x, float *sums,                    \
                              struct read_ahead *ahead)                                                                \
    {                                                                                                                  \
        enum { N_SUB = (n) <= 3 ? 4 : (n) <= 6 ? 2 : 1 /* fit the registers, sums and those of a block */ };           \
        for (int first = 0; first < 4; first += N_SUB) pass(panel, n_blocks, x, n, first, N_SUB, sums, ahead);         \
    }
GEMM_TILE(1)
GEMM_TILE(2)
GEMM_TILE(3)
GEMM_TILE(4)
GEMM_TILE(5)
GEMM_TILE(6)
GEMM_TILE(7)
GEMM_TILE(8)
GEMM_TILE(9)
GEMM_TILE(10)
GEMM_TILE(11)
GEMM_TILE(12)

static void (*const tiles[])(const uint8_t *, int64_t, const TILE_X *, float *, struct read_ahead *) = {
    NULL,        gemm_tile_1, gemm_tile_2, gemm_tile_3,  gemm_tile_4,  gemm_tile_5, gemm_tile_6,
    gemm_tile_7, gemm_tile_8, gemm_tile_9, gemm_tile_10, gemm_tile_11, gemm_tile_12};
