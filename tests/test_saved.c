/* Prepared layers in files: what is loaded computes what was saved, and nothing else is accepted. */
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h> /* for cmocka.h, as the next two */
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "call.h"
#include "layer.h"
#include "moe4/io.h"

enum { H = 96, I = 64, E = 6, A = 2, T = 11 };

static char folder[] = "/tmp/moe4-saved-XXXXXX";
static char path[64];

static int make_folder(void **state)
{
    (void)state;
    if (!mkdtemp(folder)) return -1;
    snprintf(path, sizeof path, "%s/layer.safetensors", folder);
    return 0;
}

static int remove_folder(void **state)
{
    (void)state;
    unlink(path);
    return rmdir(folder);
}

/* Layers that differ in all that a file must carry. */
static moe4_layer_config make_config(struct buffers *buffers, int which)
{
    moe4_layer_config config = layer_config(H, I, E, A);
    if (which == 0) router_create(buffers, &config, 9);
    if (which == 1) {
        static const int32_t map[E] = {-1, 2, 0, -1, 1, -1};
        static const float limits[3] = {7, 3, 9}, alphas[3] = {1, 2, 1.5f};
        config.expert_map = map;
        config.limit = (moe4_param){MOE4_PER_EXPERT, 0, limits};
        config.alpha = (moe4_param){MOE4_PER_EXPERT, 0, alphas};
        config.output_size = 70;
    }
    if (which == 2) {
        static const float bias[E] = {0.5f, -1, 0, 2, 1, -0.25f};
        config.routing.method = MOE4_ROUTING_DEEPSEEK_V3;
        config.routing.n_group = 3;
        config.routing.topk_group = 2;
        config.routing.scaling_factor = 2.5f;
        config.routing.correction_bias = bias;
        config.routing.correction_bias_dtype = MOE4_DTYPE_F32;
        config.activation = MOE4_ACTIVATION_SITU;
        config.alpha = (moe4_param){MOE4_SAME, 4, NULL};
        config.beta = config.limit = (moe4_param)MOE4_PARAM_INIT;
        config.gate_up = MOE4_GATE_UP_UP_FIRST;
        config.stored_intermediate_size = I + 32;
    }
    if (which == 3) {
        config.activation = MOE4_ACTIVATION_RELU2;
        config.gate_up = MOE4_GATE_UP_NONE;
        config.alpha = config.beta = config.limit = (moe4_param)MOE4_PARAM_INIT;
        config.routing = (moe4_routing)MOE4_ROUTING_INIT;
        config.first_expert = 2;
    }
    return config;
}

static moe4_layer *create(struct buffers *buffers, moe4_context *context, moe4_layer_config *config, int which)
{
    struct weight_plan weights = {.biases = BIAS_BOTH, .seed = 5};
    *config = make_config(buffers, which);
    return layer_open(context, config, weights_create(buffers, config, &weights));
}

static void test_loaded_is_saved(void **state)
{
    (void)state;
    for (int i = 0; i < (is_cpu_tested() ? 8 : 4); i++) {
        int which = i % 4;
        moe4_mapping mapping = i < 4 ? MOE4_MAPPING_NONE : MOE4_MAPPING_SHARED;
        struct buffers buffers = {BUFFERS_PLAIN, NULL};
        moe4_context *context = context_open(MOE4_ISA_AUTO, 2);
        moe4_layer_config config;
        moe4_layer *layer = create(&buffers, context, &config, which), *loaded;
        assert_int_equal(moe4_layer_save(context, layer, "source 1", path), MOE4_OK);
        assert_int_equal(moe4_layer_load(context, path, "source 1", mapping, &loaded), MOE4_OK);
        assert_int_equal(loaded->mapping != NULL, mapping == MOE4_MAPPING_SHARED);
        if (loaded->mapping) unlink(path); /* the mapping keeps it */

        struct call_plan plan = {.n_tokens = T, .top_k = A, .seed = 6};
        plan.routing = which == 0 ? ROUTE_OWN_ROUTER : which == 3 ? ROUTE_IDS_F32 : ROUTE_LOGITS_F32;
        struct call first = call_create(&buffers, &config, &plan), second = call_create(&buffers, &config, &plan);
        call_must_run(&buffers, context, layer, &first);
        call_must_run(&buffers, context, loaded, &second);
        call_compare(&first, &second);
        assert_int_equal(loaded->first_expert, layer->first_expert);
        moe4_layer_destroy(loaded);
        moe4_layer_destroy(layer);
        moe4_context_destroy(context);
        buffers_release(&buffers);
    }
}

