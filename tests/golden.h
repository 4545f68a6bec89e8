/* The golden layers of tests/data/golden, read without the library: what a test compares with must not go through the
 * code that it tests.  Anything amiss fails the running cmocka test. */
#ifndef MOE4_TEST_GOLDEN_H
#define MOE4_TEST_GOLDEN_H

#include "moe4/moe4.h"

/* ---- Any safetensors file of ours ---- */

typedef struct golden_file golden_file;

typedef struct golden_tensor {
    const char *dtype; /* "BF16", "U8", ... */
    int32_t rank;
    int64_t shape[8];
    int64_t n_bytes;
    const void *data; /* 64-byte aligned copy; lives as long as the file */
} golden_tensor;

/* path is relative to tests/data. */
golden_file *golden_file_open(const char *path);
void golden_file_close(golden_file *file);

const golden_tensor *golden_find(const golden_file *file, const char *name);

/* NULL if there is none of that name. */
const golden_tensor *golden_look(const golden_file *file, const char *name);

/* A string of the file's metadata; NULL if it has no such key. */
const char *golden_metadata(const golden_file *file, const char *key);

/* The data of tensor `name`, which must be of this dtype and number of elements. */
const void *golden_data(const golden_file *file, const char *name, const char *dtype, int64_t n_elements);

/* ---- The gpt-oss layers ---- */

typedef struct golden_layer {
    moe4_layer_config config; /* its router too; no pointer outlives the layer */
    moe4_expert *experts;     /* [E], in the file's interleaved order */
    int64_t T;

    /* Computed in f32 without our roundings. */
    const uint16_t *hidden_states; /* [T, H] bf16 */
    const float *router_logits;    /* [T, E] */
    const int32_t *topk_ids;       /* [T, A] */
    const float *topk_weights;     /* [T, A] */
    const float *output;           /* [T, H] */

    /* With them; rows expert-major, ascending t*A+a. */
    const uint16_t *intermediate;   /* [T*A, I] bf16 */
    const uint16_t *gemm2_rows;     /* [T*A, H] bf16 */
    const int32_t *row_map;         /* [T, A] */
    const uint16_t *expert_weights; /* [T, A] bf16 */
    const uint16_t *rounded_output; /* [T, H] bf16 */

    golden_file *files[3];
} golden_layer;

/* name: "gptoss_small" (T 17, H 64, I 96, E 8, A 4), "gptoss_clamped" (12, 96, 64, 4, 2), "gptoss_one_token" (1, 64,
 * 64, 32, 4). */
golden_layer *golden_layer_open(const char *name);
void golden_layer_close(golden_layer *layer);

extern const char *const golden_layer_names[3];

/* ---- The DeepSeek-V3 router ---- */

typedef struct golden_router {
    moe4_routing routing;
    int32_t E;
    int64_t T;
    const float *logits;  /* [T, E] */
    const int32_t *ids;   /* [T, top_k]; the order of equal scores is not ours */
    const float *weights; /* [T, top_k] f32, not rounded to bf16 */
    golden_file *file;
} golden_router;

golden_router *golden_router_open(void);
void golden_router_close(golden_router *router);

#endif
