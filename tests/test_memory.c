/* What lies in padding, workspace and outputs changes nothing, and nothing is read that is not asked for. */
#include <setjmp.h>
#include <stdarg.h> /* for cmocka.h, as the next two */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmocka.h>

#include "call.h"
#include "cpu/prepared.h"

static moe4_isa levels[MAX_LEVELS];
static int32_t n_levels;

/* ---- Workspace and outputs ---- */

static void fill_outputs(struct call *call, int byte)
{
    const moe4_layer_config *config = call->config;
    const moe4_result *result = &call->result;
    const size_t slots = (size_t)call->R, I = (size_t)config->intermediate_size;
    memset(call->batch.workspace, byte, call->batch.workspace_bytes);
    memset(result->y, byte, call->y_bytes);
    memset(result->ids, byte, slots * sizeof *result->ids);
    memset(result->weights, byte, slots * sizeof *result->weights);
    memset(result->intermediate, byte, slots * I * (size_t)intermediate_bytes(call->plan.compute));
    memset(result->gemm2_rows, byte, slots * (size_t)output_columns(config) * sizeof *result->gemm2_rows);
    memset(result->row_map, byte, slots * sizeof *result->row_map);
    memset(result->n_rows, byte, sizeof *result->n_rows);
}

static void test_poisoned_workspace_and_outputs(void **state)
{
    (void)state;
    static const int bytes[] = {0x00, 0xFF, 0x7F, 0x80};
    for (int32_t i = 0; i < n_levels * 4; i++) {
        struct buffers buffers = {BUFFERS_PLAIN, NULL};
        moe4_layer_config config = layer_config(96, 160, 7, 3);
        config.n_local_experts = 5;
        config.compute = (moe4_compute)((i + i / 4) % n_computes());
        struct weight_plan weights = {.biases = BIAS_BOTH, .seed = 2};
        moe4_expert *experts = weights_create(&buffers, &config, &weights);
        moe4_context *context = context_open(levels[i / 4], 2);
        moe4_layer *layer = layer_open(context, &config, experts);
        struct call_plan plan = {.n_tokens = 45, .compute = config.compute};
        struct call first = call_create(&buffers, &config, &plan), again = call_create(&buffers, &config, &plan);
        call_must_run(&buffers, context, layer, &first);
        call_must_run(&buffers, context, layer, &again);
        fill_outputs(&again, bytes[i % 4]);
        assert_int_equal(moe4_forward_router(context, layer, &again.batch, &again.logits, &again.result), MOE4_OK);
        call_compare(&first, &again);
        moe4_layer_destroy(layer);
        moe4_context_destroy(context);
        buffers_release(&buffers);
    }
}

/* ---- Padding of weights ---- */

static void fill_gaps(const moe4_matrix *matrix, int64_t rows, int64_t K, int byte)
{
    for (int64_t row = 0; row < rows; row++) {
        const int is_last = row == rows - 1;
        memset((uint8_t *)matrix->codes + row * matrix->codes_row_bytes + K / 2, byte,
               is_last ? 0 : (size_t)(matrix->codes_row_bytes - K / 2));
        memset((uint8_t *)matrix->scales + row * matrix->scales_row_bytes + K / 32, byte,
               is_last ? 0 : (size_t)(matrix->scales_row_bytes - K / 32));
    }
}

/* Rows I .. stored-1 of the first half, which belong to no column. */
static void fill_unused_rows(const moe4_matrix *matrix, int64_t I, int64_t stored, int64_t H, int byte)
{
    for (int64_t row = I; row < stored; row++) {
        memset((uint8_t *)matrix->codes + row * matrix->codes_row_bytes, byte, (size_t)H / 2);
        memset((uint8_t *)matrix->scales + row * matrix->scales_row_bytes, byte, (size_t)H / 32);
        memset((float *)matrix->bias + row, byte, sizeof(float));
    }
}

/* 90 blocks a row, then bytes that are no scales: the output does not know them. */
static void test_what_follows_the_last_scale(void **state)
{
    (void)state;
    enum { H = 2880, I = 32, STORED = 48 };
    static const int bytes[] = {0xFF, 0xFE, 0x00};
    struct buffers buffers = {BUFFERS_PLAIN, NULL};
    moe4_layer_config config = layer_config(H, I, 2, 1);
    struct weight_plan weights = {.biases = BIAS_BOTH, .row_gap = 6, .seed = 3};
    struct call calls[3];
    config.gate_up = MOE4_GATE_UP_UP_FIRST;
    config.stored_intermediate_size = STORED;
    moe4_context *context = context_open(MOE4_ISA_AUTO, 2);
    for (int i = 0; i < 3; i++) {
        moe4_expert *experts = weights_create(&buffers, &config, &weights);
        for (int l = 0; l < 2; l++) {
            fill_gaps(&experts[l].gate_up, STORED + I, H, bytes[i]);
            fill_gaps(&experts[l].down, H, I, bytes[i]);
            fill_unused_rows(&experts[l].gate_up, I, STORED, H, bytes[i]);
        }
        moe4_layer *layer = layer_open(context, &config, experts);
        calls[i] = call_create(&buffers, &config, &(struct call_plan){.n_tokens = 4});
        call_must_run(&buffers, context, layer, &calls[i]);
        if (i) call_compare(&calls[0], &calls[i]);
        moe4_layer_destroy(layer);
    }
    moe4_context_destroy(context);
    buffers_release(&buffers);
}

