/* moe4: mixture-of-experts layers with MXFP4 weights.
 *
 * A layer routes every token to top_k of its experts, runs those experts (gate/up GEMM, bias, clamp, gated activation,
 * down GEMM, bias) and adds their outputs, weighted.  docs/semantics.md says exactly what is computed.
 *
 *   moe4_context   a device, its threads and kernels, and the last error message.  One per calling thread or stream.
 *   moe4_layer     prepared weights.  Immutable; shared by any number of contexts of its device and instruction set.
 *   moe4_forward_router, moe4_forward_experts   run a layer on a batch of tokens.
 *
 * Dimension letters, used in every comment: T tokens, E experts (global), L local experts, A = top_k experts a token,
 * R = T*A routed rows, H hidden size, I intermediate size.  Matrices are row-major; strides ("ld") count elements.
 *
 * Structs that the caller fills, or has filled, start with `size`; set them with their INIT macro.  Zero means "default"
 * in every field.  Fields are only ever appended, and callers compiled with older or newer headers are served.  The
 * library never prints, exits, reads the environment or keeps global state. */
#ifndef MOE4_MOE4_H
#define MOE4_MOE4_H

#include <stddef.h>
#include <stdint.h>

#define MOE4_VERSION_MAJOR 0
#define MOE4_VERSION_MINOR 1
#define MOE4_VERSION_PATCH 0

#if defined(__GNUC__)
#define MOE4_API __attribute__((visibility("default")))
#else
#define MOE4_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Status --------------------------------------------------------------------------------------------------- */

typedef enum moe4_status {
    MOE4_OK = 0,
    MOE4_EINVAL = 1,       /* an argument contradicts its documentation */
    MOE4_ENOMEM = 2,       /* an allocation failed */
    MOE4_EUNSUPPORTED = 3, /* meaningful, but not on this device or in this version */
    MOE4_EIO = 4,          /* the operating system refused a file operation */
    MOE4_EFORMAT = 5,      /* a file is not what it claims to be */
    MOE4_EDEVICE = 6       /* the device failed */
} moe4_status;

/* A short constant name, "ok", "invalid argument", ...; never NULL. */
MOE4_API const char *moe4_status_name(moe4_status status);

/* The library's version, "MAJOR.MINOR.PATCH". */
MOE4_API const char *moe4_version(void);

/* ---- Words ---------------------------------------------------------------------------------------------------- */

typedef enum moe4_dtype {
    MOE4_DTYPE_NONE = 0,
    MOE4_DTYPE_F32,
    MOE4_DTYPE_F16,
    MOE4_DTYPE_BF16,
    MOE4_DTYPE_F8_E4M3, /* "fn": bias 7, no infinities, largest 448 */
    MOE4_DTYPE_E8M0,    /* a power of two: 2^(byte-127), 0xFF = NaN */
    MOE4_DTYPE_I16,
    MOE4_DTYPE_I32,
    MOE4_DTYPE_I64,
    MOE4_DTYPE_I8
} moe4_dtype;

typedef enum moe4_device { MOE4_DEVICE_CPU = 0, MOE4_DEVICE_CUDA = 1 } moe4_device;

/* Instruction-set levels.  Of the CPU backend: C, and two families, x86 and Arm, in which a level includes C and those of
 * its family above it; of the CUDA backend: SM_80 and SM_90A, which includes it.  AUTO is the best the device has, but
 * for AVX512_BF16 on Intel's CPUs, where AVX512 is faster.  AMX asks Linux for its state, which all threads of the
 * process then have (signal frames grow by 8 KB); where that is refused AUTO does without. */
typedef enum moe4_isa {
    MOE4_ISA_AUTO = 0,
    MOE4_ISA_C,           /* portable C */
    MOE4_ISA_AVX2,        /* AVX2, FMA, F16C */
    MOE4_ISA_AVX512,      /* AVX-512 F, BW, DQ, VL */
    MOE4_ISA_AVX512_VNNI, /* + VNNI */
    MOE4_ISA_AVX512_BF16, /* + BF16 */
    MOE4_ISA_AMX,         /* + AMX BF16 */
    MOE4_ISA_NEON,        /* aarch64 */
    MOE4_ISA_NEON_BF16,   /* + BF16 */
    MOE4_ISA_SM_80,       /* mma.sync: any GPU from compute capability 8.0 on */
    MOE4_ISA_SM_90A       /* wgmma: Hopper */
} moe4_isa;

