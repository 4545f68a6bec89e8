#include "cpu/prepared.h"

#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "backend.h"
#include "base/checked.h"
#include "context.h"
#include "cpu/kernels/pack.h"
#include "cpu/pool.h"

/* Routed rows of a chunk: enough that reading all weights once a chunk costs little (a few percent at most), few enough
 * that the buffers of a huge batch stay at a few hundred megabytes. */
enum { CHUNK_ROWS = 16384 };

/* Packed weights are read in long runs by every thread: fewer, larger pages.  Only advice, so failure is no matter. */
static void advise_huge_pages(void *memory, size_t bytes)
{
#ifdef MADV_HUGEPAGE
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    uintptr_t first = ((uintptr_t)memory + page - 1) / page * page, end = ((uintptr_t)memory + bytes) / page * page;
    if (end > first) madvise((void *)first, end - first, MADV_HUGEPAGE);
#else
    (void)memory, (void)bytes;
#endif
}

static void plan_matrix(struct packed_matrix *matrix, enum panel_order order, moe4_gate_up gate_up, int64_t rows,
                        int64_t stored_rows, int64_t K)
{
    matrix->order = (struct row_order){order, gate_up, rows, stored_rows};
    matrix->K = K;
    matrix->n_panels = panel_count(&matrix->order);
    matrix->panel_bytes = K / BLOCK_SIZE * PANEL_BLOCK_BYTES;
}

static struct layer_part panels_part(const char *name, struct packed_matrix *matrix, int32_t L)
{
    return (struct layer_part){.name = name,
                               .dtype = "U8",
                               .rank = 3,
                               .shape = {L, matrix->n_panels, matrix->panel_bytes},
                               .slot = (void **)&matrix->panels};
}

static struct layer_part bias_part(const char *name, struct packed_matrix *matrix, int32_t L)
{
    return (struct layer_part){.name = name,
                               .dtype = "F32",
                               .rank = 3,
                               .shape = {L, matrix->n_panels, PANEL_ROWS},
                               .slot = (void **)&matrix->bias};
}

moe4_status prepared_list_parts(struct moe4_context *context, const struct moe4_layer *layer, struct layer_part *parts,
                                int32_t *n_parts)
{
    struct prepared *prepared = layer->prepared;
    const struct layer_part all[] = {
        panels_part("gate_up.panels", &prepared->gate_up, layer->L),
        panels_part("down.panels", &prepared->down, layer->L),
        bias_part("gate_up.bias", &prepared->gate_up, layer->L),
        bias_part("down.bias", &prepared->down, layer->L),
        {.name = "is_exact", .dtype = "U8", .rank = 1, .shape = {layer->L}, .slot = (void **)&prepared->is_exact},
    };
    *n_parts = sizeof all / sizeof *all;
    memcpy(parts, all, sizeof all);
    return layer_size_parts(context, layer, parts, *n_parts);
}

void *prepared_allocate_part(const struct moe4_layer *layer, size_t bytes)
{
    return memory_allocate(&layer->allocator, bytes);
}

void prepared_release_part(const struct moe4_layer *layer, void *memory, size_t bytes)
{
    memory_release(&layer->allocator, memory, bytes);
}

/* One expert being packed by all threads, a panel at a time: of each node first its part of gate_up, then of down. */
struct pack_job {
    struct prepared *prepared;
    const moe4_expert *expert;
    int32_t l;
    const struct topology *topology;
    _Atomic int64_t next[MAX_NODES];
    _Atomic int is_awake[MAX_NODES]; /* a thread of the node has begun */
    _Atomic int has_extreme_scale;
};

static int pack_panel(pack_rows_fn *pack, struct packed_matrix *matrix, const moe4_matrix *source, int32_t l,
                      int64_t panel)
{
    return layout_pack_panel(pack, source, matrix->K, &matrix->order, panel, (uint8_t *)packed_panel(matrix, l, panel),
                             (float *)packed_bias(matrix, l, panel));
}

