/* Tables of refusals: what to change in valid arguments, and what the library must then say. */
#ifndef MOE4_TEST_REFUSAL_H
#define MOE4_TEST_REFUSAL_H

#include <stddef.h>
#include <stdint.h>

#include "call.h"

/* Every struct that a caller may fill, valid before a row of the table changes it. */
struct arguments {
    moe4_context_config context;
    moe4_thread_pool pool;
    moe4_allocator allocator;
    moe4_layer_config config;
    moe4_query query;
    moe4_expert expert;
    moe4_batch batch;
    moe4_topk topk;
    moe4_logits logits;
    moe4_result result;
};

/* A field of struct arguments and what it is set to. */
struct change {
    size_t offset, bytes; /* bytes 0 = no change */
    uint64_t value;
};
#define SET(field, new_value)                                                                                          \
    {                                                                                                                  \
        offsetof(struct arguments, field), sizeof(((struct arguments *)0)->field), (uint64_t)(new_value)               \
    }

/* The bits of a float, for SET. */
uint32_t float_bits(float value);

enum { MAX_CHANGES = 3, MAX_WORDS = 3 };

struct refusal {
    struct change changes[MAX_CHANGES];
    moe4_status status;
    const char *words[MAX_WORDS]; /* each must be in the message: the field, what it is, what it should be */
};

void refusal_apply(const struct refusal *refusal, struct arguments *arguments);

/* Fails the test unless this status and the context's message are what the table says. */
void refusal_check(const struct refusal *refusal, size_t row, moe4_status status, const moe4_context *context);

/* Fails the test unless every output of a call is as call_create made it. */
void check_untouched_outputs(const struct call *call);

#endif
