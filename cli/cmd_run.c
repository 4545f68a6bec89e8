/* moe4 run: one MoE layer of a checkpoint on one batch of tokens. */
#include <stdio.h>
#include <stdlib.h>

#include <jansson.h>

#include "command.h"
#include "input.h"
#include "machine.h"
#include "memory.h"
#include "message.h"
#include "model.h"
#include "options.h"
#include "oracle.h"
#include "pass.h"
#include "probe.h"
#include "progress.h"
#include "report.h"
#include "tensor.h"
#include "timing.h"
#include "verify.h"
#include "words.h"

enum { DEFAULT_TOKENS = 64, MAX_REPEAT = 10000, ENOUGH_REPEAT = 21, LEAST_REPEAT = 3 };
static const double enough_seconds = 1.0;

typedef enum run_backend { BACKEND_AUTO, BACKEND_REF, BACKEND_CPU, BACKEND_CUDA } run_backend;
static const char *const run_backends[] = {"auto", "ref", "cpu", "cuda", NULL};

struct run {
    const char *path, *output_file, *prepared_file;
    struct machine_choice where;
    struct input_choice input;
    int64_t layer_number, output_size, repeat;
    struct integer_pair experts;
    int backend, deferred, replay, stages, check, json;

    struct machine machine;
    struct model model;
    moe4_layer *layer;
    moe4_layer_info layer_info;
    struct pass pass;

    double ms, ms_fastest, ms_slowest; /* ms is the median */
    int64_t n_timed;
    int64_t n_touched, n_rows; /* local experts, and slots that name them */
    int64_t *load;             /* [E] */
    double bandwidth_gbs;
    struct verify_report verified;
};

/* ---- Set-up ------------------------------------------------------------------------------------------------------ */

/* Asks before anything is loaded whether the library can do it; says why not. */
static int run_ask(const struct run *run)
{
    moe4_query query = MOE4_QUERY_INIT;
    const struct pass *pass = &run->pass;
    query.config = run->model.config;
    query.compute = pass->compute;
    query.x_dtype = pass->x_dtype;
    query.y_dtype = pass->y_dtype;
    query.write = pass->addend ? MOE4_WRITE_ADD : MOE4_WRITE_OVERWRITE;
    query.n_tokens = pass->n_tokens;
    if (pass->routing == PASS_LOGITS) query.logits_dtype = pass->logits_dtype;
    if (pass->routing == PASS_IDS) {
        query.topk_format = pass->topk_format;
        query.weights_dtype = pass->weights_dtype;
        query.weight_use = pass->weight_use;
        query.top_k = pass->top_k;
    }
    return moe4_supports(run->machine.context, &query) == MOE4_OK ? EXIT_OK : fail_library(run->machine.context);
}

/* What the input brings and what was asked for must go together. */
static int run_refuse(const struct run *run)
{
    if (run->replay && run->pass.routing == PASS_IDS)
        return fail_usage("--replay records what a router chose, but the input brings ids");
    if (run->deferred && run->pass.addend)
        return fail_usage("--deferred leaves out the output, to which the input's addend is to be added");
    return EXIT_OK;
}

static int run_open(struct run *run)
{
    int code = machine_open(&run->where, &run->machine);
    if (!code) code = model_open(run->machine.context, run->path, run->layer_number, run->experts, &run->model);
    if (code) return code;
    run->model.config->output_size = run->output_size;
    run->model.config->compute = (moe4_compute)run->input.compute;
    code = input_open(run->machine.context, &run->input, &run->model, &run->pass);
    run->pass.mirror.gpu = run->machine.gpu;
    if (!code) code = run_refuse(run);
    if (!code) code = run_ask(run);
    int wants = (run->stages || run->deferred || run->check ? PASS_STAGES : 0) | (run->replay ? PASS_REPLAY : 0);
    if (!code) code = pass_allocate(&run->pass, wants);
    return code;
}

/* ---- Run --------------------------------------------------------------------------------------------------------- */

/* Whether to time another call: as many as asked for, or else for about a second. */
static int run_wants_more(const struct run *run, double elapsed)
{
    if (run->repeat) return run->n_timed < run->repeat;
    return run->n_timed < LEAST_REPEAT || (run->n_timed < ENOUGH_REPEAT && elapsed < enough_seconds);
}

