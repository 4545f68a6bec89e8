/* moe4 check: every kernel that this machine has, those of its GPU too, against the oracle. */
#include <stdio.h>
#include <stdlib.h>

#include <jansson.h>

#include "command.h"
#include "input.h"
#include "machine.h"
#include "message.h"
#include "model.h"
#include "options.h"
#include "pass.h"
#include "report.h"
#include "verify.h"
#include "words.h"

struct check {
    const char *path;
    struct input_choice input;
    int64_t layer_number, n_threads;
    struct integer_list tokens; /* of generated batches */
    int backend, json;

    int64_t n_failed; /* points with a stage outside its bound */
};

static const char *const check_backends[] = {"all", "cpu", "cuda", NULL};
enum { CHECK_ALL, CHECK_CPU, CHECK_CUDA };

/* One instruction-set level, or a GPU: its kernels and a layer packed for them. */
struct level {
    struct machine machine;
    struct model model;
    moe4_layer *layer;
    moe4_layer_info layer_info;
};

static json_t *line_begin(const struct level *level, int64_t n_tokens, const char *stage)
{
    json_t *line = json_object();
    json_put_text(line, "stage", stage);
    json_put_text(line, "kernel", level->layer_info.kernel);
    json_put_text(line, "isa", level->machine.info.isa_name);
    json_put_text(line, "order", level->layer_info.order);
    json_put_integer(line, "tokens", n_tokens);
    return line;
}

static void stage_print(const struct check *check, const struct level *level, int64_t n_tokens, verify_stage stage,
                        const ref_verdict *verdict)
{
    const char *name = verify_stage_name(stage);
    if (check->json) {
        json_t *line = line_begin(level, n_tokens, name);
        json_put_integer(line, "checked", verdict->n_checked);
        json_put_integer(line, "outside", verdict->n_outside);
        json_put_real(line, "worst_ratio", verdict->worst_ratio);
        json_put_truth(line, "ok", verdict->n_outside == 0);
        report_json(line);
    } else {
        printf("%-22s %7lld  %-13s %10lld %9lld  %-18s %s\n", level->layer_info.kernel, (long long)n_tokens, name,
               (long long)verdict->n_checked, (long long)verdict->n_outside, human_verdict(verdict->worst_ratio).text,
               human_outcome(verdict->n_outside == 0).text);
    }
}

/* The whole layer is a stage of its own here. */
static void layer_print(const struct check *check, const struct level *level, int64_t n_tokens,
                        const struct verify_report *report)
{
    const ref_frobenius *frobenius = &report->frobenius;
    int good = verify_layer_is_close(report);
    if (check->json) {
        json_t *line = line_begin(level, n_tokens, "layer");
        json_put_real(line, "frobenius", frobenius->overall);
        json_put_real(line, "worst_row", frobenius->worst_row);
        json_put_truth(line, "ok", good);
        report_json(line);
    } else {
        printf("%-22s %7lld  %-13s %10s %9s  %-18.2g %s\n", level->layer_info.kernel, (long long)n_tokens, "layer", "",
               "", frobenius->overall, human_outcome(good).text);
    }
}

/* Once the inputs have said which experts there are. */
static int level_prepare(const struct check *check, struct level *level)
{
    if (level->layer) return EXIT_OK;
    int code = model_prepare(&level->model, level->machine.context, &level->layer);
    return code ? code
                : layer_describe(level->machine.context, level->layer, (moe4_compute)check->input.compute,
                                 &level->layer_info);
}

/* One batch: so many generated tokens, or those of the input. */
static int check_point(struct check *check, struct level *level, int64_t n_tokens)
{
    moe4_expert_source source = model_source(&level->model);
    struct verify_report report;
    struct pass pass;
    check->input.n_tokens = n_tokens;
    int code = input_open(level->machine.context, &check->input, &level->model, &pass);
    n_tokens = pass.n_tokens;
    if (!code) code = level_prepare(check, level);
    pass.mirror.gpu = level->machine.gpu;
    if (!code) code = pass_allocate(&pass, PASS_STAGES);
    if (!code) code = pass_prepare(&pass, level->machine.context, level->layer);
    if (!code) code = pass_forward(&pass, level->machine.context, level->layer, FORWARD_ALL);
    if (!code) code = verify_pass(level->model.config, &source, &level->machine, &pass, VERIFY_QUICK, &report);
    if (!code) {
        for (int stage = 0; stage < VERIFY_STAGES; ++stage)
            stage_print(check, level, n_tokens, (verify_stage)stage, &report.stages[stage]);
        layer_print(check, level, n_tokens, &report);
        fflush(stdout);
        check->n_failed += !verify_is_good(&report);
    }
    pass_end(&pass);
    return code;
}

/* All batch sizes on one machine. */
static int check_machine(struct check *check, const struct machine *machine)
{
    struct level level = {.machine = *machine, .layer_info = MOE4_LAYER_INFO_INIT};
    int code =
        model_open(machine->context, check->path, check->layer_number, (struct integer_pair){0, 0}, &level.model);
    if (!code) level.model.config->compute = (moe4_compute)check->input.compute;
    for (int32_t i = 0; !code && i < check->tokens.count; ++i)
        code = check_point(check, &level, check->tokens.values[i]);
    moe4_layer_destroy(level.layer);
    model_close(&level.model);
    return code;
}

