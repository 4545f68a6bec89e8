/* What a prepared layer takes: 4.25 bits a weight and 1 % at most, nothing besides while it is made, and large pages
 * for its weights where there are any. */
#include <setjmp.h>
#include <stdarg.h> /* for cmocka.h, as the next two */
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "call.h"
#include "cpu/prepared.h"

enum { N_EXPERTS = 2 };

/* Of models that people have, with biases or without. */
static const struct shape {
    int64_t H, I;
    int has_biases;
} shapes[] = {{2880, 2880, 1}, {4096, 2048, 0}, {7168, 2048, 0}, {3584, 3072, 0}, {2048, 768, 0}};

/* Every expert is the same zeros, which is all that sizes need. */
static moe4_status read_zeros(void *user, int32_t l, moe4_expert *expert)
{
    (void)l;
    *expert = *(const moe4_expert *)user;
    return MOE4_OK;
}

static void check_shape(const struct shape *shape)
{
    struct test_allocator memory;
    test_allocator_init(&memory);
    const int64_t weights = 3 * shape->H * shape->I; /* of an expert */
    uint8_t *zeros = calloc(1, (size_t)weights);
    const moe4_matrix matrix = {
        .codes = zeros, .scales = zeros, .bias = shape->has_biases ? zeros : NULL, .bias_dtype = MOE4_DTYPE_F32};
    moe4_expert expert = {matrix, matrix};
    const moe4_expert_source source = {.read = read_zeros, .user = &expert};
    moe4_layer_config config = layer_config(shape->H, shape->I, N_EXPERTS, 1);
    moe4_context_config context_config = MOE4_CONTEXT_CONFIG_INIT;
    moe4_layer_info info = MOE4_LAYER_INFO_INIT;
    moe4_context *context;
    moe4_layer *layer;
    context_config.allocator = &memory.allocator;
    assert_int_equal(moe4_context_create(&context_config, &context), MOE4_OK);
    const int64_t before = memory.live_bytes;
    assert_int_equal(moe4_layer_create_from(context, &config, &source, &layer), MOE4_OK);
    const int64_t taken = memory.live_bytes - before;
    const double bits = 8.0 / N_EXPERTS / (double)weights; /* of a weight, for each byte of the layer */
    assert_true(bits * (double)taken <= 4.25 * 1.01);
    assert_int_equal(memory.peak_bytes - before, taken);
    assert_int_equal(moe4_layer_describe(layer, &info), MOE4_OK);
    assert_true(bits * (double)info.weight_bytes == 4.25);
    assert_true(info.packed_bytes >= info.weight_bytes && info.packed_bytes <= taken);
    moe4_layer_destroy(layer);
    moe4_context_destroy(context);
    assert_int_equal(memory.live_bytes, 0);
    free(zeros);
}

static void test_memory(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) check_shape(&shapes[i]);
}

/* ---- Huge pages ---- */

/* Whether the kernel has been asked for huge pages at an address. */
static int is_advised(const void *address)
{
    FILE *file = fopen("/proc/self/smaps", "re");
    char line[512];
    unsigned long begin, end;
    int is_here = 0, is_advised = 0;
    assert_non_null(file);
    while (fgets(line, sizeof line, file)) {
        if (sscanf(line, "%lx-%lx ", &begin, &end) == 2)
            is_here = (uintptr_t)address >= begin && (uintptr_t)address < end;
        if (is_here && strncmp(line, "VmFlags:", 8) == 0) is_advised = strstr(line, " hg") != NULL;
    }
    fclose(file);
    return is_advised;
}

static void test_huge_pages(void **state)
{
    (void)state;
    if (access("/sys/kernel/mm/transparent_hugepage/enabled", R_OK)) skip();
    struct buffers buffers = {BUFFERS_PLAIN, NULL};
    moe4_layer_config config = layer_config(512, 512, 4, 1);
    struct weight_plan weights = {.seed = 1};
    moe4_context *context = context_open(MOE4_ISA_AUTO, 1);
    moe4_layer *layer = layer_open(context, &config, weights_create(&buffers, &config, &weights));
    const struct packed_matrix *matrices[] = {&((const struct prepared *)layer->prepared)->gate_up,
                                              &((const struct prepared *)layer->prepared)->down};
    for (int i = 0; i < 2; i++) assert_true(is_advised(packed_panel(matrices[i], 2, 0)));
    moe4_layer_destroy(layer);
    moe4_context_destroy(context);
    buffers_release(&buffers);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_memory),
        cmocka_unit_test(test_huge_pages),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
