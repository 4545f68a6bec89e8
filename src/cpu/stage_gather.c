/* gather: the rows of x that a token tile needs, as the kernels read them: runs interleaved, what a kernel converts
 * these to, or in int8 compute codes with their scales.  Of the intermediate, which is stored by tiles, only what is
 * converted.  The first thread that needs a tile gathers it, while others gather the expert's other tiles. */
#include <stdatomic.h>
#include <string.h>

#include "cpu/forward.h"
#include "cpu/int8.h"
#include "cpu/pool.h"
#include "cpu/tame.h"

enum {
    NOT_GATHERED,
    BEING_GATHERED,
    GATHERED,
    RUN = 256 /* elements quantised at a time: whole blocks */
};

size_t gather_scratch_bytes(const struct moe4_layer *layer, int64_t n_rows)
{
    const int64_t n = n_rows < LARGE_TILE_TOKENS ? n_rows : LARGE_TILE_TOKENS;
    return (size_t)(n * layer->H) * sizeof(uint16_t);
}

void gather_runs(const uint16_t *const *rows, int32_t n_rows, int64_t n, int32_t run, uint16_t *packed)
{
    if (n_rows == 1) {
        memcpy(packed, rows[0], (size_t)n * 2);
    } else if (run == PAIR) {
        for (int64_t k = 0; k < n; k += PAIR)
            for (int32_t row = 0; row < n_rows; row++, packed += PAIR) memcpy(packed, rows[row] + k, PAIR * 2);
    } else {
        for (int64_t k = 0; k < n; k += BLOCK_SIZE)
            for (int32_t row = 0; row < n_rows; row++, packed += BLOCK_SIZE)
                memcpy(packed, rows[row] + k, BLOCK_SIZE * 2);
    }
}

static void gather_bf16(const struct forward *f, const struct tile *tile, int32_t run, const uint16_t *const *rows)
{
    const int64_t H = f->layer->H;
    uint16_t *packed = f->x + tile->first_row * H;
    gather_runs(rows, tile->n_rows, H, run, packed);
    if (f->call->batch->compute == MOE4_COMPUTE_FP8) return; /* codes need no taming */
    for (int32_t row = 0; row < tile->n_rows; row++)
        f->x_factor[tile->first_row + row] =
            tame_row(packed, tile->n_rows, run, row, H, f->prepared->rows->largest(rows[row], H));
}

static void gather_int8(const struct forward *f, const struct tile *tile, const uint16_t *const *rows)
{
    const int64_t H = f->layer->H;
    for (int32_t row = 0; row < tile->n_rows; row++) {
        int32_t *packed = int8_tile(f->x, tile->first_row, H);
        for (int64_t k = 0; k < H; k += RUN) {
            int64_t n = H - k < RUN ? H - k : RUN;
            int8_t codes[RUN];
            float scales[RUN / BLOCK_SIZE];
            f->prepared->rows->quantize_int8(rows[row] + k, n, codes, scales);
            packed = int8_pack(codes, scales, n / BLOCK_SIZE, tile->n_rows, row, packed);
        }
    }
}

static void gather_tile(const struct forward *f, const struct active_expert *expert, const struct tile *tile,
                        int32_t worker)
{
    uint16_t *room = (uint16_t *)(f->scratch + (size_t)worker * f->plan.scratch_bytes);
    const uint16_t *rows[LARGE_TILE_TOKENS];
    for (int32_t row = 0; row < tile->n_rows; row++)
        rows[row] = converted_row(f, f->slot_of_row[tile->first_row + row], room + row * f->layer->H,
                                  &f->x_factor[tile->first_row + row]);
    const struct kernel *kernel = forward_x_kernel(f, expert);
    if (forward_is_int8(f))
        gather_int8(f, tile, rows);
    else
        gather_bf16(f, tile, kernel->run, rows);
    if (kernel->convert)
        kernel->convert(f->x + tile->first_row * f->layer->H, f->layer->H / BLOCK_SIZE, tile->n_rows,
                        forward_operand(f, kernel, tile, f->layer->H, 0));
}

/* A tile's intermediate, each group of columns by itself, as it is multiplied by itself. */
static void convert_tile(const struct forward *f, const struct active_expert *expert, const struct tile *tile,
                         int32_t worker)
{
    (void)worker;
    const struct kernel *kernel = forward_kernel(f, expert);
    const int64_t I = f->layer->I;
    for (int64_t k = 0; k < I; k += f->group_size) {
        const int64_t n = I - k < f->group_size ? I - k : f->group_size;
        kernel->convert(f->intermediate + tile->first_row * I + k * tile->n_rows, n / BLOCK_SIZE, tile->n_rows,
                        forward_operand(f, kernel, tile, I, k));
    }
}

typedef void gather_fn(const struct forward *f, const struct active_expert *expert, const struct tile *tile,
                       int32_t worker);

static void gather_tiles(struct forward *f, const struct active_expert *expert, gather_fn *gather, int32_t worker)
{
    _Atomic int32_t *state = f->gathered + expert->first_tile;
    for (int32_t i = 0; i < expert->n_tiles; i++) {
        int32_t expected = NOT_GATHERED;
        if (atomic_load_explicit(&state[i], memory_order_relaxed) != NOT_GATHERED) continue;
        if (!atomic_compare_exchange_strong_explicit(&state[i], &expected, BEING_GATHERED, memory_order_relaxed,
                                                     memory_order_relaxed))
            continue;
        gather(f, expert, &f->tiles[expert->first_tile + i], worker);
        atomic_store_explicit(&state[i], GATHERED, memory_order_release);
    }
    for (int32_t i = 0; i < expert->n_tiles; i++) pool_await(&state[i], GATHERED);
}

void gather_expert(struct forward *f, const struct active_expert *expert, int32_t worker)
{
    gather_tiles(f, expert, gather_tile, worker);
}

void gather_intermediate(struct forward *f, const struct active_expert *expert, int32_t worker)
{
    if (forward_kernel(f, expert)->convert) gather_tiles(f, expert, convert_tile, worker);
}

void gather_begin(struct forward *f)
{
    for (int32_t i = 0; i < f->n_tiles; i++) atomic_store_explicit(&f->gathered[i], NOT_GATHERED, memory_order_relaxed);
}