/* Whether this machine has the level: a context says no, or takes a lower one. */
static int level_exists(moe4_device device, moe4_isa isa)
{
    moe4_context_config config = MOE4_CONTEXT_CONFIG_INIT;
    moe4_context_info info = MOE4_CONTEXT_INFO_INIT;
    moe4_context *context;
    config.device = device;
    config.isa = isa;
    int exists = moe4_context_create(&config, &context) == MOE4_OK &&
                 moe4_context_describe(context, &info) == MOE4_OK && info.isa == isa;
    moe4_context_destroy(context);
    return exists;
}

static int check_level(struct check *check, moe4_device device, moe4_isa isa)
{
    const int is_beside =
        device == MOE4_DEVICE_CUDA && check->backend == CHECK_ALL; /* the CPU, whose threads were set */
    const struct machine_choice choice = {.device = device, .isa = isa, .n_threads = is_beside ? 0 : check->n_threads};
    struct machine machine;
    int code = machine_open(&choice, &machine);
    if (code) return code;
    code = check_machine(check, &machine);
    machine_close(&machine);
    return code;
}

/* Every level of a device that this machine has; how many there were. */
static int check_device(struct check *check, moe4_device device, int *n_levels)
{
    int code = EXIT_OK;
    for (int isa = MOE4_ISA_C; !code && isa_words[isa]; ++isa) {
        if (!level_exists(device, (moe4_isa)isa)) continue;
        const int is_fp8 = check->input.compute == MOE4_COMPUTE_FP8; /* GPUs have kernels of one level for it */
        if (is_fp8 && isa == MOE4_ISA_SM_80 && level_exists(device, MOE4_ISA_SM_90A)) continue;
        code = check_level(check, device, (moe4_isa)isa);
        ++*n_levels;
    }
    return code;
}

/* The CPU, then the GPU: where it was asked for it must be there. */
static int check_all(struct check *check)
{
    int code = EXIT_OK, n_levels = 0;
    if (check->backend != CHECK_CUDA) code = check_device(check, MOE4_DEVICE_CPU, &n_levels);
    if (!code && (check->backend == CHECK_CUDA || check->backend == CHECK_ALL))
        code = check_device(check, MOE4_DEVICE_CUDA, &n_levels);
    return code || n_levels ? code : check_level(check, MOE4_DEVICE_CUDA, MOE4_ISA_AUTO); /* which says why not */
}

int cmd_check(int argc, char **argv)
{
    static const struct integer_list default_tokens = {3, {1, 7, 64}};
    struct check check = {.layer_number = FIRST_LAYER};
    const struct option options[] = {
        option_operand("PATH", &check.path, "a checkpoint: folder with config.json and *.safetensors, or a .gguf file"),
        option_integer("--layer", "N", &check.layer_number, 0, 100000, "number of the layer in the model (the first)"),
        option_integers("--tokens", "LIST", &check.tokens, 1, 1 << 20, "sizes of generated batches (1,7,64)"),
        option_integer("--seed", "S", &check.input.seed, 0, INT64_MAX, "seed of the generated tokens (0)"),
        option_text("--input", "FILE", &check.input.file,
                    "safetensors file with a batch of tokens instead, as moe4 run takes it"),
        option_word("--routing", input_routing_words, &check.input.routing,
                    "what routes the input (auto: logits, else ids, else the layer's own router)"),
        option_word("--weight-on", weight_words, &check.input.weight_use,
                    "where weights given with ids are applied; on the input with one expert a token (output)"),
        option_word("--activation-dtype", compute_words, &check.input.compute,
                    "activations' format in the GEMMs (bf16)"),
        option_word("--output-dtype", output_words, &check.input.output, "the output's format (bf16)"),
        option_word("--backend", check_backends, &check.backend, "what to check (all that is there)"),
        option_integer("--threads", "N", &check.n_threads, 1, 1024,
                       "the CPU's threads (as many as the process may use)"),
        option_flag("--json", &check.json, "report one JSON object a line: stage, kernel, tokens"),
    };
    const struct usage usage = {"check", "Compares every kernel of this machine with the oracle, stage by stage.",
                                options, sizeof options / sizeof *options};
    int code;
    if (!options_parse(&usage, argc, argv, &code)) return code;
    if (check.input.file && check.tokens.count) return fail_usage("--tokens generates batches, but --input brings one");
    code = input_refuse(&check.input);
    if (code) return code;
    if (!check.tokens.count) check.tokens = check.input.file ? (struct integer_list){1, {0}} : default_tokens;
    if (!check.json)
        printf("%-22s %7s  %-13s %10s %9s  %-18s\n", "kernel", "tokens", "stage", "checked", "outside", "worst");
    code = check_all(&check);
    if (!code && check.n_failed)
        code = fail("%s: %lld batches have a stage outside its bound", check.path, (long long)check.n_failed);
    return code;
}
