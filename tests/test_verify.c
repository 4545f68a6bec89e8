/* What `moe4 run --check` and `moe4 check` are worth: a right pass is good, one wrong element is found, in its own
 * stage. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include <cmocka.h>

#include "generate.h"
#include "memory.h"
#include "oracle.h"
#include "shapes.h"
#include "verify.h"
#include "workload.h"

enum { TOKENS = 5 };

/* A small layer and a pass through it with every stage. */
struct fixture {
    struct layer_shape shape;
    moe4_layer_config config;
    struct workload workload;
    moe4_expert_source source;
    struct machine machine;
    moe4_layer *layer;
    struct pass pass;
};

static void fixture_open(struct fixture *f, moe4_compute compute)
{
    f->shape = *layer_shape_find("oss20b");
    f->shape.n_experts = 8;
    f->shape.hidden_size = 96;
    f->shape.intermediate_size = 64;
    f->config = layer_shape_config(&f->shape);
    assert_int_equal(machine_open(&(struct machine_choice){.n_threads = 2}, &f->machine), 0);
    assert_int_equal(workload_open(&f->shape, 1, &f->workload), 0);
    f->source = workload_source(&f->workload);
    assert_int_equal(moe4_layer_create_from(f->machine.context, &f->config, &f->source, &f->layer), MOE4_OK);
    struct pass *pass = &f->pass;
    *pass = pass_begin(&f->config, PASS_LOGITS, TOKENS, f->config.routing.top_k);
    pass->compute = compute;
    assert_int_equal(allocate(&pass->x, TOKENS * f->config.hidden_size, sizeof(uint16_t), "x"), 0);
    assert_int_equal(allocate(&pass->given_logits, TOKENS * f->config.n_experts, sizeof(float), "logits"), 0);
    generate_inputs(generate_key(0, GENERATE_INPUT, 0), 0, TOKENS, f->config.hidden_size, pass->x);
    assert_int_equal(workload_logits(LOAD_UNIFORM, 0, TOKENS, f->config.n_experts, pass->given_logits), 0);
    assert_int_equal(pass_allocate(pass, PASS_STAGES), 0);
    assert_int_equal(pass_prepare(pass, f->machine.context, f->layer), 0);
    assert_int_equal(pass_forward(pass, f->machine.context, f->layer, FORWARD_ALL), MOE4_OK);
}

static void fixture_close(struct fixture *f)
{
    pass_end(&f->pass);
    moe4_layer_destroy(f->layer);
    machine_close(&f->machine);
    workload_close(&f->workload);
}

static struct verify_report fixture_verify(struct fixture *f)
{
    struct verify_report report;
    assert_int_equal(verify_pass(&f->config, &f->source, &f->machine, &f->pass, VERIFY_THOROUGH, &report), 0);
    assert_int_equal(report.n_tokens, TOKENS);
    return report;
}

static void right_passes_are_good(void **state)
{
    (void)state;
    static const moe4_compute modes[] = {MOE4_COMPUTE_BF16, MOE4_COMPUTE_MXFP8, MOE4_COMPUTE_FP8, MOE4_COMPUTE_INT8};
    for (int i = 0; i < 4; i++) {
        struct fixture f = {0};
        fixture_open(&f, modes[i]);
        struct verify_report report = fixture_verify(&f);
        assert_true(verify_is_good(&report));
        assert_int_equal(report.stages[VERIFY_ROUTER].n_checked, 0); /* logits were given */
        for (int stage = VERIFY_ROUTING; stage < VERIFY_STAGES; stage++)
            assert_true(report.stages[stage].n_checked > 0);
        fixture_close(&f);
    }
}

/* The oracle as a backend passes its own judgement, and names the same rows. */
static void check_oracle_agrees(moe4_compute compute)
{
    struct fixture f = {0};
    fixture_open(&f, compute);
    struct pass oracle = pass_begin(&f.config, PASS_LOGITS, TOKENS, f.config.routing.top_k), library = f.pass;
    oracle.compute = library.compute;
    oracle.x = library.x;
    oracle.given_logits = library.given_logits;
    assert_int_equal(pass_allocate(&oracle, PASS_STAGES | PASS_REPLAY), 0);
    assert_int_equal(oracle_forward(&f.config, &f.source, 3, &oracle), 0);
    assert_int_equal(oracle.n_rows, library.n_rows);
    assert_memory_equal(oracle.row_map, library.row_map, TOKENS * 4 * sizeof(int32_t));
    for (int p = 0; p < TOKENS * 4; p++) assert_int_equal(oracle.replay[p], library.ids[p]);
    f.pass = oracle;
    struct verify_report report = fixture_verify(&f);
    assert_true(verify_is_good(&report));
    f.pass = library;
    oracle.x = NULL;
    oracle.given_logits = NULL;
    pass_end(&oracle);
    fixture_close(&f);
}

static void oracle_agrees(void **state)
{
    (void)state;
    check_oracle_agrees(MOE4_COMPUTE_MXFP8);
    check_oracle_agrees(MOE4_COMPUTE_FP8);
    check_oracle_agrees(MOE4_COMPUTE_INT8);
}

/* Damages one thing; expects the stage to have exactly n_outside elements outside, and the whole not to be good. */
static void expect_found(moe4_compute compute, void (*damage)(struct pass *pass), verify_stage stage, int64_t n_outside)
{
    struct fixture f = {0};
    fixture_open(&f, compute);
    damage(&f.pass);
    struct verify_report report = fixture_verify(&f);
    assert_int_equal(report.stages[stage].n_outside, n_outside);
    assert_true(report.stages[stage].worst_ratio > 1);
    assert_true(verify_worst_ratio(&report) > 1);
    assert_false(verify_is_good(&report));
    fixture_close(&f);
}