static int time_cpu(struct run *run, pass_results results, double *ms)
{
    double began = seconds_now();
    int code = pass_forward(&run->pass, run->machine.context, run->layer, FORWARD_ALL); /* warms up */
    while (!code && run_wants_more(run, seconds_now() - began)) {
        code = pass_refresh(&run->pass);
        double started = seconds_now();
        if (!code) code = pass_enqueue(&run->pass, run->machine.context, run->layer, results);
        ms[run->n_timed++] = 1000 * (seconds_now() - started);
    }
    return code;
}

static int gpu_enqueue(void *user, int32_t call)
{
    struct run *self = user;
    (void)call;
    return pass_enqueue(&self->pass, self->machine.context, self->layer,
                        self->deferred ? FORWARD_DEFERRED : FORWARD_OUTPUT);
}

static int time_gpu(struct run *run, double *ms)
{
    struct gpu *gpu = run->machine.gpu;
    run->n_timed = run->repeat ? run->repeat : ENOUGH_REPEAT;
    int code = gpu->calls->time(gpu, gpu_enqueue, run, 1, run->n_timed, ms);
    return code ? code : pass_forward(&run->pass, run->machine.context, run->layer, FORWARD_ALL);
}

static int run_time(struct run *run)
{
    double ms[MAX_REPEAT];
    int code =
        run->machine.gpu ? time_gpu(run, ms) : time_cpu(run, run->deferred ? FORWARD_DEFERRED : FORWARD_OUTPUT, ms);
    if (code) return code;
    run->ms = quantile(ms, run->n_timed, 0.5);
    run->ms_fastest = ms[0];
    run->ms_slowest = ms[run->n_timed - 1];
    return EXIT_OK;
}

/* How fast memory can be read here. */
static int run_probe(struct run *run)
{
    struct probe *probe = NULL;
    struct probe_result measured = {0};
    int code = EXIT_OK;
    if (run->machine.gpu) {
        code = run->machine.gpu->calls->probe(run->machine.gpu, &measured);
    } else {
        code = probe_open(run->machine.n_busy_threads, run->layer_info.weight_bytes, NULL, &probe);
        if (!code) probe_bandwidth(probe, &measured);
        probe_close(probe);
    }
    run->bandwidth_gbs = measured.bandwidth_gbs;
    return code;
}

static int run_library(struct run *run)
{
    int code = run->prepared_file ? model_load(&run->model, run->machine.context, run->prepared_file, &run->layer)
                                  : model_prepare(&run->model, run->machine.context, &run->layer);
    if (!code) code = layer_describe(run->machine.context, run->layer, run->pass.compute, &run->layer_info);
    if (!code) code = pass_prepare(&run->pass, run->machine.context, run->layer);
    if (!code) code = run_time(run);
    return code ? code : run_probe(run);
}

static int run_ref(struct run *run)
{
    moe4_expert_source source = model_source(&run->model);
    run->layer_info.kernel = "oracle";
    run->layer_info.order = "double precision";
    double started = seconds_now();
    int code = oracle_forward(run->model.config, &source, run->machine.n_host_threads, &run->pass);
    run->ms = run->ms_fastest = run->ms_slowest = 1000 * (seconds_now() - started);
    run->n_timed = 1;
    return code;
}

/* ---- Output ------------------------------------------------------------------------------------------------------ */

/* Weights of a router are bf16 values, and kept so; those that came as f32 are not. */
static int save_weights(const struct pass *pass, struct tensor_output *output, uint16_t **bf16)
{
    int64_t T = pass->n_tokens, A = pass->top_k;
    *output = (struct tensor_output){"expert_weights", MOE4_DTYPE_F32, 2, {T, A}, pass->weights};
    *bf16 = NULL;
    if (pass->routing == PASS_IDS && pass->weights_dtype == MOE4_DTYPE_F32) return EXIT_OK;
    int code = allocate(bf16, T * A, sizeof **bf16, "expert weights");
    for (int64_t p = 0; !code && p < T * A; ++p) (*bf16)[p] = ref_to_bf16(pass->weights[p]);
    output->dtype = MOE4_DTYPE_BF16;
    output->data = *bf16;
    return code;
}

