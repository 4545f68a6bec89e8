/* Modules that a config says are not quantised, by name or pattern. */
#ifndef MOE4_IO_EXCLUDED_H
#define MOE4_IO_EXCLUDED_H

#include "io/config.h"
#include "io/names.h"
#include "io/pattern.h"

struct excluded_pattern {
    struct pattern pattern;
    const struct excluded_pattern *next;
};

struct excluded {
    struct arena arena;
    struct names names; /* without a * */
    const struct excluded_pattern *patterns;
    int32_t n_patterns;
};

/* Adds the lists of these keys, NULL-ended, as far as they are there. */
moe4_status excluded_read(const struct config *config, const char *const *keys, struct excluded *excluded);

/* What excludes a module of that name, which is not NUL-terminated: a pattern, or the name itself; NULL if nothing. */
const char *excluded_find(const struct excluded *excluded, const char *name, size_t n_bytes);

void excluded_release(struct excluded *excluded, const moe4_allocator *allocator);

#endif
