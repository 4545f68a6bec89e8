#include "cpu/prepared.h"

#include <stdatomic.h>
#include <sys/mman.h>
#include <unistd.h>

#include "backend.h"
#include "base/checked.h"
#include "base/dtype.h"
#include "context.h"
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

static void init_matrix(struct packed_matrix *matrix, enum panel_order order, moe4_gate_up gate_up, int64_t rows,
                        int64_t stored_rows, int64_t K)
{
    matrix->order = (struct row_order){order, gate_up, rows, stored_rows};
    matrix->K = K;
    matrix->n_panels = panel_count(&matrix->order);
    matrix->panel_bytes = K / BLOCK_SIZE * PANEL_BLOCK_BYTES;
}

static size_t bias_bytes(const struct packed_matrix *matrix, int32_t L)
{
    return (size_t)L * (size_t)matrix->n_panels * PANEL_ROWS * sizeof(float);
}

static size_t panels_bytes(const struct packed_matrix *matrix, int32_t L)
{
    return (size_t)L * (size_t)matrix->n_panels * (size_t)matrix->panel_bytes;
}

static moe4_status allocate_matrix(struct moe4_context *context, struct packed_matrix *matrix, int32_t L,
                                   const char *name)
{
    size_t expert_bytes, bytes;
    if (!size_multiply((size_t)matrix->n_panels, (size_t)matrix->panel_bytes, &expert_bytes) ||
        !size_multiply(expert_bytes, (size_t)L, &bytes))
        return context_fail(context, MOE4_EINVAL, "%s weights of %d experts do not fit the address space", name, L);
    if (!(matrix->panels = memory_allocate(&context->allocator, bytes)))
        return context_fail_memory(context, name, bytes);
    advise_huge_pages(matrix->panels, bytes);
    if (!(matrix->bias = memory_allocate(&context->allocator, bias_bytes(matrix, L))))
        return context_fail_memory(context, name, bias_bytes(matrix, L));
    return MOE4_OK;
}

static void release_matrix(const moe4_allocator *allocator, struct packed_matrix *matrix, int32_t L)
{
    memory_release(allocator, matrix->bias, bias_bytes(matrix, L));
    memory_release(allocator, matrix->panels, panels_bytes(matrix, L));
}

/* One expert being packed by all threads, a panel at a time: first all of gate_up, then all of down. */
struct pack_job {
    struct prepared *prepared;
    const moe4_expert *expert;
    int32_t l;
    _Atomic int64_t next;
    _Atomic int has_extreme_scale;
};

static int pack_panel(struct packed_matrix *matrix, const moe4_matrix *source, int32_t l, int64_t panel)
{
    return layout_pack_panel(source, matrix->K, &matrix->order, panel, (uint8_t *)packed_panel(matrix, l, panel),
                             (float *)packed_bias(matrix, l, panel));
}

static void pack_worker(void *argument, int32_t worker)
{
    (void)worker;
    struct pack_job *job = argument;
    struct packed_matrix *gate_up = &job->prepared->gate_up, *down = &job->prepared->down;
    for (;;) {
        int64_t panel = atomic_fetch_add_explicit(&job->next, 1, memory_order_relaxed);
        if (panel >= gate_up->n_panels + down->n_panels) return;
        int is_fast = panel < gate_up->n_panels
                          ? pack_panel(gate_up, &job->expert->gate_up, job->l, panel)
                          : pack_panel(down, &job->expert->down, job->l, panel - gate_up->n_panels);
        if (!is_fast) atomic_store_explicit(&job->has_extreme_scale, 1, memory_order_relaxed);
    }
}