static int run_save(const struct run *run)
{
    const struct pass *pass = &run->pass;
    int64_t T = pass->n_tokens, E = pass->n_experts, A = pass->top_k, O = pass->output_size;
    int64_t I = pass->intermediate_size;
    struct tensor_output outputs[12], weights;
    uint16_t *bf16;
    int32_t n = 0;
    int code = save_weights(pass, &weights, &bf16);
    if (code) return code;
    if (!run->deferred) outputs[n++] = (struct tensor_output){"output", pass->y_dtype, 2, {T, O}, pass->y};
    if (pass->routing != PASS_IDS)
        outputs[n++] = (struct tensor_output){"router_logits", MOE4_DTYPE_F32, 2, {T, E}, pass->logits};
    outputs[n++] = (struct tensor_output){"topk_ids", MOE4_DTYPE_I32, 2, {T, A}, pass->ids};
    outputs[n++] = (struct tensor_output){"topk_weights", MOE4_DTYPE_F32, 2, {T, A}, pass->weights};
    if (run->stages) {
        static const moe4_dtype dtypes[] = {[MOE4_COMPUTE_BF16] = MOE4_DTYPE_BF16,
                                            [MOE4_COMPUTE_MXFP8] = MOE4_DTYPE_F8_E4M3,
                                            [MOE4_COMPUTE_FP8] = MOE4_DTYPE_F8_E4M3,
                                            [MOE4_COMPUTE_INT8] = MOE4_DTYPE_I8};
        outputs[n++] =
            (struct tensor_output){"intermediate", dtypes[pass->compute], 2, {pass->n_rows, I}, pass->intermediate};
    }
    moe4_dtype scale_dtype;
    int64_t n_scales = pass_scales(pass, &scale_dtype);
    if (run->stages && n_scales)
        outputs[n++] = (struct tensor_output){
            "intermediate_scale", scale_dtype, 2, {pass->n_rows, n_scales}, pass->intermediate_scale};
    if (run->stages || run->deferred) {
        outputs[n++] = (struct tensor_output){"gemm2_rows", MOE4_DTYPE_BF16, 2, {pass->n_rows, O}, pass->gemm2_rows};
        outputs[n++] = (struct tensor_output){"row_map", MOE4_DTYPE_I32, 2, {T, A}, pass->row_map};
        outputs[n++] = weights;
    }
    if (run->replay) outputs[n++] = (struct tensor_output){"routed_ids", MOE4_DTYPE_I16, 2, {T, A}, pass->replay};
    code = tensors_save(run->machine.context, run->output_file, outputs, n);
    free(bf16);
    return code;
}

/* GB/s of the weights that the tokens touched. */
static double run_gbs(const struct run *run)
{
    const moe4_layer_config *config = run->model.config;
    double bytes = 3.0 * (double)config->hidden_size * (double)config->intermediate_size * 4.25 / 8;
    return 1e-6 * bytes * (double)run->n_touched / run->ms;
}

static double run_tokens_per_second(const struct run *run)
{
    return 1000 * (double)run->pass.n_tokens / run->ms;
}

static void run_print_json(const struct run *run)
{
    const moe4_layer_config *config = run->model.config;
    int is_ref = run->backend == BACKEND_REF;
    json_t *kernels = json_array(), *object = json_object();
    json_array_append_new(kernels, json_string(run->layer_info.kernel));
    json_put_text(object, "model", run->path);
    json_put_integer(object, "layer", run->model.layer);
    json_put_text(object, "backend", is_ref ? "ref" : machine_word(&run->machine));
    json_object_set_new(object, "kernels", kernels);
    json_put_text(object, "isa", is_ref ? "none" : run->machine.info.isa_name);
    json_put_text(object, "order", run->layer_info.order);
    if (run->machine.gpu) json_put_text(object, "gpu", run->machine.gpu->name);
    json_put_integer(object, "threads", is_ref ? run->machine.n_host_threads : run->machine.info.n_threads);
    json_put_integer(object, "tokens", run->pass.n_tokens);
    json_put_integer(object, "hidden_size", config->hidden_size);
    json_put_integer(object, "intermediate_size", config->intermediate_size);
    json_put_integer(object, "n_experts", config->n_experts);
    json_put_integer(object, "top_k", run->pass.top_k);
    json_put_text(object, "activation_dtype", compute_words[run->input.compute]);
    json_put_text(object, "output_dtype", output_words[run->input.output]);
    json_put_real(object, "ms", run->ms);
    json_put_integer(object, "repeat", run->n_timed);
    json_put_real(object, "tokens_per_s", run_tokens_per_second(run));
    json_put_real(object, "gbs", run_gbs(run));
    if (!is_ref) json_put_real(object, "bandwidth_gbs_measured", run->bandwidth_gbs);
    if (!is_ref) json_put_integer(object, "workspace_bytes", (int64_t)run->pass.workspace_bytes);
    json_put_integers(object, "expert_load", run->load, config->n_experts);
    if (run->check) json_object_set_new(object, "check", verify_json(&run->verified));
    report_json(object);
}

