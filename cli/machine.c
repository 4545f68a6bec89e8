#include "machine.h"

#include <sched.h>
#include <stdio.h>

#include "command.h"
#include "message.h"
#include "report.h"
#include "words.h"
#include "moe4/tune.h"

static int32_t processors(void)
{
    cpu_set_t set;
    return sched_getaffinity(0, sizeof set, &set) ? 1 : CPU_COUNT(&set);
}

/* What one device alone has is refused beside the other, not ignored. */
static int choice_check(const struct machine_choice *choice)
{
    const int is_gpu_isa = choice->isa >= MOE4_ISA_SM_80;
    if (choice->device == MOE4_DEVICE_CPU && is_gpu_isa)
        return fail_usage("--isa %s is a GPU's, but --backend is cpu", isa_words[choice->isa]);
    if (choice->device == MOE4_DEVICE_CPU) return EXIT_OK;
    if (choice->isa && !is_gpu_isa)
        return fail_usage("--isa %s is the CPU's, but --backend is cuda", isa_words[choice->isa]);
    if (choice->n_threads) return fail_usage("--threads are the CPU's, but --backend is cuda");
    return EXIT_OK;
}

/* How many threads the library would use if nobody said how many. */
static int count_available(int32_t *n_threads)
{
    moe4_context_info info = MOE4_CONTEXT_INFO_INIT;
    moe4_context *context = NULL;
    int code = context_open_simple(0, &context, &info);
    moe4_context_destroy(context);
    *n_threads = info.n_threads;
    return code;
}

int machine_open(const struct machine_choice *choice, struct machine *machine)
{
    *machine = (struct machine){.info = MOE4_CONTEXT_INFO_INIT};
    moe4_context_config config = MOE4_CONTEXT_CONFIG_INIT;
    config.device = choice->device;
    config.isa = (moe4_isa)choice->isa;
    config.n_threads = (int32_t)choice->n_threads;
    config.allocator = choice->allocator;
    int code = choice_check(choice);
    if (!code) code = context_open(&config, &machine->context, &machine->info);
    if (!code && choice->tuning && moe4_tuning_load(machine->context, choice->tuning) != MOE4_OK)
        code = fail_library(machine->context);
    if (!code && choice->device == MOE4_DEVICE_CUDA) code = gpu_open(&machine->gpu);
    machine->n_host_threads = choice->device == MOE4_DEVICE_CPU ? machine->info.n_threads : processors();
    machine->n_busy_threads = machine->info.n_threads;
    int32_t n_available = machine->info.n_threads;
    if (!code && choice->n_threads) code = count_available(&n_available);
    if (n_available < machine->n_busy_threads) machine->n_busy_threads = n_available;
    if (code) machine_close(machine);
    return code;
}

void machine_close(struct machine *machine)
{
    gpu_close(machine->gpu);
    moe4_context_destroy(machine->context);
    machine->gpu = NULL;
    machine->context = NULL;
}

const char *machine_word(const struct machine *machine)
{
    return machine->gpu ? "cuda" : "cpu";
}

struct machine_text machine_show(const struct machine *machine)
{
    const moe4_context_info *info = &machine->info;
    struct machine_text result;
    if (machine->gpu)
        snprintf(result.text, sizeof result.text, "%.80s, %s, %d multiprocessors", machine->gpu->name, info->isa_name,
                 machine->gpu->n_multiprocessors);
    else
        snprintf(result.text, sizeof result.text, "%.80s, %s, %s", info->device_name, info->isa_name,
                 human_plural(info->n_threads, "thread").text);
    return result;
}