/* What the arithmetic is, never how it is scheduled: each mode has its own section in docs/semantics.md. */
typedef enum moe4_compute {
    MOE4_COMPUTE_BF16 = 0, /* bf16 activations, exact MXFP4 weights, fp32 sums */
    MOE4_COMPUTE_MXFP8,    /* e4m3 activations with an E8M0 scale per 32; the intermediate too */
    MOE4_COMPUTE_FP8,      /* e4m3 activations with one fp32 scale a token; the intermediate with one per 128 */
    MOE4_COMPUTE_INT8      /* int8 activations with an fp32 scale per 32; the intermediate too.  CPU */
} moe4_compute;

/* g: gate, u: up, after bias.  alpha, beta and limit are moe4_param; `limit` caps g from above and u on both sides. */
typedef enum moe4_activation {
    MOE4_ACTIVATION_NONE = 0,    /* not set: refused */
    MOE4_ACTIVATION_SILU,        /* g*sigmoid(g) * u; limit */
    MOE4_ACTIVATION_SWIGLU_OAI,  /* g*sigmoid(alpha*g) * (u+beta); alpha (1), beta (0), limit */
    MOE4_ACTIVATION_SITU,        /* alpha*tanh(g/alpha)*sigmoid(g) * beta*tanh(u/beta), without beta: * u; alpha, beta, limit */
    MOE4_ACTIVATION_GEGLU,       /* g*Phi(alpha*g) * (u+beta), Phi the normal CDF; alpha (1), beta (0), limit */
    MOE4_ACTIVATION_GEGLU_TANH,  /* the same with the tanh approximation of Phi */
    MOE4_ACTIVATION_SWIGLU_STEP, /* min(g*sigmoid(g), limit) * clamp(u, -limit, limit); limit */
    MOE4_ACTIVATION_RELU2,       /* max(u, 0)^2, no gate */
    MOE4_ACTIVATION_IDENTITY     /* u, no gate */
} moe4_activation;

/* Row order of the gate/up matrix.  A wrong order gives plausible garbage, so it has no default. */
typedef enum moe4_gate_up {
    MOE4_GATE_UP_NONE = 0,    /* no gate: I rows, RELU2 and IDENTITY only */
    MOE4_GATE_UP_INTERLEAVED, /* row 2i = gate i, row 2i+1 = up i (gpt-oss) */
    MOE4_GATE_UP_GATE_FIRST,  /* I gate rows, then I up rows (most checkpoints) */
    MOE4_GATE_UP_UP_FIRST     /* I up rows, then I gate rows (flashinfer) */
} moe4_gate_up;

/* s: logit, b: selection bias.  Selection and weights are computed in double precision; ties go to the lower index. */
typedef enum moe4_routing_method {
    MOE4_ROUTING_NONE = 0,          /* the caller brings ids and weights */
    MOE4_ROUTING_DEFAULT,           /* softmax over all, then top-k */
    MOE4_ROUTING_RENORMALIZE,       /* top-k of s, softmax over those (gpt-oss) */
    MOE4_ROUTING_DEEPSEEK_V3,       /* top-k of sigmoid(s)+b within the best groups, sigmoid(s) normalised * scale */
    MOE4_ROUTING_LLAMA4,            /* the top expert, sigmoid(s) */
    MOE4_ROUTING_RENORMALIZE_NAIVE, /* softmax, top-k, normalise: the same values as RENORMALIZE */
    MOE4_ROUTING_TOPK,              /* top-k of s, weight s */
    MOE4_ROUTING_SIGMOID_RENORM,    /* top-k of sigmoid(s), normalised */
    MOE4_ROUTING_MINIMAX2,          /* DEEPSEEK_V3 without groups */
    MOE4_ROUTING_SIGMOID,           /* top-k of sigmoid(s), weight sigmoid(s) */
    MOE4_ROUTING_TOPK_SIGMOID,      /* top-k of s, weight sigmoid(s) */
    MOE4_ROUTING_SQRT_SOFTPLUS,     /* top-k of sqrt(softplus(s))+b, sqrt(softplus(s)) normalised * scale (DeepSeek-V4) */
    MOE4_ROUTING_HASH               /* ids from a table by token id, weights as SQRT_SOFTPLUS (DeepSeek-V4) */
} moe4_routing_method;