static void damage_id(struct pass *pass)
{
    pass->ids[4] = (pass->ids[4] + 1) % pass->n_experts;
}

static void damage_weight(struct pass *pass)
{
    pass->weights[5] *= 1.0078125f;
}

static void damage_intermediate(struct pass *pass)
{
    ((uint16_t *)pass->intermediate)[70] ^= 0x40;
}

static void damage_code(struct pass *pass)
{
    ((uint8_t *)pass->intermediate)[70] ^= 0x40;
}

static void damage_row(struct pass *pass)
{
    pass->gemm2_rows[100] ^= 0x40;
}

/* The last bit of the last element of the last token. */
static void damage_output(struct pass *pass)
{
    ((uint16_t *)pass->y)[TOKENS * pass->output_size - 1] ^= 1;
}

static void damage_is_found_in_its_stage(void **state)
{
    (void)state;
    expect_found(MOE4_COMPUTE_BF16, damage_id, VERIFY_ROUTING, 1);
    expect_found(MOE4_COMPUTE_BF16, damage_weight, VERIFY_ROUTING, 1);
    expect_found(MOE4_COMPUTE_BF16, damage_intermediate, VERIFY_INTERMEDIATE, 1);
    expect_found(MOE4_COMPUTE_MXFP8, damage_code, VERIFY_INTERMEDIATE, 1);
    expect_found(MOE4_COMPUTE_FP8, damage_code, VERIFY_INTERMEDIATE, 1);
    expect_found(MOE4_COMPUTE_INT8, damage_code, VERIFY_INTERMEDIATE, 1);
    expect_found(MOE4_COMPUTE_BF16, damage_row, VERIFY_GEMM2, 1);
    expect_found(MOE4_COMPUTE_BF16, damage_output, VERIFY_OUTPUT, 1);
}

/* The fixture's tokens again with the choices of its router, packed, and y in f32 added to numbers. */
static void fixture_give_ids(struct fixture *f)
{
    enum { A = 4 };
    struct pass given = pass_begin(&f->config, PASS_IDS, TOKENS, A);
    float *addend;
    const int64_t n_y = TOKENS * f->config.hidden_size;
    given.x = f->pass.x;
    f->pass.x = NULL;
    given.topk_format = MOE4_TOPK_PACKED;
    given.y_dtype = MOE4_DTYPE_F32;
    assert_int_equal(allocate(&given.given_ids, TOKENS * A, sizeof(int32_t), "ids"), 0);
    assert_int_equal(allocate(&addend, n_y, sizeof *addend, "addend"), 0);
    for (int p = 0; p < TOKENS * A; p++)
        given.given_ids[p] = (int32_t)((uint32_t)f->pass.ids[p] << 16 | ref_to_bf16(f->pass.weights[p]));
    for (int64_t i = 0; i < n_y; i++) addend[i] = (float)(i % 7 - 3);
    given.addend = addend;
    pass_end(&f->pass);
    f->pass = given;
    assert_int_equal(pass_allocate(&f->pass, PASS_STAGES), 0);
    assert_int_equal(pass_prepare(&f->pass, f->machine.context, f->layer), 0);
    assert_int_equal(pass_forward(&f->pass, f->machine.context, f->layer, FORWARD_ALL), MOE4_OK);
}

static void damage_addend(struct pass *pass)
{
    ((float *)pass->addend)[3] += 0.25f;
}

static void damage_wide_output(struct pass *pass)
{
    ((uint32_t *)pass->y)[TOKENS * pass->output_size - 1] ^= 1;
}

static void given_ids_and_addends_are_checked(void **state)
{
    (void)state;
    static const struct {
        void (*damage)(struct pass *pass);
        verify_stage stage;
    } cases[] = {{damage_id, VERIFY_ROUTING},
                 {damage_weight, VERIFY_ROUTING},
                 {damage_addend, VERIFY_OUTPUT},
                 {damage_wide_output, VERIFY_OUTPUT}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct fixture f = {0};
        fixture_open(&f, MOE4_COMPUTE_BF16);
        fixture_give_ids(&f);
        struct verify_report report = fixture_verify(&f);
        assert_true(verify_is_good(&report));
        assert_int_equal(report.stages[VERIFY_ROUTING].n_checked, TOKENS * 4);
        cases[i].damage(&f.pass);
        report = fixture_verify(&f);
        assert_true(report.stages[cases[i].stage].n_outside > 0);
        assert_false(verify_is_good(&report));
        fixture_close(&f);
    }
}

/* The whole layer counts too, even when every stage is right. */
static void wrong_layers_are_found(void **state)
{
    (void)state;
    struct fixture f = {0};
    fixture_open(&f, MOE4_COMPUTE_BF16);
    struct verify_report report = fixture_verify(&f);
    assert_true(verify_layer_is_close(&report));
    report.frobenius.overall = 2.1e-3;
    assert_false(verify_layer_is_close(&report));
    assert_false(verify_is_good(&report));
    fixture_close(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(right_passes_are_good),        cmocka_unit_test(oracle_agrees),
        cmocka_unit_test(damage_is_found_in_its_stage), cmocka_unit_test(given_ids_and_addends_are_checked),
        cmocka_unit_test(wrong_layers_are_found),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
