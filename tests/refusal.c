#include "refusal.h"

#include <setjmp.h>
#include <stdarg.h> /* for cmocka.h, as the next two */
#include <string.h>

#include <cmocka.h>

uint32_t float_bits(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

void refusal_apply(const struct refusal *refusal, struct arguments *arguments)
{
    for (int i = 0; i < MAX_CHANGES; i++) /* the low bytes: little endian */
        memcpy((char *)arguments + refusal->changes[i].offset, &refusal->changes[i].value, refusal->changes[i].bytes);
}

void refusal_check(const struct refusal *refusal, size_t row, moe4_status status, const moe4_context *context)
{
    const char *message = moe4_context_message(context);
    if (status != refusal->status)
        fail_msg("row %zu (%s): %s, expected %s; message \"%s\"", row, refusal->words[0], moe4_status_name(status),
                 moe4_status_name(refusal->status), message);
    for (int i = 0; i < MAX_WORDS && refusal->words[i]; i++)
        if (!strstr(message, refusal->words[i]))
            fail_msg("row %zu: \"%s\" is not in \"%s\"", row, refusal->words[i], message);
}

static void check_ff(const void *output, size_t bytes, const char *what)
{
    for (size_t i = 0; output && i < bytes; i++)
        if (((const uint8_t *)output)[i] != 0xFF) fail_msg("a refused call has written %s", what);
}

void check_untouched_outputs(const struct call *call)
{
    const moe4_layer_config *config = call->config;
    const moe4_result *r = &call->result;
    const size_t slots = (size_t)call->R;
    assert_memory_equal(r->y, call->y_before, call->y_bytes);
    check_ff(r->ids, slots * sizeof *r->ids, "ids");
    check_ff(r->weights, slots * sizeof *r->weights, "weights");
    check_ff(r->intermediate, slots * (size_t)config->intermediate_size, "the intermediate");
    check_ff(r->gemm2_rows, slots * (size_t)output_columns(config) * sizeof *r->gemm2_rows, "gemm2 rows");
    check_ff(r->row_map, slots * sizeof *r->row_map, "the row map");
    check_ff(r->n_rows, sizeof *r->n_rows, "n_rows");
    check_ff(r->logits, (size_t)(call->T * config->n_experts) * sizeof *r->logits, "logits");
    check_ff(r->replay, (size_t)(r->replay_rows * call->A) * sizeof *r->replay, "replay");
}
