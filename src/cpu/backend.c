/* The CPU behind the seam. */
#include "backend.h"

#include <time.h>

#include "cpu/combine.h"
#include "cpu/forward.h"
#include "cpu/isa.h"
#include "cpu/pool.h"
#include "cpu/prepared.h"

static moe4_status open_pool(struct moe4_context *context, const moe4_context_config *config)
{
    const moe4_thread_pool *threads = config->pool;
    if (config->n_threads < 0 || config->n_threads > 1024)
        return context_fail(context, MOE4_EINVAL, "n_threads is %d, expected 0 to 1024", config->n_threads);
    if (threads && (threads->width < 1 || !threads->run || config->n_threads))
        return context_fail(context, MOE4_EINVAL,
                            "pool has width %d, run %s, beside n_threads %d; expected 1 or more, set, 0",
                            threads->width, threads->run ? "set" : "NULL", config->n_threads);
    struct topology topology;
    topology_read(&topology, NULL);
    context->pool = threads ? pool_borrow(&context->allocator, threads, &topology)
                            : pool_create(&context->allocator, config->n_threads, &topology);
    if (!context->pool)
        return context_fail(context, MOE4_ENOMEM, "out of memory or threads: a pool of %d threads",
                            threads             ? threads->width
                            : config->n_threads ? config->n_threads
                                                : pool_available_cpus());
    return MOE4_OK;
}

static moe4_status cpu_open(struct moe4_context *context, const moe4_context_config *config)
{
    struct cpu_features features = isa_read_features();
    moe4_isa best = isa_best(&features);
    if (config->isa == MOE4_ISA_AUTO && !isa_enable(best)) {
        features.xcr0 &= ISA_XCR0_ALWAYS;
        best = isa_best(&features);
    }
    moe4_isa isa = config->isa == MOE4_ISA_AUTO ? best : config->isa;
    const char *name = isa_name(isa);
    if (!name) return context_fail(context, MOE4_EINVAL, "isa is %d, which is no level", isa);
    if (!isa_is_offered(&features, isa))
        return context_fail(context, MOE4_EUNSUPPORTED, "isa is %s, but this CPU offers %s", name, isa_name(best));
    if (!isa_enable(isa))
        return context_fail(context, MOE4_EUNSUPPORTED, "isa is %s, but the operating system does not grant its state",
                            name);
    context->isa = isa;
    isa_cpu_name(context->device_name, sizeof context->device_name);
    return open_pool(context, config);
}

static void cpu_close(struct moe4_context *context)
{
    pool_destroy(context->pool);
}

static void cpu_describe_context(const struct moe4_context *context, moe4_context_info *info)
{
    info->device = MOE4_DEVICE_CPU;
    info->isa = context->isa;
    info->isa_name = isa_name(context->isa);
    info->n_threads = pool_width(context->pool);
    info->device_name = context->device_name;
}

static moe4_status cpu_supports(struct moe4_context *context, const moe4_query *query)
{
    if (query->n_tokens > INT32_MAX)
        return context_fail(context, MOE4_EINVAL, "n_tokens is %lld, expected up to %d", (long long)query->n_tokens,
                            INT32_MAX);
    return MOE4_OK;
}

static void cpu_describe_layer(const struct moe4_layer *layer, moe4_layer_info *info)
{
    const struct prepared *prepared = layer->prepared;
    const struct packed_matrix *gate_up = &prepared->gate_up, *down = &prepared->down;
    info->kernel = prepared->kernel->name;
    info->order = prepared->kernel->for_x ? prepared->kernel->for_x->order : prepared->kernel->order;
    info->kernel_int8 = prepared->kernel_int8->name;
    info->order_int8 = prepared->kernel_int8->order;
    info->packed_bytes = layer->L * (gate_up->n_panels * gate_up->panel_bytes + down->n_panels * down->panel_bytes);
    info->n_exact_experts = prepared->n_exact;
}

static moe4_status cpu_workspace_bytes(struct moe4_context *context, const struct moe4_layer *layer, int64_t n_tokens,
                                       int32_t top_k, size_t *bytes)
{
    struct workspace_plan plan;
    moe4_status status = forward_plan(context, layer, n_tokens, top_k, &plan);
    if (!status) *bytes = plan.total;
    return status;
}

/* Whatever is wrong is found before a call returns. */
static moe4_status cpu_check_faults(struct moe4_context *context)
{
    (void)context;
    return MOE4_OK;
}

static void cpu_clear_faults(struct moe4_context *context)
{
    (void)context;
}

/* ---- Tuning ------------------------------------------------------------------------------------------------------ */

static const moe4_tactic cpu_tactics[] = {{0, 0}, {6, 0}, {8, 0}, {10, 0}, {0, 1}, {0, 2}, {0, 16}, {6, 2}};

static int cpu_tactic_is_valid(const moe4_tactic *tactic)
{
    int tile_fits = tactic->tile_tokens == 0 || (tactic->tile_tokens >= 4 && tactic->tile_tokens <= 12);
    return tile_fits && tactic->claim_share >= 0 && tactic->claim_share <= 64;
}

static int32_t cpu_calls_a_sample(int64_t n_tokens)
{
    (void)n_tokens;
    return 1;
}

static double now_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

static moe4_status cpu_time_calls(struct moe4_context *context, int32_t n,
                                  moe4_status (*run)(void *user, int32_t index, void *stream), void *user, double *ms)
{
    (void)context;
    moe4_status status = MOE4_OK;
    const double start = now_ms();
    for (int32_t i = 0; !status && i < n; i++) status = run(user, i, NULL);
    *ms = (now_ms() - start) / n;
    return status;
}

const struct backend backend_cpu = {.open = cpu_open,
                                    .close = cpu_close,
                                    .describe_context = cpu_describe_context,
                                    .supports = cpu_supports,
                                    .layout = "panels of 64 rows, blocks of 17 lines",
                                    .plan = prepared_plan,
                                    .list_parts = prepared_list_parts,
                                    .allocate_part = prepared_allocate_part,
                                    .release_part = prepared_release_part,
                                    .fill = prepared_fill,
                                    .check_parts = prepared_check_parts,
                                    .release = prepared_release,
                                    .describe_layer = cpu_describe_layer,
                                    .workspace_bytes = cpu_workspace_bytes,
                                    .forward = forward_run,
                                    .combine = combine_deferred,
                                    .tactics = cpu_tactics,
                                    .n_tactics = sizeof cpu_tactics / sizeof *cpu_tactics,
                                    .tactic_is_valid = cpu_tactic_is_valid,
                                    .calls_a_sample = cpu_calls_a_sample,
                                    .time_calls = cpu_time_calls,
                                    .check_faults = cpu_check_faults,
                                    .clear_faults = cpu_clear_faults};