/* Whether selected weights are divided by their sum, for SIGMOID_RENORM.  Every other method fixes this itself. */
typedef enum moe4_renormalize { MOE4_RENORMALIZE_DEFAULT = 0, MOE4_RENORMALIZE_NO } moe4_renormalize;

typedef enum moe4_write { MOE4_WRITE_OVERWRITE = 0, MOE4_WRITE_ADD } moe4_write;

typedef enum moe4_topk_format {
    MOE4_TOPK_UNPACKED = 0, /* ids int32 and weights bf16 or f32, apart */
    MOE4_TOPK_PACKED        /* int32: signed 16-bit id in the high half, bf16 weight bits in the low half */
} moe4_topk_format;

/* When the router's weight is applied. */
typedef enum moe4_weight_use {
    MOE4_WEIGHT_ON_OUTPUT = 0,
    MOE4_WEIGHT_ON_INPUT /* x' = bf16(x*weight), combined with weight 1; top_k == 1, x not quantised */
} moe4_weight_use;

/* ---- Context -------------------------------------------------------------------------------------------------- */

typedef struct moe4_context moe4_context;

/* Where the library's memory comes from.  allocate returns NULL on failure; both must be thread-safe if the allocator
 * is shared by contexts of several threads. */
typedef struct moe4_allocator {
    void *(*allocate)(void *user, size_t bytes, size_t alignment);
    void (*release)(void *user, void *memory, size_t bytes);
    void *user;
} moe4_allocator;

/* The caller's threads.  run calls task(arg, w) exactly once for each w in 0..width-1, on any threads and in any order,
 * and returns when all have returned.  A task takes less than 128 KiB of stack. */
typedef struct moe4_thread_pool {
    int32_t width;
    void (*run)(void *user, void (*task)(void *arg, int32_t worker), void *arg);
    void *user;
} moe4_thread_pool;

typedef struct moe4_context_config {
    size_t size;
    moe4_device device;
    int32_t device_index;
    moe4_isa isa;                    /* the highest level to use */
    int32_t n_threads;               /* CPU: 0 = as many as affinity and cgroup quota allow, which also do the work
                                        where more are asked for; 1 = only the caller's */
    const moe4_thread_pool *pool;    /* CPU: borrowed until destroy; n_threads must then be 0 */
    const moe4_allocator *allocator; /* copied; NULL = aligned malloc */
} moe4_context_config;
#define MOE4_CONTEXT_CONFIG_INIT {sizeof(moe4_context_config), MOE4_DEVICE_CPU, 0, MOE4_ISA_AUTO, 0, 0, 0}

/* Creates a context.  config may be NULL for all defaults.  Its threads leave signals to the program's own.
 * MOE4_ENOMEM also where a thread cannot be had.
 * On failure *context is still set, unless even its own memory could not be had (then it is NULL): read the message,
 * then destroy it; nothing else may be done with it. */
MOE4_API moe4_status moe4_context_create(const moe4_context_config *config, moe4_context **context);

/* Stops the context's threads and frees it.  NULL and half-built contexts are fine.  Layers outlive their context. */
MOE4_API void moe4_context_destroy(moe4_context *context);

/* Why the last failed call on this context failed, naming the argument and both values; "" if none has failed.
 * Valid until the next call on the context. */
MOE4_API const char *moe4_context_message(const moe4_context *context);

typedef struct moe4_context_info {
    size_t size;
    moe4_device device;
    moe4_isa isa;            /* the level in use */
    const char *isa_name;    /* "avx512_bf16", ...: the command's --isa words */
    int32_t n_threads;       /* the caller's thread included */
    const char *device_name; /* the CPU's or GPU's own name; valid as long as the context */
} moe4_context_info;
#define MOE4_CONTEXT_INFO_INIT {sizeof(moe4_context_info), MOE4_DEVICE_CPU, MOE4_ISA_AUTO, 0, 0, 0}
MOE4_API moe4_status moe4_context_describe(moe4_context *context, moe4_context_info *info);

