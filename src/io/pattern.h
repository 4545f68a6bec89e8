/* Names of modules as quantisation configs list them: a name, a name with *, or behind "re:" a regular expression that
 * must match from the beginning of a name on, but not to its end.
 *
 * Of regular expressions this much is read: characters, escapes (\. \d \w \s and their opposites), ., [...], (...), |,
 * * + ? and their lazy forms, ^ and $.  One with anything else (look-ahead, say) is no pattern.  Matching takes time in
 * proportion to the lengths of name and pattern, whatever these are. */
#ifndef MOE4_IO_PATTERN_H
#define MOE4_IO_PATTERN_H

#include "io/storage.h"

enum pattern_kind { PATTERN_UNREAD, PATTERN_NAME, PATTERN_GLOB, PATTERN_REGEX };

struct pattern {
    enum pattern_kind kind;
    const char *text;
    struct instruction *program; /* REGEX: the machine that recognises it */
    int32_t n_instructions;
    const char *needle; /* REGEX: what every match contains; not NUL-terminated */
    size_t needle_bytes;
};

/* Reads a pattern; text must outlive it, the rest comes from the arena.  0 = out of memory. */
int pattern_read(struct arena *arena, const moe4_allocator *allocator, const char *text, struct pattern *pattern);

/* Whether a name of n_bytes matches; nothing matches UNREAD. */
int pattern_matches(const struct pattern *pattern, const char *name, size_t n_bytes);

#endif
