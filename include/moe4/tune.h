/* moe4 tuning: which way of running a layer is fastest on this machine.
 *
 * A tactic is how, never what: it changes no bit of any result.  A context without tuning uses a default that is good
 * everywhere; tuning measures the alternatives, for one layer's shape and a series of batch sizes, and may be kept in a
 * small JSON file. */
#ifndef MOE4_TUNE_H
#define MOE4_TUNE_H

#include "moe4/moe4.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Zero in a field = the default. */
typedef struct moe4_tactic {
    /* The most routed rows that a kernel takes together.  CPU: 4..12.  CUDA: a multiple of 8 up to 160; 8 also means
     * the GEMM for few rows an expert, where the GPU and the layer's sizes have it. */
    int32_t tile_tokens;
    int32_t claim_share; /* CPU: a thread claims at most 1/this of its fair share of the weights at once, 1..64 */
} moe4_tactic;

/* The batch size whose tactic serves a batch of n_tokens: n_tokens rounded up to a power of two up to 256, to a
 * multiple of 256 up to 2048, of 512 up to 4096, then to a power of two, and never above max_tokens. */
MOE4_API int64_t moe4_tuning_bucket(int64_t n_tokens, int64_t max_tokens);

/* One measured choice. */
typedef struct moe4_tuning_entry {
    size_t size;
    int64_t hidden_size, intermediate_size;
    int32_t n_local_experts, top_k;
    moe4_compute compute;
    int64_t n_tokens; /* the bucket */
    moe4_tactic tactic;
    double ms;         /* median of the choice, a call */
    double default_ms; /* median of the default */
} moe4_tuning_entry;
#define MOE4_TUNING_ENTRY_INIT                                                                                         \
    {                                                                                                                  \
        sizeof(moe4_tuning_entry), 0, 0, 0, 0, MOE4_COMPUTE_BF16, 0, {0, 0}, 0.0, 0.0                                  \
    }

typedef struct moe4_tune_options {
    size_t size;
    int64_t max_tokens; /* the largest bucket; 0 = 8192 */
    moe4_compute compute;
    int32_t top_k;      /* 0 = the layer's routing's */
    double ms_a_choice; /* time to spend on measuring one tactic, besides one call; 0 = 200 */
    /* Called after each bucket; returning non-zero stops, keeping what is measured.  NULL = not wanted. */
    int (*progress)(void *user, const moe4_tuning_entry *entry, int32_t n_done, int32_t n_buckets);
    void *user;
} moe4_tune_options;
#define MOE4_TUNE_OPTIONS_INIT                                                                                         \
    {                                                                                                                  \
        sizeof(moe4_tune_options), 0, MOE4_COMPUTE_BF16, 0, 0.0, 0, 0                                                  \
    }

/* Measures every tactic on every bucket up to max_tokens, with random x and uniform random experts, and keeps the
 * fastest in the context, where later calls of layers of this shape find it.  Each tactic's output is compared with the
 * default's, bit for bit, before it is trusted.  Nothing else should run meanwhile.  options may be NULL.
 * On CUDA calls are timed by the device, up to eight of them captured in a graph, on a stream of their own.
 * Allocates what a batch of max_tokens needs.  MOE4_EUNSUPPORTED for a layer or mode that the context cannot run;
 * MOE4_EINVAL for a layer of another device. */
MOE4_API moe4_status moe4_tune(moe4_context *context, const moe4_layer *layer, const moe4_tune_options *options);

/* What the context knows, in no particular order; MOE4_EINVAL past the end. */
MOE4_API int32_t moe4_tuning_count(const moe4_context *context);
MOE4_API moe4_status moe4_tuning_get(const moe4_context *context, int32_t index, moe4_tuning_entry *entry);

/* Writes it to a JSON file, which appears at path only when complete. */
MOE4_API moe4_status moe4_tuning_save(moe4_context *context, const char *path);

/* Adds the entries of such a file to the context, replacing those for the same shape and bucket.
 * MOE4_EFORMAT, naming both values and adding nothing, if it was measured with another library version, device,
 * instruction set or number of threads, or is damaged. */
MOE4_API moe4_status moe4_tuning_load(moe4_context *context, const char *path);

#ifdef __cplusplus
}
#endif
#endif