/* What a device found wrong with a call's data after the call had returned: MOE4_EINVAL, with the offender in
 * moe4_context_message, from the moment a kernel of this context has met it until moe4_context_clear; else MOE4_OK.
 * Looks at host memory only and waits for nothing: ask once the calls in question are over.
 *   a token id outside the HASH table     its ids become -1, its weights and its row of y NaN
 *   *n_tokens_device outside 0..n_tokens  taken as the nearer end
 *   a row_map entry that names no row     (moe4_combine) its token's row of y becomes NaN
 * A CPU context refuses all of these in the call itself and always answers MOE4_OK.  A captured graph must not outlive
 * the context it was captured with. */
MOE4_API moe4_status moe4_context_check(moe4_context *context);

/* Forgets what moe4_context_check says; no call of this context may be under way. */
MOE4_API moe4_status moe4_context_clear(moe4_context *context);

/* ---- Layer ---------------------------------------------------------------------------------------------------- */

/* A parameter that may be absent, one number, or one number a local expert.  "Absent" is a word, not a value. */
typedef enum moe4_presence { MOE4_ABSENT = 0, MOE4_SAME, MOE4_PER_EXPERT } moe4_presence;
typedef struct moe4_param {
    moe4_presence presence;
    float value;         /* MOE4_SAME */
    const float *values; /* MOE4_PER_EXPERT: [L], copied by moe4_layer_create */
} moe4_param;

/* How tokens choose experts. */
typedef struct moe4_routing {
    size_t size;
    moe4_routing_method method;
    int32_t top_k;          /* 1..min(E, 128) */
    int32_t n_group;        /* DEEPSEEK_V3: 0 or 1 = no groups; else divides E, groups of at least 2 */
    int32_t topk_group;     /* DEEPSEEK_V3 with groups: 1..n_group, top_k <= topk_group*E/n_group */
    float scaling_factor;   /* 0 = 1.  Multiplies the weights once, before they are rounded to bf16 */
    moe4_renormalize renormalize;
    const void *correction_bias; /* [E], the SELECTION bias (never added to a weight); NULL = 0 */
    moe4_dtype correction_bias_dtype; /* F32, BF16 or F16; kept as f32 */
    const void *hash_table;      /* HASH: [vocab_size, top_k] expert ids */
    moe4_dtype hash_table_dtype; /* I32 or I64 */
    int64_t vocab_size;
} moe4_routing;
#define MOE4_ROUTING_INIT {sizeof(moe4_routing), MOE4_ROUTING_NONE, 0, 0, 0, 0.0f, MOE4_RENORMALIZE_DEFAULT, \
                           0, MOE4_DTYPE_NONE, 0, MOE4_DTYPE_NONE, 0}

/* The router's own GEMM: logits = x . weight^T + bias, used when a call brings neither logits nor ids. */
typedef struct moe4_router {
    const void *weight; /* [E, hidden_size]; NULL = the layer has no router */
    moe4_dtype weight_dtype; /* BF16, F16 or F32 */
    const void *bias;   /* [E], added to the LOGIT; NULL = 0 */
    moe4_dtype bias_dtype;
    int64_t hidden_size; /* 0 = the layer's; differs for latent models, whose router sees the full width */
} moe4_router;

/* What a layer is.  Pointers are only read during the call that takes the struct; everything is copied. */
typedef struct moe4_layer_config {
    size_t size;
    int64_t hidden_size;       /* H, a multiple of 32 */
    int64_t intermediate_size; /* I, a multiple of 32 */
    int64_t output_size;       /* columns of y; 0 = H; at most H */
    int64_t stored_intermediate_size; /* rows of one half of a padded gate/up matrix; 0 = I.  Which row of a GATE_FIRST or
                                         UP_FIRST matrix starts the second half */
    int32_t n_experts;         /* E, 1..32767: ids are global, 0..E-1 */
    int32_t first_expert;      /* global id of local expert 0 */
    int32_t n_local_experts;   /* L; 0 = E - first_expert, or with a map as many as it names */
    const int32_t *expert_map; /* [E] global id -> local expert or -1; NULL = the range above */
    moe4_gate_up gate_up;
    moe4_activation activation;
    moe4_param alpha, beta, limit;
    moe4_routing routing;
    moe4_router router;
    moe4_compute compute; /* CUDA: FP8 arranges the weights for calls in FP8 compute, and only those; else all but those.
                             CPU: any call will do */
} moe4_layer_config;
#define MOE4_PARAM_INIT {MOE4_ABSENT, 0.0f, 0}
#define MOE4_LAYER_CONFIG_INIT {sizeof(moe4_layer_config), 0, 0, 0, 0, 0, 0, 0, 0, MOE4_GATE_UP_NONE, \
                                MOE4_ACTIVATION_NONE, MOE4_PARAM_INIT, MOE4_PARAM_INIT, MOE4_PARAM_INIT, \
                                MOE4_ROUTING_INIT, {0, MOE4_DTYPE_NONE, 0, MOE4_DTYPE_NONE, 0}, \
                                MOE4_COMPUTE_BF16}