static void run_print_speed(const struct run *run)
{
    int64_t H = run->model.config->hidden_size, I = run->model.config->intermediate_size;
    double gflops = 1e-6 * 6.0 * (double)run->n_rows * (double)H * (double)I / run->ms;
    if (run->n_timed > 1)
        report_field("time", "%s, the median of %lld calls from %s to %s", human_milliseconds(run->ms).text,
                     (long long)run->n_timed, human_milliseconds(run->ms_fastest).text,
                     human_milliseconds(run->ms_slowest).text);
    else
        report_field("time", "%s", human_milliseconds(run->ms).text);
    report_field("speed", "%s tokens/s, %.3g GFLOP/s", human_count(run_tokens_per_second(run)).text, gflops);
    if (run->bandwidth_gbs > 0)
        report_field("weights", "%.1f GB/s of %s; memory %s at %.1f GB/s", run_gbs(run),
                     human_plural(run->n_touched, "expert").text, run->machine.gpu ? "copies" : "reads",
                     run->bandwidth_gbs);
}

static void run_print(const struct run *run)
{
    static const char *const sources[] = {"router_logits of the input", "ids of the input", "the layer's own router"};
    const moe4_layer_config *config = run->model.config;
    report_title("%s, layer %d (%s)", run->path, run->model.layer, run->model.info.family);
    report_field("layer", "%d experts, %d a token, %lld x %lld, %s", config->n_experts, run->pass.top_k,
                 (long long)config->hidden_size, (long long)config->intermediate_size,
                 activation_word(config->activation));
    if (run->backend != BACKEND_REF) report_field("machine", "%s", machine_show(&run->machine).text);
    report_field("kernel", "%s, order \"%s\"", run->layer_info.kernel, run->layer_info.order);
    if (run->layer_info.n_exact_experts)
        report_field("", "%d experts with extreme scales take the exact kernel", run->layer_info.n_exact_experts);
    report_field("tokens", "%lld, %s, routed by %s", (long long)run->pass.n_tokens,
                 run->input.file ? run->input.file : "generated", sources[run->pass.routing]);
    if (run->pass.weight_use == MOE4_WEIGHT_ON_INPUT) report_field("", "weights are applied to the input");
    if (run->model.expert_map)
        report_field("experts", "%d of %d, named by the input's map", run->model.config->n_local_experts,
                     config->n_experts);
    if (run->pass.addend) report_field("output", "added to the input's addend");
    run_print_speed(run);
    if (run->output_file) report_field("output", "%s", run->output_file);
    if (run->check) verify_print(&run->verified);
    report_expert_load(run->load, config->n_experts);
}

/* ---- Command ----------------------------------------------------------------------------------------------------- */

static int run_all(struct run *run)
{
    int code = run_open(run);
    if (!code) code = run->backend == BACKEND_REF ? run_ref(run) : run_library(run);
    if (!code && run->output_file) code = run_save(run);
    if (!code && run->check) {
        moe4_expert_source source = model_source(&run->model);
        code = verify_pass(run->model.config, &source, &run->machine, &run->pass, VERIFY_THOROUGH, &run->verified);
    }
    if (!code) code = allocate(&run->load, run->pass.n_experts, sizeof *run->load, "expert load");
    if (code) return code;
    pass_count_load(&run->pass, run->load);
    pass_count_local(&run->pass, run->model.config, &run->n_touched, &run->n_rows);
    if (run->json)
        run_print_json(run);
    else
        run_print(run);
    if (run->check && !verify_is_good(&run->verified))
        return fail("the results are not within the bounds of the oracle's");
    return EXIT_OK;
}

