#include "support.h"

#include "report.h"
#include "words.h"

json_t *support_machine_json(const struct machine *machine)
{
    const struct gpu *gpu = machine->gpu;
    json_t *object = json_object();
    json_put_text(object, "backend", machine_word(machine));
    json_put_text(object, "name", machine->info.device_name);
    json_put_text(object, "isa", machine->info.isa_name);
    json_put_integer(object, "threads", machine->info.n_threads);
    if (gpu) {
        json_put_real(object, "compute_capability", gpu->capability[0] + 0.1 * gpu->capability[1]);
        json_put_integer(object, "multiprocessors", gpu->n_multiprocessors);
        json_put_integer(object, "memory_bytes", gpu->memory_bytes);
        json_put_integer(object, "free_bytes", gpu->free_bytes);
        json_put_real(object, "clock_ghz_highest", gpu->clock_ghz);
        json_put_real(object, "memory_clock_ghz_highest", gpu->memory_clock_ghz);
    }
    return object;
}

void support_machine_print(const struct machine *machine)
{
    const struct gpu *gpu = machine->gpu;
    report_field("machine", "%s", machine_show(machine).text);
    if (gpu)
        report_field("", "compute capability %d.%d, %s of memory, %s free, up to %.2f GHz", gpu->capability[0],
                     gpu->capability[1], human_bytes((double)gpu->memory_bytes).text,
                     human_bytes((double)gpu->free_bytes).text, gpu->clock_ghz);
}

/* "ok", or the library's reason, which lives until the next question. */
static const char *support_ask(const struct machine *machine, const moe4_layer_config *config, int compute)
{
    moe4_query query = MOE4_QUERY_INIT;
    moe4_layer_config prepared = *config;
    prepared.compute = query.compute = (moe4_compute)compute;
    query.config = &prepared;
    return moe4_supports(machine->context, &query) == MOE4_OK ? "ok" : moe4_context_message(machine->context);
}

json_t *support_layer_json(const struct machine *machine, const moe4_layer_config *config)
{
    json_t *object = json_object();
    for (int i = 0; compute_words[i]; ++i) json_put_text(object, compute_words[i], support_ask(machine, config, i));
    return object;
}

void support_layer_print(const struct machine *machine, const moe4_layer_config *config)
{
    for (int i = 0; compute_words[i]; ++i)
        report_field(i ? "" : "runs here", "%s: %s", compute_words[i], support_ask(machine, config, i));
}