/* One MXFP4 matrix [rows, K] of one expert, K the reduction length.
 * Two codes a byte, element 2j in the low nibble of byte j; one E8M0 byte per 32 consecutive elements of a row. */
typedef struct moe4_matrix {
    const uint8_t *codes;       /* K/2 bytes a row */
    const uint8_t *scales;      /* K/32 bytes a row */
    int64_t codes_row_bytes;    /* from one row to the next; 0 = K/2 */
    int64_t scales_row_bytes;   /* 0 = K/32 */
    const void *bias;           /* [rows], NULL = none */
    moe4_dtype bias_dtype;      /* F32, BF16 or F16 */
} moe4_matrix;

typedef struct moe4_expert {
    moe4_matrix gate_up; /* [2I, H] in the config's order, or [I, H] without a gate; its bias in the same row order */
    moe4_matrix down;    /* [H, I] */
} moe4_expert;

/* The arrays of an expert. */
typedef enum moe4_part {
    MOE4_PART_GATE_UP_CODES,
    MOE4_PART_GATE_UP_SCALES,
    MOE4_PART_GATE_UP_BIAS,
    MOE4_PART_DOWN_CODES,
    MOE4_PART_DOWN_SCALES,
    MOE4_PART_DOWN_BIAS
} moe4_part;

/* Where the weights of a layer come from, one expert at a time, in ascending order, each once.
 * read fills *expert with pointers that stay valid until its next call; a status other than MOE4_OK ends the creation
 * with that status.
 *
 * describe and copy, both NULL or neither, are a second way, for weights that are in no memory yet and a backend that
 * wants them in some of its own (CUDA's copies): describe is read without the bytes, pointers that are not NULL only
 * say what there is, and rows are dense; copy then writes bytes first..first+n_bytes-1 of a part to `to`, in several
 * threads at once, until the next describe. */
typedef struct moe4_expert_source {
    moe4_status (*read)(void *user, int32_t local_expert, moe4_expert *expert);
    void *user;
    moe4_status (*describe)(void *user, int32_t local_expert, moe4_expert *expert);
    moe4_status (*copy)(void *user, int32_t local_expert, moe4_part part, int64_t first, int64_t n_bytes, void *to);
} moe4_expert_source;

typedef struct moe4_layer moe4_layer;

/* Prepares a layer: reads every local expert from source and repacks it for the context's kernels.
 * Needs 4.25 bits a weight + 1 % of lasting memory, and nothing but the source's own buffers besides.  On CUDA it
 * also takes one expert's room on the device while it runs, and 40 MiB of pinned memory and up to 16 threads, which the
 * context keeps; the source's pointers may be memory of any kind: what is pinned or on the device is copied straight.
 *
 * Returns MOE4_EINVAL or MOE4_EUNSUPPORTED, before anything is read, for a config that moe4_supports refuses; the
 * source's own status; MOE4_ENOMEM.  On error *layer is NULL.  The caller owns the layer; destroy it with any or no
 * context alive. */
MOE4_API moe4_status moe4_layer_create_from(moe4_context *context, const moe4_layer_config *config,
                                            const moe4_expert_source *source, moe4_layer **layer);

/* The same from weights in memory: experts [L], which may be freed after the call. */
MOE4_API moe4_status moe4_layer_create(moe4_context *context, const moe4_layer_config *config,
                                       const moe4_expert *experts, moe4_layer **layer);

MOE4_API void moe4_layer_destroy(moe4_layer *layer);

