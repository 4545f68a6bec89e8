/* The moe4 command: a table of verbs. */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>

#include "command.h"
#include "commit.h"
#include "message.h"
#include "moe4/moe4.h"

static const struct {
    const char *name;
    int (*run)(int argc, char **argv);
    const char *summary;
} verbs[] = {
    {"synth", cmd_synth, "write a synthetic checkpoint"},
    {"inspect", cmd_inspect, "show the MoE layers of a checkpoint"},
    {"run", cmd_run, "run one MoE layer of a checkpoint"},
    {"check", cmd_check, "compare every kernel with the oracle"},
    {"combine", cmd_combine, "add up the rows that a deferred run has left"},
    {"route", cmd_route, "route tokens: logits to expert ids and weights"},
    {"bench", cmd_bench, "time a layer against what the machine can do"},
    {"tune", cmd_tune, "measure how this machine runs a layer fastest"},
    {"quantize", cmd_quantize, "quantise the experts of a checkpoint to MXFP4"},
    {"convert", cmd_convert, "write the same experts in another layout"},
};
enum { N_VERBS = sizeof verbs / sizeof *verbs };

static void help_print(FILE *stream)
{
    fprintf(stream, "Usage: moe4 VERB [options]\n\nMixture-of-experts layers with MXFP4 weights.\n\n");
    for (int i = 0; i < N_VERBS; ++i) fprintf(stream, "  %-10s %s\n", verbs[i].name, verbs[i].summary);
    fprintf(stream,
            "\n  --version  print the version\n  --help     print this; moe4 VERB --help says more of a verb\n");
}

/* A full disk or a closed pipe is a failure too. */
static int finish(int code)
{
    if ((fflush(stdout) || ferror(stdout)) && code == EXIT_OK) return fail("standard output: %s", strerror(errno));
    return code;
}

int main(int argc, char **argv)
{
    signal(SIGXFSZ, SIG_IGN); /* beyond a limit on their size, writing files fails as on a full disk */
    if (argc < 2) {
        help_print(stderr);
        return EXIT_USAGE;
    }
    if (!strcmp(argv[1], "--help")) {
        help_print(stdout);
        return finish(EXIT_OK);
    }
    if (!strcmp(argv[1], "--version")) {
        printf("moe4 %s (%s)\n", moe4_version(), commit_id());
        return finish(EXIT_OK);
    }
    for (int i = 0; i < N_VERBS; ++i)
        if (!strcmp(argv[1], verbs[i].name)) {
            message_set_verb(verbs[i].name);
            return finish(verbs[i].run(argc - 1, argv + 1));
        }
    return fail_usage("unknown verb \"%s\" (see moe4 --help)", argv[1]);
}
