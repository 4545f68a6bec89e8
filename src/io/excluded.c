/* Modules that a config says are not quantised. */
#include <inttypes.h>
#include <string.h>

#include "io/excluded.h"
#include "io/family.h"
#include "io/show.h"

enum { MOST_PATTERNS = 4096, MOST_NAME_BYTES = 1024 };

/* The patterns of one list; names go into a table at once. */
static moe4_status add_list(const struct config *config, const char *key, const struct json_value *list,
                            struct excluded *excluded)
{
    for (const struct json_value *item = list->child; item; item = item->next) {
        struct pattern pattern;
        if (item->type != JSON_STRING) return config_fail(config, MOE4_EFORMAT, key, "a list of names");
        const char *text = arena_copy(&excluded->arena, &config->allocator, item->text, strlen(item->text));
        if (!text || !pattern_read(&excluded->arena, &config->allocator, text, &pattern))
            return context_fail_memory(config->context, key, sizeof pattern);
        if (pattern.kind == PATTERN_UNREAD) continue; /* the types of the tensors tell the layers apart */
        if (pattern.kind == PATTERN_NAME) {
            if (names_add(&excluded->names, &config->allocator, text, 0) == NAMES_NO_MEMORY)
                return context_fail_memory(config->context, key, strlen(text));
            continue;
        }
        if (excluded->n_patterns == MOST_PATTERNS)
            return config_fail(config, MOE4_EUNSUPPORTED, key, "at most %d patterns", MOST_PATTERNS);
        struct excluded_pattern *node = arena_allocate(&excluded->arena, &config->allocator, sizeof *node);
        if (!node) return context_fail_memory(config->context, key, sizeof *node);
        *node = (struct excluded_pattern){pattern, excluded->patterns};
        excluded->patterns = node;
        excluded->n_patterns++;
    }
    return MOE4_OK;
}

moe4_status excluded_read(const struct config *config, const char *const *keys, struct excluded *excluded)
{
    moe4_status status = MOE4_OK;
    for (; *keys && status == MOE4_OK; keys++) {
        const struct json_value *list = config_present(config, *keys);
        if (!list) continue;
        if (list->type != JSON_ARRAY) return config_fail(config, MOE4_EFORMAT, *keys, "a list of names");
        status = add_list(config, *keys, list, excluded);
    }
    return status;
}

const char *excluded_find(const struct excluded *excluded, const char *name, size_t n_bytes)
{
    char text[MOST_NAME_BYTES];
    if (excluded->names.count && n_bytes < sizeof text) {
        memcpy(text, name, n_bytes);
        text[n_bytes] = '\0';
        if (names_find(&excluded->names, text) != NAMES_NONE) return name;
    }
    for (const struct excluded_pattern *node = excluded->patterns; node; node = node->next)
        if (pattern_matches(&node->pattern, name, n_bytes)) return node->pattern.text;
    return NULL;
}

void excluded_release(struct excluded *excluded, const moe4_allocator *allocator)
{
    names_release(&excluded->names, allocator);
    arena_release(&excluded->arena, allocator);
    excluded->patterns = NULL;
}
