/* The tactics that a context has measured or loaded. */
#ifndef MOE4_TUNING_INTERNAL_H
#define MOE4_TUNING_INTERNAL_H

#include "context.h"
#include "layer.h"
#include "moe4/tune.h"

void tuning_release(struct moe4_context *context);

/* Adds an entry or replaces the one for the same shape and bucket. */
moe4_status tuning_put(struct moe4_context *context, const moe4_tuning_entry *entry);

/* The tactic for a call; the default where nothing is known. */
moe4_tactic tuning_find(const struct moe4_context *context, const struct moe4_layer *layer, moe4_compute compute,
                        int64_t n_tokens, int32_t top_k);

#endif
