#include "packing.h"

#include <stdlib.h>

#include "command.h"
#include "memory.h"
#include "message.h"
#include "progress.h"

enum { MOST_EXPERTS = 4, MAX_BLOCKS = 16 };

/* An allocator that gives a released block to the next request for as many bytes. */
struct recycler {
    struct {
        void *memory;
        size_t n_bytes;
    } blocks[MAX_BLOCKS];
};

static void *recycle_allocate(void *user, size_t bytes, size_t alignment)
{
    struct recycler *recycler = user;
    for (int i = 0; i < MAX_BLOCKS; ++i)
        if (recycler->blocks[i].memory && recycler->blocks[i].n_bytes == bytes) {
            void *memory = recycler->blocks[i].memory;
            recycler->blocks[i].memory = NULL;
            return memory;
        }
    return bytes > SIZE_MAX - alignment ? NULL
                                        : aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
}

static void recycle_release(void *user, void *memory, size_t bytes)
{
    struct recycler *recycler = user;
    int i = 0;
    while (i < MAX_BLOCKS && recycler->blocks[i].memory) ++i;
    if (i == MAX_BLOCKS) {
        free(memory);
        return;
    }
    recycler->blocks[i].memory = memory;
    recycler->blocks[i].n_bytes = bytes;
}

/* A source that counts the time spent in another. */
struct timed_source {
    const moe4_expert_source *source;
    double seconds;
};

static moe4_status timed_read(void *user, int32_t local_expert, moe4_expert *expert)
{
    struct timed_source *timed = user;
    double started = seconds_now();
    moe4_status status = timed->source->read(timed->source->user, local_expert, expert);
    timed->seconds += seconds_now() - started;
    return status;
}

static int prepare(moe4_context *context, const moe4_layer_config *config, const moe4_expert_source *source,
                   double *gbs)
{
    moe4_layer *layer = NULL;
    moe4_layer_info info = MOE4_LAYER_INFO_INIT;
    struct timed_source timed = {.source = source};
    const moe4_expert_source timing = {.read = timed_read, .user = &timed};
    double started = seconds_now();
    if (moe4_layer_create_from(context, config, &timing, &layer) != MOE4_OK) return fail_library(context);
    double seconds = seconds_now() - started - timed.seconds;
    moe4_layer_describe(layer, &info);
    *gbs = 1e-9 * (double)(info.weight_bytes + info.packed_bytes) / seconds;
    moe4_layer_destroy(layer);
    return EXIT_OK;
}

int packing_measure(const struct machine_choice *where, const moe4_layer_config *config,
                    const moe4_expert_source *source, double *gbs)
{
    struct recycler recycler = {0};
    const moe4_allocator allocator = {recycle_allocate, recycle_release, &recycler};
    moe4_layer_config few = *config;
    if (few.n_experts > MOST_EXPERTS) few.n_local_experts = MOST_EXPERTS;
    struct machine_choice choice = *where;
    choice.allocator = &allocator;
    choice.tuning = NULL; /* which says nothing of preparing */
    struct machine machine;
    int code = machine_open(&choice, &machine);
    if (!code) code = prepare(machine.context, &few, source, gbs);
    if (!code) code = prepare(machine.context, &few, source, gbs);
    machine_close(&machine);
    for (int i = 0; i < MAX_BLOCKS; ++i) free(recycler.blocks[i].memory);
    return code;
}