typedef struct moe4_layer_info {
    size_t size;
    int64_t hidden_size, intermediate_size, output_size;
    int32_t n_experts, first_expert, n_local_experts, top_k;
    const char *kernel;      /* name of the GEMM kernels, e.g. "gemm_avx512_bf16"; lives as long as the library */
    const char *order;       /* name of the accumulation order; equal names on one machine mean equal bits */
    int64_t weight_bytes;    /* codes + scales of all local experts as the checkpoint has them, 4.25 bits a weight */
    int64_t packed_bytes;    /* the same as kept in memory */
    int32_t n_exact_experts; /* experts whose scales need the exact kernel (see docs/semantics.md) */
    const char *kernel_int8; /* the same two of INT8 compute; NULL where the device has no such mode */
    const char *order_int8;
} moe4_layer_info;
#define MOE4_LAYER_INFO_INIT {sizeof(moe4_layer_info), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}
MOE4_API moe4_status moe4_layer_describe(const moe4_layer *layer, moe4_layer_info *info);

/* ---- Forward -------------------------------------------------------------------------------------------------- */

/* The tokens of one call. */
typedef struct moe4_batch {
    size_t size;
    int64_t n_tokens;               /* T, or its upper bound when n_tokens_device is given */
    const int32_t *n_tokens_device; /* on the layer's device; NULL = n_tokens.  Rows beyond it are untouched */
    moe4_compute compute;
    const void *x;          /* [T, H] on the layer's device */
    moe4_dtype x_dtype;     /* BF16, F16 or F32 (rounded to bf16 first); F8_E4M3 with x_scale */
    int64_t ldx;            /* 0 = H */
    const void *x_scale;    /* MXFP8: E8M0 [T, H/32]; FP8: f32 [T], one that is not finite counts as NaN */
    int64_t ldx_scale;      /* MXFP8: 0 = H/32; FP8: 0 = 1 */
    const void *router_x;   /* [T, router hidden size], what the layer's own router sees; NULL = x */
    moe4_dtype router_x_dtype;
    int64_t ldrouter_x;     /* 0 = router hidden size */
    const int32_t *token_ids; /* [T], HASH routing */
    void *workspace;        /* at least moe4_workspace_bytes, 256-byte aligned, contents irrelevant */
    size_t workspace_bytes;
    void *stream;           /* CUDA: a cudaStream_t.  CPU: NULL */
} moe4_batch;
#define MOE4_BATCH_INIT {sizeof(moe4_batch), 0, 0, MOE4_COMPUTE_BF16, 0, MOE4_DTYPE_BF16, 0, 0, 0, \
                         0, MOE4_DTYPE_BF16, 0, 0, 0, 0, 0}

/* The caller's own routing: slot a of token t is expert ids[t,a] with weights[t,a].  Ids are global; any id that is not
 * local (-1, another rank's, >= E) contributes exactly zero and is never read through.  Duplicates in a row all count. */
typedef struct moe4_topk {
    size_t size;
    moe4_topk_format format;
    int32_t top_k;            /* A, 1..min(E, 128) */
    const int32_t *ids;       /* [T, A]; PACKED: ids and weights together */
    int64_t ld_ids;           /* 0 = A */
    const void *weights;      /* [T, A]; PACKED: NULL */
    moe4_dtype weights_dtype; /* F32 or BF16, used at that precision */
    int64_t ld_weights;       /* 0 = A */
    moe4_weight_use weight_use;
} moe4_topk;
#define MOE4_TOPK_INIT {sizeof(moe4_topk), MOE4_TOPK_UNPACKED, 0, 0, 0, 0, MOE4_DTYPE_F32, 0, MOE4_WEIGHT_ON_OUTPUT}

/* The router's output before softmax or sigmoid. */
typedef struct moe4_logits {
    size_t size;
    const void *logits; /* [T, E] */
    moe4_dtype dtype;   /* F32, BF16 or F16 */
    int64_t ld;         /* 0 = E */
} moe4_logits;
#define MOE4_LOGITS_INIT {sizeof(moe4_logits), 0, MOE4_DTYPE_F32, 0}

/* Where results go.  y is wanted unless gemm2_rows is; everything below it is optional (NULL = not wanted), so that
 * every stage can be seen from outside.  Routed rows are compact: local experts ascending, t*A+a ascending within one.
 * No output may overlap an input or another output, but for y with MOE4_WRITE_ADD reading itself. */
