#include "progress.h"

#include <stdio.h>
#include <time.h>

#include "report.h"

enum { BAR_WIDTH = 28 };

double seconds_now(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

struct progress progress_begin(const char *label)
{
    return (struct progress){.label = label, .started = seconds_now(), .is_live = terminal_is_live(stderr)};
}

int progress_update(void *user, int64_t bytes_done, int64_t bytes_total)
{
    struct progress *bar = user;
    double now = seconds_now();
    if (!bar->is_live || bytes_total <= 0 || now - bar->drawn < 0.1) return 0;
    bar->drawn = now;
    double fraction = (double)bytes_done / (double)bytes_total, elapsed = now - bar->started;
    int filled = (int)(fraction * BAR_WIDTH);
    fprintf(stderr, "\r\033[K%s [", bar->label);
    for (int i = 0; i < BAR_WIDTH; ++i) fputc(i < filled ? '=' : i == filled ? '>' : ' ', stderr);
    fprintf(stderr, "] %3.0f %%  %s", 100 * fraction, human_bytes((double)bytes_done).text);
    if (elapsed > 0.5) fprintf(stderr, "  %s/s", human_bytes((double)bytes_done / elapsed).text);
    fflush(stderr);
    return 0;
}

void progress_end(struct progress *bar)
{
    if (bar->is_live && bar->drawn > 0) fprintf(stderr, "\r\033[K");
}
