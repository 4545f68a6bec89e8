/* Messages on stderr, each led by "moe4 VERB: ", and the few things every verb does with them. */
#ifndef MOE4_CLI_MESSAGE_H
#define MOE4_CLI_MESSAGE_H

#include <stdint.h>

#include "moe4/moe4.h"

/* Names the verb that messages speak for. */
void message_set_verb(const char *verb);

/* Says why the command fails; returns EXIT_FAILED, so that a caller can `return fail(...)`. */
__attribute__((format(printf, 1, 2))) int fail(const char *format, ...);

/* The same for a mistake on the command line; returns EXIT_USAGE. */
__attribute__((format(printf, 1, 2))) int fail_usage(const char *format, ...);

/* Passes on what the library said of its last failure. */
int fail_library(const moe4_context *context);

/* Something worth knowing that is no failure. */
__attribute__((format(printf, 1, 2))) void note(const char *format, ...);

/* Creates a context and describes it (info NULL = not wanted).  On failure says why, and *context is NULL. */
int context_open(const moe4_context_config *config, moe4_context **context, moe4_context_info *info);

/* The same for a verb that only reads and writes files, on so many threads (0 = as many as the process may use). */
int context_open_simple(int64_t n_threads, moe4_context **context, moe4_context_info *info);

#endif