typedef struct moe4_result {
    size_t size;
    void *y;               /* [T, output_size] */
    moe4_dtype y_dtype;    /* BF16, F16 or F32 */
    int64_t ldy;           /* 0 = output_size */
    moe4_write write;      /* ADD: y = round(y + sum) */
    float *logits;         /* [T, E], as used (router calls) */
    int32_t *ids;          /* [T, A], slots in descending order of selection */
    float *weights;        /* [T, A]; bf16 values widened, but for unpacked f32 input; 1 when used on the input */
    int16_t *replay;       /* [replay_rows, A] global ids; rows >= T untouched; router calls */
    int64_t replay_rows;   /* at least T */
    void *intermediate;    /* [R, I] after the activation: BF16, or e4m3 or int8 codes in quantised modes */
    void *intermediate_scale; /* MXFP8: E8M0 [R, I/32]; FP8: f32 [R, ceil(I/128)]; INT8: f32 [R, I/32] */
    uint16_t *gemm2_rows;  /* [R, output_size] bf16, unweighted, bias included */
    int32_t *row_map;      /* [T, A] routed row of slot (t, a), -1 = not local */
    int64_t *n_rows;       /* routed rows that are local, at most R */
} moe4_result;
#define MOE4_RESULT_INIT {sizeof(moe4_result), 0, MOE4_DTYPE_BF16, 0, MOE4_WRITE_OVERWRITE, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}

/* Bytes of workspace that any call with up to n_tokens tokens and top_k slots needs.  top_k 0 = the layer's routing's.
 * Grows with n_tokens, never with what a call asks for. */
MOE4_API moe4_status moe4_workspace_bytes(moe4_context *context, const moe4_layer *layer, moe4_compute compute,
                                          int64_t n_tokens, int32_t top_k, size_t *bytes);

/* Runs router and experts on a batch.  logits NULL: the layer's own router makes them from x.
 *
 * Returns MOE4_OK; MOE4_EINVAL or MOE4_EUNSUPPORTED with every output untouched.  T == 0 is MOE4_OK, needs no pointer
 * and touches nothing.  Neither allocates, locks nor blocks on anything but its own threads.
 * One call at a time a context; any number of contexts may share the layer. */
MOE4_API moe4_status moe4_forward_router(moe4_context *context, const moe4_layer *layer, const moe4_batch *batch,
                                         const moe4_logits *logits, const moe4_result *result);

/* Runs the experts on a batch whose routing the caller brings.  Otherwise as moe4_forward_router. */
MOE4_API moe4_status moe4_forward_experts(moe4_context *context, const moe4_layer *layer, const moe4_batch *batch,
                                          const moe4_topk *topk, const moe4_result *result);

/* Routes without a layer: [T, E] logits to ids and weights [T, A], on the CPU.
 *   ids       int32, slots in descending order of selection
 *   weights   f32 holding bf16 values
 *   token_ids [T], HASH only
 * Allocates the routing's tables, and scratch memory of about 12 bytes an expert and thread, from the context. */
MOE4_API moe4_status moe4_route(moe4_context *context, const moe4_routing *routing, int32_t n_experts, int64_t n_tokens,
                                const moe4_logits *logits, const int32_t *token_ids, int32_t *ids, float *weights);

/* ---- Deferred combine ----------------------------------------------------------------------------------------- */

/* What a call with gemm2_rows, row_map and weights has left undone. */
typedef struct moe4_deferred {
    size_t size;
    int64_t n_tokens;           /* T, or its upper bound when n_tokens_device is given */
    int32_t top_k;              /* A */
    int64_t output_size;        /* columns of a row and of y */
    const uint16_t *gemm2_rows; /* [n_rows, output_size] bf16 */
    int64_t n_rows;             /* no entry of row_map reaches it; T*A will do */
    const int32_t *row_map;     /* [T, A] into gemm2_rows, -1 = not local */
    const float *weights;       /* [T, A] */
    float scale;                /* multiplies the sum before the addend; 0 = 1, and then not multiplied at all */
    const void *addend;         /* [T, output_size], a shared expert's output, say; NULL = none */
    moe4_dtype addend_dtype;    /* F32, BF16 or F16 */
    int64_t ld_addend;          /* 0 = output_size */
    const int32_t *n_tokens_device; /* as in moe4_batch */
    void *stream;               /* as in moe4_batch */
} moe4_deferred;
#define MOE4_DEFERRED_INIT {sizeof(moe4_deferred), 0, 0, 0, 0, 0, 0, 0, 0.0f, 0, MOE4_DTYPE_BF16, 0, 0, 0}