static moe4_status check_matrix(struct moe4_context *context, const moe4_matrix *matrix, int64_t K, int32_t l,
                                const char *name)
{
    if (!matrix->codes || !matrix->scales)
        return context_fail(context, MOE4_EINVAL, "expert %d: %s.%s is NULL", l, name,
                            matrix->codes ? "scales" : "codes");
    if (matrix->codes_row_bytes && matrix->codes_row_bytes < K / 2)
        return context_fail(context, MOE4_EINVAL, "expert %d: %s.codes_row_bytes is %lld, expected at least %lld", l,
                            name, (long long)matrix->codes_row_bytes, (long long)K / 2);
    if (matrix->scales_row_bytes && matrix->scales_row_bytes < K / BLOCK_SIZE)
        return context_fail(context, MOE4_EINVAL, "expert %d: %s.scales_row_bytes is %lld, expected at least %lld", l,
                            name, (long long)matrix->scales_row_bytes, (long long)K / BLOCK_SIZE);
    if (matrix->bias && !dtype_is_float(matrix->bias_dtype))
        return context_fail(context, MOE4_EINVAL, "expert %d: %s.bias_dtype is %s, expected f32, f16 or bf16", l, name,
                            dtype_name(matrix->bias_dtype));
    return MOE4_OK;
}

static moe4_status pack_expert(struct moe4_context *context, struct prepared *prepared, int32_t l,
                               const moe4_expert *expert)
{
    moe4_status status = check_matrix(context, &expert->gate_up, prepared->gate_up.K, l, "gate_up");
    if (!status) status = check_matrix(context, &expert->down, prepared->down.K, l, "down");
    if (status) return status;
    struct pack_job job = {.prepared = prepared, .expert = expert, .l = l};
    pool_run(context->pool, pack_worker, &job);
    prepared->is_exact[l] = (uint8_t)job.has_extreme_scale;
    prepared->n_exact += prepared->is_exact[l];
    return MOE4_OK;
}

static moe4_status pack_experts(struct moe4_context *context, struct prepared *prepared, int32_t L,
                                const moe4_expert_source *source)
{
    for (int32_t l = 0; l < L; l++) {
        moe4_expert expert = {0};
        context->message[0] = '\0';
        moe4_status status = source->read(source->user, l, &expert);
        if (status && !context->message[0]) context_fail(context, status, "expert %d: its source failed", l);
        if (!status) status = pack_expert(context, prepared, l, &expert);
        if (status) return status;
    }
    return MOE4_OK;
}

static void choose_kernels(struct prepared *prepared, moe4_isa isa, moe4_activation activation)
{
    const struct activation_kernels *activations = activation_kernels_for(isa);
    prepared->isa = isa;
    prepared->kernel = kernel_best(isa);
    prepared->rows = row_kernels_for(isa);
    prepared->activate = activations->run[activation];
    prepared->round = activations->round;
    prepared->chunk_rows = CHUNK_ROWS;
}

moe4_status prepared_create(struct moe4_context *context, struct moe4_layer *layer, const moe4_expert_source *source)
{
    struct prepared *prepared = memory_allocate_zeroed(&context->allocator, sizeof *prepared);
    if (!prepared) return context_fail_memory(context, "a prepared layer", sizeof *prepared);
    layer->prepared = prepared;
    choose_kernels(prepared, context->isa, layer->activation);
    enum panel_order order = activation_has_gate(layer->activation) ? PANEL_GATED : PANEL_PLAIN;
    init_matrix(&prepared->gate_up, order, layer->gate_up, layer->I, layer->stored_intermediate_size, layer->H);
    init_matrix(&prepared->down, PANEL_PLAIN, MOE4_GATE_UP_NONE, layer->H, layer->H, layer->I);

    moe4_status status = allocate_matrix(context, &prepared->gate_up, layer->L, "gate_up");
    if (!status) status = allocate_matrix(context, &prepared->down, layer->L, "down");
    if (status) return status;
    prepared->is_exact = memory_allocate_zeroed(&context->allocator, (size_t)layer->L);
    if (!prepared->is_exact) return context_fail_memory(context, "the experts' kernels", (size_t)layer->L);
    return pack_experts(context, prepared, layer->L, source);
}

void prepared_destroy(struct moe4_layer *layer)
{
    struct prepared *prepared = layer->prepared;
    memory_release(&layer->allocator, prepared->is_exact, (size_t)layer->L);
    release_matrix(&layer->allocator, &prepared->down, layer->L);
    release_matrix(&layer->allocator, &prepared->gate_up, layer->L);
    memory_release(&layer->allocator, prepared, sizeof *prepared);
}
