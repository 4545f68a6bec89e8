/* What the tests of the CPU backend share: random numbers, memory with traps, allocators, contexts and weights.
 * Whatever goes wrong in here fails the running cmocka test. */
#ifndef MOE4_TEST_FIXTURE_H
#define MOE4_TEST_FIXTURE_H

#include <stddef.h>
#include <stdint.h>

#include "moe4/moe4.h"

/* Whether this is a sanitizer's build, ten times slower: the longest tests do less. */
int is_sanitized(void);

/* Whether contexts are of the CPU backend: tests/test_cuda_host.c runs many of these tests on a GPU. */
int is_cpu_tested(void);

/* How many values of moe4_compute the tested backend has, from 0 on. */
int32_t n_computes(void);

/* ---- Random numbers, the same on every machine ---- */

struct random {
    uint64_t state;
};

uint64_t random_bits(struct random *random);
int64_t random_below(struct random *random, int64_t n); /* 0..n-1 */
double random_normal(struct random *random);

/* ---- Memory ---- */

/* Where the pages that cannot be touched lie.  With one of them an array ends, or begins, exactly at it. */
enum buffers_kind { BUFFERS_PLAIN, BUFFERS_GUARD_AFTER, BUFFERS_GUARD_BEFORE };

/* Memory that is released together. */
struct buffers {
    enum buffers_kind kind;
    struct buffer *last;
};

/* Filled with 0xFF: NaN in every floating format, NaN scales, expert -1.  64-byte aligned in a PLAIN buffers, at a page
 * in GUARD_BEFORE, in GUARD_AFTER as the size allows. */
void *buffers_allocate(struct buffers *buffers, size_t bytes);
void *buffers_copy(struct buffers *buffers, const void *data, size_t bytes);
void buffers_release(struct buffers *buffers);

/* An allocator that knows what is alive, and fails one request on demand. */
struct test_allocator {
    moe4_allocator allocator;
    int64_t n_requests;
    int64_t fails_at; /* the request that fails, counted from 1; 0 = none */
    int64_t n_live, live_bytes;
    int64_t peak_bytes; /* the most that live_bytes has been */
};

/* The struct must stay where it is as long as its allocator is in use. */
void test_allocator_init(struct test_allocator *memory);

/* ---- Contexts and layers ---- */

enum { MAX_LEVELS = 6 };

/* The levels this CPU offers, those for which it must be asked included, lowest first; their number. */
int32_t isa_levels(moe4_isa levels[MAX_LEVELS]);

moe4_context *context_open(moe4_isa isa, int32_t n_threads);
moe4_layer *layer_open(moe4_context *context, const moe4_layer_config *config, const moe4_expert *experts);

/* A config of these shapes with all experts local: SWIGLU_OAI as in gpt-oss, interleaved, RENORMALIZE. */
moe4_layer_config layer_config(int64_t hidden_size, int64_t intermediate_size, int32_t n_experts, int32_t top_k);

/* Local experts of a config that moe4_supports accepts. */
int32_t local_experts(const moe4_layer_config *config);

/* ---- Weights ---- */

enum weight_data {
    WEIGHTS_ORDINARY, /* every code, scales that differ from row to row and block to block, some blocks of zeros */
    /* Every partial sum is exact in f32: few nonzero weights, multiples of 1/4, gates 48 +- 30 by their bias. */
    WEIGHTS_EXACT
};

enum bias_use { BIAS_NONE, BIAS_GATE_UP, BIAS_DOWN, BIAS_BOTH };

struct weight_plan {
    enum weight_data data;
    enum bias_use biases;
    moe4_dtype bias_dtype; /* NONE = F32 */
    int64_t row_gap;       /* bytes of 0xFF between rows of codes and of scales */
    uint64_t seed;
};

/* Local expert l, always the same for the same plan.  Rows of a stored half beyond I hold NaN. */
moe4_expert weights_expert(struct buffers *buffers, const moe4_layer_config *config, const struct weight_plan *plan,
                           int32_t l);

/* All local experts. */
moe4_expert *weights_create(struct buffers *buffers, const moe4_layer_config *config, const struct weight_plan *plan);

/* A bf16 router of this config's shape. */
void router_create(struct buffers *buffers, moe4_layer_config *config, uint64_t seed);

/* Sets element k of a row of an MXFP4 matrix. */
void set_code(uint8_t *row, int64_t k, unsigned code);

/* Stores a value, rounded, into element `index` of an array of F32, F16 or BF16. */
void store_value(void *array, moe4_dtype dtype, int64_t index, double value);

size_t dtype_bytes(moe4_dtype dtype);

#endif