/* Finishes a deferred call: y[t] = round(scale * sum + addend[t]), sum = fp32 fma in slot order from +0 over the slots
 * whose row_map is not -1.  Without scale and addend the same bits as the call would have given.
 * Everything is on the context's device; on CUDA the work is queued on return, without allocation or synchronisation.
 * Uses y, y_dtype, ldy and write of result; nothing else of it may be set.
 * Returns MOE4_EINVAL, with y untouched, for a row_map entry outside -1 .. n_rows-1; on CUDA moe4_context_check does. */
MOE4_API moe4_status moe4_combine(moe4_context *context, const moe4_deferred *deferred, const moe4_result *result);

/* ---- Support -------------------------------------------------------------------------------------------------- */

/* How the caller spreads a model over devices; all sizes 0 = 1.  Only expert ranges and whole-layer calls are ours to
 * run; what the sizes imply (partial sums to reduce) is the caller's. */
typedef struct moe4_parallel {
    int32_t tensor_size, expert_size, data_size;
    int32_t context_size, sequence_size; /* prefill context parallel, sequence parallel */
} moe4_parallel;

/* What a caller means to do, asked before anything is loaded. */
typedef struct moe4_query {
    size_t size;
    const moe4_layer_config *config; /* data pointers are only NULL or not as they will be; expert_map is read */
    moe4_compute compute;
    moe4_dtype x_dtype;              /* NONE = BF16 */
    moe4_dtype y_dtype;              /* NONE = BF16 */
    moe4_write write;
    moe4_dtype logits_dtype;         /* NONE = no logits given */
    moe4_dtype weights_dtype;        /* NONE = no ids and weights given */
    moe4_topk_format topk_format;
    moe4_weight_use weight_use;
    int32_t top_k;                   /* of given ids; 0 = the routing's */
    int64_t n_tokens;                /* the largest batch; 0 = any */
    moe4_parallel parallel;
} moe4_query;
#define MOE4_QUERY_INIT {sizeof(moe4_query), 0, MOE4_COMPUTE_BF16, MOE4_DTYPE_NONE, MOE4_DTYPE_NONE, \
                         MOE4_WRITE_OVERWRITE, MOE4_DTYPE_NONE, MOE4_DTYPE_NONE, MOE4_TOPK_UNPACKED, \
                         MOE4_WEIGHT_ON_OUTPUT, 0, 0, {0, 0, 0, 0, 0}}

/* Who wants the combine deferred, and within what limits (0 or less = no cap). */
typedef struct moe4_deferral {
    size_t size;
    int32_t by_deployment;        /* non-zero: requested for every call */
    int64_t deployment_max_tokens;
    int32_t by_scope;             /* non-zero: requested for this call */
    int64_t scope_capacity;       /* tokens that the consumer of this call can take; must then be positive */
    int32_t scope_allows_experts; /* non-zero: replicated expert parallel (data_size 1) will do */
    int64_t producer_max_tokens;
    moe4_parallel parallel;
    int64_t hidden_size, output_size; /* output_size 0 = hidden_size */
} moe4_deferral;
#define MOE4_DEFERRAL_INIT {sizeof(moe4_deferral), 0, 0, 0, 0, 0, 0, {0, 0, 0, 0, 0}, 0, 0}

/* Whether a call of n_tokens should leave the combine to its consumer: *defer = 1 if it is requested, 1 <= n_tokens <=
 * every cap, the layer is split by tensor parallel alone, and its rows are not cut.  MOE4_EINVAL for a scope without a
 * positive capacity. */
MOE4_API moe4_status moe4_should_defer(moe4_context *context, const moe4_deferral *deferral, int64_t n_tokens,
                                       int32_t *defer);

/* MOE4_OK if creation and forward would accept it; else their status, with the first reason in
 * moe4_context_message.  Activation, expert range, routing, shapes, formats, device, parallel, in this order. */
MOE4_API moe4_status moe4_supports(moe4_context *context, const moe4_query *query);

#ifdef __cplusplus
}
#endif
#endif
