/* Writing the experts of MoE layers into a checkpoint folder, in any layout that has tensors. */
#ifndef MOE4_CLI_EXPERT_OUTPUT_H
#define MOE4_CLI_EXPERT_OUTPUT_H

#include "feed.h"
#include "output.h"
#include "storage.h"

enum { UNIT_EXPERTS = 1000 }; /* kinds of units: these, and whatever below the caller has */

struct expert_output {
    struct output *output;
    const struct storage *storage;
    struct feed feed;

    const moe4_layer_config *config; /* of the layer that the feed is at */
    int32_t layer;
    char *buffer; /* rows of a tensor of one expert */
    int64_t buffer_room;
};

/* Begins at no layer. */
struct expert_output expert_output_begin(struct output *output, const struct storage *storage, struct feed feed);

/* Adds a layer's experts to the plan: names begin with `base`.  Refuses, by name, what the layout cannot hold. */
int expert_output_plan(struct expert_output *self, int32_t layer, const char *base);

/* Produces a unit of kind UNIT_EXPERTS. */
int expert_output_produce(struct expert_output *self, const struct output_unit *unit);

void expert_output_release(struct expert_output *self);

#endif