int cmd_run(int argc, char **argv)
{
    struct run run = {.layer_number = FIRST_LAYER, .layer_info = MOE4_LAYER_INFO_INIT};
    const struct option options[] = {
        option_operand("PATH", &run.path, "a checkpoint: folder with config.json and *.safetensors, or a .gguf file"),
        option_integer("--layer", "N", &run.layer_number, 0, 100000, "number of the layer in the model (the first)"),
        option_text("--input", "FILE", &run.input.file,
                    "safetensors file with hidden_states [T, H] and, if they are to route, router_logits [T, E], "
                    "or topk_ids and topk_weights [T, A], or topk_packed; token_ids [T] for hash routing; "
                    "router_hidden_states [T, width] for a router of another width; addend [T, H] to add the output "
                    "to; expert_map [E] of the experts to hold"),
        option_word("--routing", input_routing_words, &run.input.routing,
                    "what routes the input (auto: logits, else ids, else the layer's own router)"),
        option_word("--weight-on", weight_words, &run.input.weight_use,
                    "where weights given with ids are applied; on the input with one expert a token (output)"),
        option_integer("--tokens", "T", &run.input.n_tokens, 1, 1 << 20, "generate that many tokens (64)"),
        option_integer("--seed", "S", &run.input.seed, 0, INT64_MAX, "seed of the generated tokens (0)"),
        option_text("--output", "FILE", &run.output_file, "safetensors file to write output, topk_ids, ... to"),
        option_flag("--deferred", &run.deferred,
                    "write gemm2_rows, row_map and expert_weights instead of their sum, output"),
        option_flag("--replay", &run.replay, "also write routed_ids"),
        option_flag("--stages", &run.stages, "also write intermediate, gemm2_rows, row_map and expert_weights"),
        option_word("--backend", run_backends, &run.backend,
                    "where it runs: cuda is GPU 0; ref is the oracle, slow (auto: cpu)"),
        option_word("--isa", isa_words, &run.where.isa, "the highest instruction set to use (auto: the best there is)"),
        option_integer("--threads", "N", &run.where.n_threads, 1, 1024, "threads (as many as the process may use)"),
        option_word("--activation-dtype", compute_words, &run.input.compute, "activations' format in the GEMMs (bf16)"),
        option_word("--output-dtype", output_words, &run.input.output, "the output's format (bf16)"),
        option_integer("--output-size", "N", &run.output_size, 1, 1 << 24, "compute only the first N columns (all)"),
        option_pair("--experts", "FIRST:COUNT", &run.experts, 0, 32767, "hold only these experts; others add nothing"),
        option_text("--tuning", "FILE", &run.where.tuning, "what moe4 tune has measured on this machine"),
        option_text("--prepared", "FILE", &run.prepared_file,
                    "file that keeps the prepared layer: used if it is of this checkpoint, else written"),
        option_flag("--check", &run.check, "compare a sample of tokens with the oracle, stage by stage"),
        option_integer("--repeat", "N", &run.repeat, 1, MAX_REPEAT, "calls to time (about a second's worth)"),
        option_flag("--json", &run.json, "report as one JSON object"),
    };
    const struct usage usage = {"run", "Runs one MoE layer of a checkpoint.", options,
                                sizeof options / sizeof *options};
    int code;
    if (!options_parse(&usage, argc, argv, &code)) return code;
    if (run.input.file && run.input.n_tokens) return fail_usage("--tokens generates tokens, but --input brings them");
    if (run.deferred && run.input.output)
        return fail_usage("--deferred leaves out the output, whose --output-dtype is given");
    if (run.backend == BACKEND_REF && (run.where.tuning || run.prepared_file))
        return fail_usage("%s is for the library, but --backend is ref", run.prepared_file ? "--prepared" : "--tuning");
    run.where.device = run.backend == BACKEND_CUDA ? MOE4_DEVICE_CUDA : MOE4_DEVICE_CPU;
    if (!run.input.n_tokens) run.input.n_tokens = DEFAULT_TOKENS;
    code = input_refuse(&run.input);
    if (code) return code;
    code = run_all(&run);
    free(run.load);
    pass_end(&run.pass);
    moe4_layer_destroy(run.layer);
    model_close(&run.model);
    machine_close(&run.machine);
    return code;
}
