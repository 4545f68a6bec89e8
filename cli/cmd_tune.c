/* moe4 tune: measures how this machine runs a layer of a checkpoint fastest, and keeps it in a file. */
#include <stdio.h>

#include <jansson.h>

#include "command.h"
#include "input.h"
#include "machine.h"
#include "message.h"
#include "model.h"
#include "moe4/tune.h"
#include "options.h"
#include "pass.h"
#include "progress.h"
#include "report.h"
#include "verify.h"
#include "words.h"

/* Winners are compared with the default bit for bit by the library; up to here with the oracle, too. */
enum { MOST_VERIFIED_TOKENS = 512 };

struct tune {
    const char *path, *output_file;
    struct machine_choice where;
    int64_t layer_number, max_tokens, ms_a_choice;
    int backend, compute, json;

    struct machine machine;
    struct model model;
    moe4_layer *layer;
    struct progress bar;
};

static int tune_open(struct tune *tune)
{
    int code = machine_open(&tune->where, &tune->machine);
    if (!code)
        code = model_open(tune->machine.context, tune->path, tune->layer_number, (struct integer_pair){0, 0},
                          &tune->model);
    if (!code) code = model_prepare(&tune->model, tune->machine.context, &tune->layer);
    return code;
}

static int tune_progress(void *user, const moe4_tuning_entry *entry, int32_t n_done, int32_t n_buckets)
{
    (void)entry;
    struct tune *tune = user;
    return progress_update(&tune->bar, n_done, n_buckets);
}

static int tune_measure(struct tune *tune)
{
    moe4_tune_options options = MOE4_TUNE_OPTIONS_INIT;
    options.max_tokens = tune->max_tokens;
    options.compute = (moe4_compute)tune->compute;
    options.ms_a_choice = (double)tune->ms_a_choice;
    options.progress = tune_progress;
    options.user = tune;
    tune->bar = progress_begin("tuning");
    moe4_status status = moe4_tune(tune->machine.context, tune->layer, &options);
    progress_end(&tune->bar);
    return status == MOE4_OK ? EXIT_OK : fail_library(tune->machine.context);
}

/* Runs a bucket's winner, which the context now uses, past the oracle. */
static int tune_verify(struct tune *tune, int64_t n_tokens)
{
    moe4_expert_source source = model_source(&tune->model);
    struct verify_report report;
    struct pass pass;
    const struct input_choice choice = {.n_tokens = n_tokens, .compute = tune->compute};
    int code = input_open(tune->machine.context, &choice, &tune->model, &pass);
    pass.mirror.gpu = tune->machine.gpu;
    if (!code) code = pass_allocate(&pass, PASS_STAGES);
    if (!code) code = pass_prepare(&pass, tune->machine.context, tune->layer);
    if (!code) code = pass_forward(&pass, tune->machine.context, tune->layer, FORWARD_ALL);
    if (!code) code = verify_pass(tune->model.config, &source, &tune->machine, &pass, VERIFY_QUICK, &report);
    if (!code && !verify_is_good(&report))
        code = fail("the tactic for %lld tokens gives results outside the oracle's bounds", (long long)n_tokens);
    pass_end(&pass);
    return code;
}

static void entry_print(const struct tune *tune, const moe4_tuning_entry *entry)
{
    if (tune->json) {
        json_t *line = json_object();
        json_put_integer(line, "tokens", entry->n_tokens);
        json_put_integer(line, "tile_tokens", entry->tactic.tile_tokens);
        json_put_integer(line, "claim_share", entry->tactic.claim_share);
        json_put_real(line, "ms", entry->ms);
        json_put_real(line, "default_ms", entry->default_ms);
        report_json(line);
    } else {
        printf("%7lld %12d %12d %10.4f %10.4f %8.1f %%\n", (long long)entry->n_tokens, entry->tactic.tile_tokens,
               entry->tactic.claim_share, entry->ms, entry->default_ms, 100 * (1 - entry->ms / entry->default_ms));
    }
}

static int tune_run(struct tune *tune)
{
    int code = tune_open(tune);
    if (!code) code = tune_measure(tune);
    if (!code && !tune->json)
        printf("%7s %12s %12s %10s %10s %10s\n", "tokens", "tile_tokens", "claim_share", "ms", "default", "gained");
    for (int32_t i = 0; !code && i < moe4_tuning_count(tune->machine.context); ++i) {
        moe4_tuning_entry entry;
        moe4_tuning_get(tune->machine.context, i, &entry);
        if (entry.n_tokens <= MOST_VERIFIED_TOKENS) code = tune_verify(tune, entry.n_tokens);
        if (!code) entry_print(tune, &entry);
    }
    if (!code && moe4_tuning_save(tune->machine.context, tune->output_file) != MOE4_OK)
        code = fail_library(tune->machine.context);
    return code;
}

int cmd_tune(int argc, char **argv)
{
    struct tune tune = {.layer_number = FIRST_LAYER, .max_tokens = 8192, .ms_a_choice = 200};
    const struct option options[] = {
        option_operand("PATH", &tune.path, "a checkpoint: folder with config.json and *.safetensors, or a .gguf file"),
        option_required(option_text("--output", "FILE", &tune.output_file,
                                    "file to write the tuning to, for --tuning of run and bench")),
        option_integer("--layer", "N", &tune.layer_number, 0, 100000, "number of the layer in the model (the first)"),
        option_integer("--max-tokens", "T", &tune.max_tokens, 1, 1 << 20, "the largest batch size (8192)"),
        option_integer("--ms", "MS", &tune.ms_a_choice, 1, 60000, "time to spend on each choice (200)"),
        option_word("--activation-dtype", compute_words, &tune.compute, "activations' format in the GEMMs (bf16)"),
        option_word("--backend", backend_words, &tune.backend, "where it runs (cpu)"),
        option_word("--isa", isa_words, &tune.where.isa,
                    "the highest instruction set to use (auto: the best there is)"),
        option_integer("--threads", "N", &tune.where.n_threads, 1, 1024, "threads (as many as the process may use)"),
        option_flag("--json", &tune.json, "report one JSON object a line and batch size"),
    };
    const struct usage usage = {"tune", "Measures how this machine runs a layer fastest, for a range of batch sizes.",
                                options, sizeof options / sizeof *options};
    int code;
    if (!options_parse(&usage, argc, argv, &code)) return code;
    tune.where.device = (moe4_device)tune.backend;
    code = tune_run(&tune);
    moe4_layer_destroy(tune.layer);
    model_close(&tune.model);
    machine_close(&tune.machine);
    return code;
}