static void pack_panels_of_node(struct pack_job *job, int32_t node)
{
    struct packed_matrix *gate_up = &job->prepared->gate_up, *down = &job->prepared->down;
    pack_rows_fn *pack = job->prepared->pack;
    const int32_t n_nodes = job->topology->n_nodes;
    const int64_t first_gate_up = topology_first_panel(n_nodes, node, gate_up->n_panels);
    const int64_t first_down = topology_first_panel(n_nodes, node, down->n_panels);
    const int64_t n_gate_up = topology_first_panel(n_nodes, node + 1, gate_up->n_panels) - first_gate_up;
    const int64_t n_down = topology_first_panel(n_nodes, node + 1, down->n_panels) - first_down;
    for (;;) {
        int64_t i = atomic_fetch_add_explicit(&job->next[node], 1, memory_order_relaxed);
        if (i >= n_gate_up + n_down) return;
        int is_fast = i < n_gate_up ? pack_panel(pack, gate_up, &job->expert->gate_up, job->l, first_gate_up + i)
                                    : pack_panel(pack, down, &job->expert->down, job->l, first_down + i - n_gate_up);
        if (!is_fast) atomic_store_explicit(&job->has_extreme_scale, 1, memory_order_relaxed);
    }
}

/* A node's panels are left to its own threads, if there are any. */
static void pack_worker(void *argument, int32_t worker)
{
    (void)worker;
    struct pack_job *job = argument;
    const int32_t own = topology_node_here(job->topology);
    atomic_store_explicit(&job->is_awake[own], 1, memory_order_relaxed);
    pack_panels_of_node(job, own);
    for (int32_t node = 0; node < job->topology->n_nodes; node++)
        if (!atomic_load_explicit(&job->is_awake[node], memory_order_relaxed)) pack_panels_of_node(job, node);
}

static void pack_expert(struct moe4_context *context, struct prepared *prepared, int32_t l, const moe4_expert *expert)
{
    struct pack_job job = {.prepared = prepared, .expert = expert, .l = l, .topology = pool_topology(context->pool)};
    pool_run(context->pool, pack_worker, &job);
    prepared->is_exact[l] = (uint8_t)job.has_extreme_scale;
    prepared->n_exact += prepared->is_exact[l];
}

moe4_status prepared_fill(struct moe4_context *context, struct moe4_layer *layer, const moe4_expert_source *source)
{
    struct prepared *prepared = layer->prepared;
    advise_huge_pages(prepared->gate_up.panels,
                      (size_t)(layer->L * prepared->gate_up.n_panels * prepared->gate_up.panel_bytes));
    advise_huge_pages(prepared->down.panels, (size_t)(layer->L * prepared->down.n_panels * prepared->down.panel_bytes));
    for (int32_t l = 0; l < layer->L; l++) {
        moe4_expert expert;
        moe4_status status = layer_read_expert(context, layer, source, l, &expert);
        if (status) return status;
        pack_expert(context, prepared, l, &expert);
    }
    return MOE4_OK;
}

moe4_status prepared_check_parts(struct moe4_context *context, struct moe4_layer *layer)
{
    struct prepared *prepared = layer->prepared;
    for (int32_t l = 0; l < layer->L; l++) {
        if (prepared->is_exact[l] > 1)
            return context_fail(context, MOE4_EFORMAT, "is_exact[%d] is %d, expected 0 or 1", l, prepared->is_exact[l]);
        prepared->n_exact += prepared->is_exact[l];
    }
    return MOE4_OK;
}

moe4_status prepared_plan(struct moe4_context *context, struct moe4_layer *layer)
{
    struct prepared *prepared = memory_allocate_zeroed(&context->allocator, sizeof *prepared);
    if (!prepared) return context_fail_memory(context, "a prepared layer", sizeof *prepared);
    const struct activation_kernels *activations = activation_kernels_for(context->isa);
    layer->prepared = prepared;
    prepared->isa = context->isa;
    prepared->kernel = kernel_best(context->isa);
    prepared->kernel_int8 = kernel_int8_best(context->isa);
    prepared->rows = row_kernels_for(context->isa);
    prepared->pack = pack_rows_for(context->isa);
    prepared->activate = activations->run[layer->activation];
    prepared->round = activations->round;
    layer->chunk_rows = CHUNK_ROWS;
    enum panel_order order = activation_has_gate(layer->activation) ? PANEL_GATED : PANEL_PLAIN;
    plan_matrix(&prepared->gate_up, order, layer->gate_up, layer->I, layer->stored_intermediate_size, layer->H);
    plan_matrix(&prepared->down, PANEL_PLAIN, MOE4_GATE_UP_NONE, layer->H, layer->H, layer->I);
    return MOE4_OK;
}

void prepared_release(struct moe4_layer *layer)
{
    memory_release(&layer->allocator, layer->prepared, sizeof(struct prepared));
}
