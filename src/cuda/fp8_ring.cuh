/* What producers and consumers of the fp8 GEMMs (fp8.cuh) share: the ring of stages in shared memory, and the items, a
 * token tile and a group of weight tiles each, that a block goes through. */
#ifndef MOE4_CUDA_FP8_RING_CUH
#define MOE4_CUDA_FP8_RING_CUH

#include "cuda/fp8.h"
#include "cuda/fp8_intermediate.cuh"
#include "cuda/layout.h"
#include "cuda/ptx.cuh"

namespace fp8
{

enum : int {
    WARPGROUP = 128,
    G = 2, /* consumer warpgroups */
    THREADS = (G + 1) * WARPGROUP,
    PRODUCER_REGISTERS = 40,
    CONSUMER_REGISTERS = 232
};

/* A stage holds two blocks of 128 k if its rows leave room. */
enum : int { NARROW = 112, BLOCK_STEPS = FP8_BLOCK / CUDA_STEP_K };
enum : int { BLOCK_BYTES_W = BLOCK_STEPS * CUDA_STEP_BYTES }; /* of one tile's weights */

/* A stage: rows of x, 128 bytes a block, then each warpgroup's packed weights, then the rows' scales. */
template <int N> struct width {
    static constexpr int rows = N <= NARROW ? (int)NARROW : (int)FP8_MAX_ROWS; /* room */
    static constexpr int stage_blocks = N <= NARROW ? 2 : 1;
    static constexpr int x_bytes = rows * FP8_BLOCK; /* of a block */
    static constexpr int weights = stage_blocks * x_bytes, tile_bytes = stage_blocks * BLOCK_BYTES_W;
    static constexpr int scales = weights + G * tile_bytes;
    static constexpr int bytes = (scales + stage_blocks * rows * 4 + 1023) / 1024 * 1024;
};
enum : int { STAGE_BYTES = width<FP8_MAX_ROWS>::bytes };
static_assert(width<NARROW>::bytes <= STAGE_BYTES, "the largest");

enum : int { V_BYTES = FP8_MAX_ROWS * V_PITCH };

enum : int { X_SCALE_BYTES = FP8_MAX_ROWS * 4 };

enum : int { CLAIMS = 8 }; /* that are kept: stages and v, which wait for each other, let nobody be six items behind */

enum kind { GATE_UP, DOWN };
template <kind k> struct ring_size {
    static constexpr int stages = k == DOWN ? 4 : 3;
    static constexpr int v = stages * STAGE_BYTES;                 /* where the intermediate lies */
    static constexpr int x_scales = v + (k == DOWN ? 0 : V_BYTES); /* a copy a consumer warpgroup, of two items */
    static constexpr int barriers = x_scales + (k == DOWN ? 0 : 2 * G * X_SCALE_BYTES);
    static constexpr int bytes = barriers + (2 * stages + 2 + CLAIMS) * 8 + CLAIMS * 4 + 1024;
    static_assert(bytes <= 227 * 1024, "what a block may have");
};

struct gemm_ring {
    uint32_t stages, full, empty, v, x_scales, v_full, v_empty, claimed, claims; /* shared addresses */
};

template <kind k> struct ring_position {
    uint32_t stage = 0, parity = 0;
    __device__ __forceinline__ void advance()
    {
        if (++stage == ring_size<k>::stages) stage = 0, parity ^= 1;
    }
};

template <moe4_activation activation>
constexpr bool is_gated = activation != MOE4_ACTIVATION_IDENTITY &&activation != MOE4_ACTIVATION_RELU2;

/* Pairs of tiles that an item takes one after the other: gated gate/up yields 128 columns in two. */
template <kind k, moe4_activation activation> constexpr int passes = k == GATE_UP &&is_gated<activation> ? 2 : 1;

struct gemm_item {
    token_tile tokens;
    int group; /* of n_passes * G tiles */
};

/* The items of a block: the first two by its number, the others as its weights' producer claims them, so that blocks
 * whose items take longer get fewer. */
template <int n_passes> struct item_list {
    int groups, n, index;
    uint32_t turn = 0;

    __device__ __forceinline__ item_list(const fp8_call &call)
    {
        groups = (call.n_tiles + n_passes * G - 1) / (n_passes * G);
        n = *call.n_token_tiles * groups;
        index = (int)blockIdx.x;
    }
    __device__ __forceinline__ bool is_over() const
    {
        return index >= n;
    }
    __device__ __forceinline__ void advance(const gemm_ring &ring)
    {
        turn++;
        if (turn == 1) {
            index += (int)gridDim.x;
        } else {
            const uint32_t slot = turn % CLAIMS;
            barrier_wait(ring.claimed + slot * 8, (turn - 2) / CLAIMS & 1);
            index = (int)load_shared_4(ring.claims + slot * 4);
        }
    }
    __device__ __forceinline__ gemm_item load(const fp8_call &call) const
    {
        const int at = min(index, n - 1); /* past the end, too, for whoever reads ahead */
        return {call.token_tiles[max(at, 0) / groups], at % groups};
    }
};

/* Claims the item after the next, and leaves it where the block finds it, long after it was asked for. */
struct claimer {
    int32_t *counter;
    uint32_t turn = 2;
    int claimed;

    __device__ __forceinline__ explicit claimer(int32_t *counter) : counter(counter), claimed(claim()) {}
    __device__ __forceinline__ int claim() const
    {
        return counter ? atomicAdd(counter, 1) + 2 * (int)gridDim.x : 0;
    }
    __device__ __forceinline__ void publish(const gemm_ring &ring)
    {
        const uint32_t slot = turn++ % CLAIMS;
        store_shared_4(ring.claims + slot * 4, claimed);
        barrier_arrive(ring.claimed + slot * 8);
        claimed = claim();
    }
};

/* Whether an item has tiles left for a pass. */
template <int n_passes>
static __device__ __forceinline__ bool has_pass(const fp8_call &call, const gemm_item &item, int pass)
{
    return (item.group * n_passes + pass) * G < call.n_tiles;
}

static __device__ __forceinline__ int block_count(const fp8_call &call)
{
    return (call.n_steps + BLOCK_STEPS - 1) / BLOCK_STEPS;
}

} // namespace fp8

#endif
