/* A progress bar on stderr, drawn only where stderr is a terminal. */
#ifndef MOE4_CLI_PROGRESS_H
#define MOE4_CLI_PROGRESS_H

#include <stdint.h>

struct progress {
    const char *label;
    double started, drawn; /* seconds */
    int is_live;
};

struct progress progress_begin(const char *label);

/* Redraws at most ten times a second; returns 0, so that it fits moe4_reader_options.progress. */
int progress_update(void *bar, int64_t bytes_done, int64_t bytes_total);

/* Clears the line. */
void progress_end(struct progress *bar);

/* Seconds of a clock that only goes forward. */
double seconds_now(void);

#endif
