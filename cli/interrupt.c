#include "interrupt.h"

#include <signal.h>
#include <stddef.h>

#include "command.h"
#include "message.h"

static const int signals[] = {SIGINT, SIGTERM, SIGHUP};
enum { N_SIGNALS = sizeof signals / sizeof *signals };

static volatile sig_atomic_t caught;
static struct sigaction before[N_SIGNALS];

static void remember(int signal)
{
    caught = signal;
}

void interrupt_hold(void)
{
    struct sigaction action = {.sa_handler = remember, .sa_flags = SA_RESTART};
    for (int i = 0; i < N_SIGNALS; ++i) {
        sigaction(signals[i], NULL, &before[i]);
        if (before[i].sa_handler != SIG_IGN) sigaction(signals[i], &action, NULL);
    }
}

int interrupt_check(void)
{
    return caught ? fail("interrupted; the same command goes on with what is complete") : EXIT_OK;
}

void interrupt_release(void)
{
    for (int i = 0; i < N_SIGNALS; ++i) sigaction(signals[i], &before[i], NULL);
    if (caught) raise(caught);
}