/* A saved layer fits every level: packed once, run by each kernel. */
static void test_any_level(void **state)
{
    (void)state;
    moe4_isa levels[MAX_LEVELS];
    int32_t n = isa_levels(levels);
    struct buffers buffers = {BUFFERS_PLAIN, NULL};
    moe4_context *context = context_open(levels[n - 1], 1);
    moe4_layer_config config;
    moe4_layer *layer = create(&buffers, context, &config, 0);
    assert_int_equal(moe4_layer_save(context, layer, NULL, path), MOE4_OK);
    for (int32_t i = 0; i < n; i++) {
        moe4_context *other = context_open(levels[i], 1);
        moe4_layer *own = layer_open(
            other, &config, weights_create(&buffers, &config, &(struct weight_plan){.biases = BIAS_BOTH, .seed = 5}));
        moe4_layer *loaded;
        assert_int_equal(moe4_layer_load(other, path, NULL, MOE4_MAPPING_NONE, &loaded), MOE4_OK);
        struct call_plan plan = {.n_tokens = T, .top_k = A, .seed = 6};
        struct call first = call_create(&buffers, &config, &plan), second = call_create(&buffers, &config, &plan);
        call_must_run(&buffers, other, own, &first);
        call_must_run(&buffers, other, loaded, &second);
        call_compare(&first, &second);
        moe4_layer_destroy(loaded);
        moe4_layer_destroy(own);
        moe4_context_destroy(other);
    }
    moe4_layer_destroy(layer);
    moe4_context_destroy(context);
    buffers_release(&buffers);
}

/* Tensors, but no layer. */
static void write_other_file(moe4_context *context)
{
    const moe4_tensor tensor = {.name = "x", .dtype = "U8", .rank = 1, .shape = {3}, .n_bytes = 3};
    moe4_writer *writer;
    assert_int_equal(moe4_writer_create(context, path, &tensor, 1, NULL, &writer), MOE4_OK);
    assert_int_equal(moe4_writer_write(context, writer, 0, 0, 3, "abc"), MOE4_OK);
    assert_int_equal(moe4_writer_commit(context, writer), MOE4_OK);
}

static void test_wrong_source(void **state)
{
    (void)state;
    struct buffers buffers = {BUFFERS_PLAIN, NULL};
    moe4_context *context = context_open(MOE4_ISA_AUTO, 1);
    moe4_layer_config config;
    moe4_layer *layer = create(&buffers, context, &config, 1), *loaded = layer;
    assert_int_equal(moe4_layer_save(context, layer, "one", path), MOE4_OK);
    assert_int_equal(moe4_layer_load(context, path, "another", MOE4_MAPPING_NONE, &loaded), MOE4_EFORMAT);
    assert_null(loaded);
    assert_non_null(strstr(moe4_context_message(context), "\"one\", expected \"another\""));
    write_other_file(context);
    assert_int_equal(moe4_layer_load(context, path, NULL, MOE4_MAPPING_NONE, &loaded), MOE4_EFORMAT);
    assert_non_null(strstr(moe4_context_message(context), "format"));
    moe4_layer_destroy(layer);
    moe4_context_destroy(context);
    buffers_release(&buffers);
}

/* Every bit of the header, the numbers and the small arrays flipped, and the file cut at many places: an error or a
 * layer that runs, and never a leak or a crash. */