/* ---- Where weights begin ---- */

static const void *copy_to(struct buffers *buffers, const void *from, int64_t n_bytes, int offset)
{
    char *place = buffers_allocate(buffers, (size_t)n_bytes + 8);
    memcpy(place + offset, from, (size_t)n_bytes);
    return place + offset;
}

/* The same matrix, its arrays at three different places within a word. */
static moe4_matrix matrix_at(struct buffers *buffers, const moe4_matrix *matrix, int64_t rows, int64_t K, int offset)
{
    const int64_t bias_bytes = rows * (matrix->bias_dtype == MOE4_DTYPE_F32 ? 4 : 2);
    moe4_matrix moved = *matrix;
    moved.codes = copy_to(buffers, matrix->codes, rows * K / 2, offset);
    moved.scales = copy_to(buffers, matrix->scales, rows * K / 32, (offset + 3) % 8);
    moved.bias = copy_to(buffers, matrix->bias, bias_bytes, (offset + 6) % 8);
    return moved;
}

/* As in a file that is mapped, whose tensors begin anywhere. */
static void test_weights_at_any_byte(void **state)
{
    (void)state;
    enum { H = 96, I = 160, L = 3 };
    for (int32_t i = 0; i < n_levels * 8; i++) {
        struct buffers buffers = {BUFFERS_PLAIN, NULL};
        moe4_layer_config config = layer_config(H, I, L, 2);
        struct weight_plan weights = {
            .biases = BIAS_BOTH, .bias_dtype = i % 2 ? MOE4_DTYPE_F32 : MOE4_DTYPE_BF16, .seed = 4};
        moe4_expert *experts = weights_create(&buffers, &config, &weights), moved[L];
        for (int l = 0; l < L; l++) {
            moved[l].gate_up = matrix_at(&buffers, &experts[l].gate_up, 2 * I, H, i % 8);
            moved[l].down = matrix_at(&buffers, &experts[l].down, H, I, (i + 5) % 8);
        }
        moe4_context *context = context_open(levels[i / 8], 2);
        moe4_layer *layer = layer_open(context, &config, experts), *other = layer_open(context, &config, moved);
        struct call first = call_create(&buffers, &config, &(struct call_plan){.n_tokens = 9});
        struct call again = call_create(&buffers, &config, &(struct call_plan){.n_tokens = 9});
        call_must_run(&buffers, context, layer, &first);
        call_must_run(&buffers, context, other, &again);
        call_compare(&first, &again);
        moe4_layer_destroy(other);
        moe4_layer_destroy(layer);
        moe4_context_destroy(context);
        buffers_release(&buffers);
    }
}

/* ---- Experts that nobody chose ---- */

static void *page_allocate(void *user, size_t bytes, size_t alignment)
{
    (void)user, (void)alignment;
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return memory == MAP_FAILED ? NULL : memory;
}

static void page_release(void *user, void *memory, size_t bytes)
{
    (void)user;
    munmap(memory, bytes);
}

static void forbid(const struct packed_matrix *matrix, int32_t l)
{
    const size_t bytes = (size_t)(matrix->n_panels * matrix->panel_bytes);
    assert_int_equal(bytes % (size_t)sysconf(_SC_PAGESIZE), 0);
    assert_int_equal(mprotect((void *)packed_panel(matrix, l, 0), bytes, PROT_NONE), 0);
}

/* Sizes whose packed experts are whole pages.  Tokens choose experts 1 and 4 of 6. */
static void check_unread(moe4_isa isa)
{
    struct buffers buffers = {BUFFERS_PLAIN, NULL};
    moe4_allocator pages = {page_allocate, page_release, NULL};
    moe4_context_config context_config = MOE4_CONTEXT_CONFIG_INIT;
    moe4_layer_config config = layer_config(512, 256, 6, 2);
    struct weight_plan weights = {.biases = BIAS_BOTH, .seed = 4};
    moe4_context *context;
    context_config.isa = isa;
    context_config.n_threads = 2;
    context_config.allocator = &pages;
    assert_int_equal(moe4_context_create(&context_config, &context), MOE4_OK);
    moe4_expert *experts = weights_create(&buffers, &config, &weights);
    moe4_layer *layer = layer_open(context, &config, experts);
    const struct prepared *prepared = layer->prepared;
    for (int32_t l = 0; l < 6; l++) {
        if (l == 1 || l == 4) continue;
        forbid(&prepared->gate_up, l);
        forbid(&prepared->down, l);
    }
    struct call_plan plan = {.n_tokens = 50, .top_k = 2, .routing = ROUTE_IDS_F32, .ids = IDS_WILD};
    struct call call = call_create(&buffers, &config, &plan);
    for (int64_t p = 0; p < call.R; p++) ((int32_t *)call.topk.ids)[p] = p % 3 == 0 ? 1 : p % 3 == 1 ? 4 : -1;
    call_must_run(&buffers, context, layer, &call);
    call_check(&call, experts, isa, 8);
    moe4_layer_destroy(layer);
    moe4_context_destroy(context);
    buffers_release(&buffers);
}

