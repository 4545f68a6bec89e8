/* One place for every refusal: moe4_supports asks it before anything is loaded, creation and forward ask it again. */
#ifndef MOE4_SUPPORTS_H
#define MOE4_SUPPORTS_H

#include "context.h"
#include "moe4/moe4.h"

/* Copies a caller's struct that starts with its own size into `known` bytes, zeros for fields it does not have yet.
 * Refuses one that is newer than this library and uses what is new. */
moe4_status adopt_struct(struct moe4_context *context, const char *name, const void *given, void *copy, size_t known);

/* Whether a caller's struct that starts with its own size can have one: that of an older or newer caller will do. */
int is_struct_size(size_t size);

/* Fills such a struct, but for its size, from one of `known` bytes: fields that it does not have yet are left out,
 * fields that are newer than this library left alone. */
void fill_struct(void *taken, const void *made, size_t known);

/* Refuses on a context of another device what only the CPU does. */
/* T: n_tokens, or what on_device says where that is host memory.  MOE4_EINVAL if it is out of range. */
moe4_status read_token_count(struct moe4_context *context, int64_t n_tokens, const int32_t *on_device, int64_t *T);

moe4_status require_cpu(struct moe4_context *context, const char *what);

/* What of a query does not depend on the layer's config: dtypes and words of a call. */
moe4_status supports_call(struct moe4_context *context, const moe4_query *query);

/* The whole query: config, call, device. */
moe4_status supports_query(struct moe4_context *context, const moe4_query *query);

#endif