static void test_damaged_files(void **state)
{
    (void)state;
    struct buffers buffers = {BUFFERS_PLAIN, NULL};
    moe4_context *context = context_open(MOE4_ISA_AUTO, 1);
    moe4_layer_config config;
    moe4_layer *layer = create(&buffers, context, &config, 2), *loaded;
    assert_int_equal(moe4_layer_save(context, layer, NULL, path), MOE4_OK);
    struct stat facts;
    assert_int_equal(stat(path, &facts), 0);
    int fd = open(path, O_RDWR);
    int n_refused = 0, n_tried = 0;
    for (int64_t at = 0; at < facts.st_size; at += at < 2048 || at > facts.st_size - 1024 ? 1 : 1021) {
        uint8_t byte, flipped;
        assert_int_equal(pread(fd, &byte, 1, at), 1);
        flipped = (uint8_t)(byte ^ 1 << at % 8);
        assert_int_equal(pwrite(fd, &flipped, 1, at), 1);
        n_tried++;
        moe4_status status = moe4_layer_load(context, path, NULL, MOE4_MAPPING_NONE, &loaded);
        n_refused += status != MOE4_OK;
        if (status) assert_true(strlen(moe4_context_message(context)) > 8);
        moe4_layer_destroy(loaded);
        assert_int_equal(pwrite(fd, &byte, 1, at), 1);
    }
    assert_true(n_refused > 500 && n_refused < n_tried);
    for (int64_t size = facts.st_size - 1; size >= 0; size -= 1 + size / 7) {
        assert_int_equal(ftruncate(fd, size), 0);
        assert_int_not_equal(moe4_layer_load(context, path, NULL, MOE4_MAPPING_NONE, &loaded), MOE4_OK);
    }
    close(fd);
    moe4_layer_destroy(layer);
    moe4_context_destroy(context);
    buffers_release(&buffers);
}

/* The n-th allocation fails, n = 1, 2, ... */
static void test_failing_memory(void **state)
{
    (void)state;
    struct buffers buffers = {BUFFERS_PLAIN, NULL};
    moe4_context *context = context_open(MOE4_ISA_AUTO, 1);
    moe4_layer_config config;
    moe4_layer *layer = create(&buffers, context, &config, 2);
    assert_int_equal(moe4_layer_save(context, layer, NULL, path), MOE4_OK);
    struct test_allocator memory;
    test_allocator_init(&memory);
    moe4_context_config context_config = MOE4_CONTEXT_CONFIG_INIT;
    context_config.allocator = &memory.allocator;
    context_config.device = is_cpu_tested() ? MOE4_DEVICE_CPU : MOE4_DEVICE_CUDA;
    context_config.n_threads = is_cpu_tested();
    moe4_context *limited;
    assert_int_equal(moe4_context_create(&context_config, &limited), MOE4_OK);
    const int64_t n_before = memory.n_live;
    moe4_status status = MOE4_ENOMEM;
    for (int64_t n = 1; status == MOE4_ENOMEM && n < 1000; n++) {
        moe4_layer *loaded;
        memory.fails_at = memory.n_requests + n;
        status = moe4_layer_load(limited, path, NULL, MOE4_MAPPING_NONE, &loaded);
        assert_true(status == MOE4_OK || status == MOE4_ENOMEM);
        moe4_layer_destroy(loaded);
        assert_int_equal(memory.n_live, n_before);
    }
    assert_int_equal(status, MOE4_OK);
    moe4_context_destroy(limited);
    moe4_layer_destroy(layer);
    moe4_context_destroy(context);
    buffers_release(&buffers);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_loaded_is_saved), cmocka_unit_test(test_any_level),
        cmocka_unit_test(test_wrong_source),    cmocka_unit_test(test_damaged_files),
        cmocka_unit_test(test_failing_memory),
    };
    return cmocka_run_group_tests(tests, make_folder, remove_folder);
}