static void test_experts_nobody_chose_are_not_read(void **state)
{
    (void)state;
    if (!is_cpu_tested()) skip();
    for (int32_t i = 0; i < n_levels; i++) check_unread(levels[i]);
}

/* The caller's weights may go as soon as the layer is there. */
static void test_source_weights_are_copied(void **state)
{
    (void)state;
    struct buffers buffers = {BUFFERS_PLAIN, NULL}, source = {BUFFERS_GUARD_AFTER, NULL};
    moe4_layer_config config = layer_config(64, 64, 4, 2);
    float alphas[4] = {1, 1.5f, 2, 2.5f};
    struct weight_plan weights = {.biases = BIAS_BOTH, .seed = 6};
    struct call_plan plan = {.n_tokens = 9, .routing = ROUTE_OWN_ROUTER};
    config.alpha = (moe4_param){MOE4_PER_EXPERT, 0, alphas};
    router_create(&source, &config, 1);
    moe4_context *context = context_open(MOE4_ISA_AUTO, 1);
    moe4_expert *experts = weights_create(&source, &config, &weights);
    moe4_layer *layer = layer_open(context, &config, experts);
    struct call before = call_create(&buffers, &config, &plan), after = call_create(&buffers, &config, &plan);
    call_must_run(&buffers, context, layer, &before);
    buffers_release(&source); /* unmapped: a read would be a fault */
    memset(alphas, 0xFF, sizeof alphas);
    call_must_run(&buffers, context, layer, &after);
    call_compare(&before, &after);
    moe4_layer_destroy(layer);
    moe4_context_destroy(context);
    buffers_release(&buffers);
}

/* ---- Rows far apart ---- */

/* n rows of `row_bytes`, a stride apart, copied into memory of which only they are touched. */
static char *spread(const void *rows, int64_t n, size_t row_bytes, size_t stride)
{
    char *far =
        mmap(NULL, (size_t)n * stride, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (far == MAP_FAILED) skip(); /* a system that promises no more than it has */
    for (int64_t i = 0; i < n; i++)
        memcpy(far + (size_t)i * stride, (const char *)rows + (size_t)i * row_bytes, row_bytes);
    return far;
}

/* x and y of more than 2^32 elements, gaps included. */
static void test_rows_far_apart(void **state)
{
    (void)state;
    if (!is_cpu_tested()) skip();
    enum { H = 32, E = 4, T = 4200, LD = 1 << 20 };
    struct buffers buffers = {BUFFERS_PLAIN, NULL};
    moe4_layer_config config = layer_config(H, 32, E, 2);
    struct weight_plan weights = {.seed = 5};
    moe4_context *context = context_open(MOE4_ISA_AUTO, 2);
    moe4_layer *layer = layer_open(context, &config, weights_create(&buffers, &config, &weights));
    struct call near = call_create(&buffers, &config, &(struct call_plan){.n_tokens = T}), far = near;
    const size_t row_bytes = H * sizeof(uint16_t), stride = LD * sizeof(uint16_t);
    far.batch.x = spread(near.batch.x, T, row_bytes, stride);
    far.result.y = spread(near.result.y, T, row_bytes, stride);
    far.batch.ldx = far.result.ldy = LD;
    call_must_run(&buffers, context, layer, &near);
    call_must_run(&buffers, context, layer, &far);
    for (int64_t t = 0; t < T; t++)
        assert_memory_equal((uint16_t *)near.result.y + t * H, (uint16_t *)far.result.y + t * LD, row_bytes);
    munmap((void *)far.batch.x, T * stride);
    munmap(far.result.y, T * stride);
    moe4_layer_destroy(layer);
    moe4_context_destroy(context);
    buffers_release(&buffers);
}

int main(void)
{
    n_levels = isa_levels(levels);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_poisoned_workspace_and_outputs),
        cmocka_unit_test(test_what_follows_the_last_scale),
        cmocka_unit_test(test_weights_at_any_byte),
        cmocka_unit_test(test_experts_nobody_chose_are_not_read),
        cmocka_unit_test(test_source_weights_are_copied),
        cmocka_unit_test(test_rows_far_apart),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
