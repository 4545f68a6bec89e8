/* Model families and layouts: how a checkpoint's names, shapes and config become MoE layers.
 *
 * Two things vary apart from each other.  What a model computes - sizes, activation, routing - is a `struct model`; the
 * config says it (architecture.c, gguf_model.c).  How its experts are stored - names, types, one tensor or many - is a
 * `struct family`: one file with a few tables, listed in family.c.  All else - recognising names (spelling.c), finding
 * and checking tensors (plan.c), reading - is the same for every one of them. */
#ifndef MOE4_IO_FAMILY_H
#define MOE4_IO_FAMILY_H

#include "io/config.h"
#include "io/excluded.h"
#include "moe4/io.h"

/* ---- What a model computes --------------------------------------------------------------------------------------- */

enum need { NEED_NONE, NEED_OPTIONAL, NEED_REQUIRED };

enum { MAX_SYNONYMS = 5, MAX_LAYERS = 100000 };

/* Names of a router's tensors, after those of layer and block.  The two biases do different things: `bias` is added to
 * the logit, a selection bias only to what the choice is made by. */
struct router_names {
    const char *weight, *bias;
    const char *selection_bias[MAX_SYNONYMS]; /* any of these */
    const char *hash_table[MAX_SYNONYMS];
};

/* What the config says of all MoE layers. */
struct model {
    const char *name;        /* "Kimi-K3" */
    moe4_layer_config layer; /* sizes, activation, routing; no pointers, no local range, no order of gate and up */
    int64_t router_size;     /* columns of the router's weight: H, but for latent models */
    int64_t vocab_size;      /* 0 = not said */
    int32_t n_layers;
    int32_t n_extra_layers; /* for multi-token prediction, numbered from n_layers */
    int32_t n_hash_layers;  /* the first so many layers choose experts by token id */
    int32_t n_shared_experts;
    const struct router_names *router;
    enum need router_bias, selection_bias, expert_bias;
    struct excluded excluded; /* modules that the config says are not quantised */
    float *limits;            /* one a layer, extra ones too; 0 = none; NULL = layer.limit for all */
};
void model_release(struct model *model, const moe4_allocator *allocator);

/* ---- How its experts are stored ---------------------------------------------------------------------------------- */

enum { MATRIX_GATE_UP, MATRIX_DOWN, N_MATRICES };
enum { PART_CODES, PART_SCALES, PART_BIAS, N_PARTS };

/* Which rows of its matrix a tensor holds. */
enum half { HALF_BOTH, HALF_GATE, HALF_UP };

struct projection {
    const char *name;
    int32_t matrix;
    enum half half;
};

enum { MAX_PROJECTIONS = 3, MAX_SPELLED = 5 };

struct projections {
    struct projection items[MAX_PROJECTIONS]; /* gate before up */
    int32_t count;
    moe4_gate_up order; /* of the rows once the halves are put together */
};

/* What a tensor of a projection is, by the end of its name. */
enum piece {
    PIECE_CODES,
    PIECE_SCALES,
    PIECE_BIAS,
    PIECE_BLOCKS,      /* codes and scales in one, as GGUF has them */
    PIECE_IGNORED,     /* makes no difference to what we compute */
    PIECE_UNQUANTISED, /* weights in another format: the layer is not ours */
    PIECE_DENSE,       /* the same, where the config speaks of no quantisation: must be floats */
    PIECE_REFUSED      /* changes the weights in a way that is not supported */
};

struct suffix {
    const char *name;
    enum piece piece;
};

enum storage { STORED_STACKED, STORED_APART }; /* all experts in one tensor, or each in its own */

/* What the name of a layer's experts is made of: PREFIX STEM layer-number BLOCK EXPERTS; lists end with NULL. */
struct words {
    const char *prefixes[MAX_SPELLED + 2];
    const char *stem, *extra_stem; /* extra: for multi-token prediction layers; NULL = numbered on */
    const char *blocks[MAX_SPELLED];
    const char *experts[MAX_SPELLED];
};

struct family {
    const char *layout;
    const char *quant_method; /* quantization_config's word; NULL = told by recognise alone */

    const struct family *or_else; /* tried when no tensor is called as here; NULL = none */

    /* Whether a config is of this layout; NULL = quant_method alone tells. */
    int (*recognise)(const struct config *config);

    /* Checks what the config says of the quantisation and reads the rest into *model. */
    moe4_status (*read_config)(const struct config *config, struct model *model);

    /* A name is that of a layer's experts, then [expert-number "."] PROJECTION SUFFIX; lists end with NULL. */
    enum storage storage;
    const struct words *words;
    const struct projections *projections[MAX_SPELLED];
    const struct suffix *suffixes;
    int32_t n_suffixes;
};

extern const struct family family_gpt_oss, family_openai, family_compressed_tensors, family_deepseek_v4, family_quark,
    family_modelopt, family_modelopt_stacked, family_mlx, family_dense, family_gguf;
extern const struct words words_transformers; /* as the transformers library names them, and who follows it */
extern const struct projections projections_proj, projections_w;

/* The layout of a config; MOE4_EUNSUPPORTED for one that none reads. */
moe4_status family_find(const struct config *config, const struct family **family);

/* gpt_oss.c: whether a config is that of gpt-oss's original files, the only one without a model_type. */
int family_is_original(const struct config *config);

/* architecture.c: reads what config.json says of the model, by its model_type. */
moe4_status architecture_read(const struct config *config, struct model *model);
/* modelopt.c: the same, once modelopt's own words are checked. */
moe4_status modelopt_read_config(const struct config *config, struct model *model);

/* H or I: a multiple of 32, at most 2^20, so that no product of sizes can wrap. */
moe4_status family_read_dimension(const struct config *config, const char *key, int64_t *value);

/* ---- Names ------------------------------------------------------------------------------------------------------- */

/* The words that one checkpoint uses, of those its family knows. */
struct spelling {
    const char *prefix, *block, *experts;
    const char *extra_stem; /* NULL = extra layers are numbered on */
    const struct projections *projections;
};

/* What a tensor is to the experts of a layer. */
struct place {
    int32_t layer_number;
    int32_t expert;                      /* -1 when stacked */
    const struct projection *projection; /* NULL: a name that the layout does not have */
    const struct suffix *suffix;         /* NULL likewise */
};

struct tensor_name {
    char text[192];
};

/* Whether a name is that of an expert tensor, or at least begins like one. */
int spelling_parse(const struct family *family, const struct spelling *spelling, int32_t n_layers, const char *name,
                   struct place *place);

/* Whether a name is that of an expert tensor of a matrix by some spelling of the family, which is then *spelling. */
int spelling_find(const struct family *family, const char *name, int32_t matrix, struct spelling *spelling);

/* Whether it is one of checkpoints without a quantisation (dense.c). */
int family_is_dense(const struct family *family);

/* The first word of each list. */
struct spelling spelling_first(const struct family *family);

/* The model layer in whose MoE block a tensor lies, and what follows the block in its name; NULL if in none. */
const char *spelling_block(const struct family *family, const struct spelling *spelling, int32_t n_layers,
                           const char *name, int32_t *layer_number);

/* ---- Plans ------------------------------------------------------------------------------------------------------- */

enum { MAX_SLICES = MAX_PROJECTIONS * N_PARTS }; /* of one expert */

enum slice_form {
    SLICE_PLAIN,      /* n_bytes as they are */
    SLICE_GGUF_BLOCKS /* blocks of 17 bytes, taken apart into codes at part_at and scales at part_at/16 */
};

/* Bytes of a tensor that belong to one expert, and their place in a part of it: part_at is not 0 where one part comes
 * from several tensors (gate and up apart). */
struct slice {
    const moe4_tensor *tensor;
    int64_t first, n_bytes;
    int64_t part_at;
    int32_t matrix, part;
    enum slice_form form;
};

/* What is read whole. */
enum { SOURCE_ROUTER_WEIGHT, SOURCE_ROUTER_BIAS, SOURCE_SELECTION_BIAS, SOURCE_HASH_TABLE, N_SOURCES };

/* Where everything of one layer lies. */
struct plan {
    /* Given: */
    const moe4_tensors *tensors;
    const struct family *family;
    const struct spelling *spelling;
    const struct model *model;
    moe4_expert_use experts;
    int32_t layer_number;
    int32_t first_expert, n_local;
    /* Planned: */
    moe4_layer_config config;              /* the model's, and what is of this layer alone */
    const moe4_tensor *sources[N_SOURCES]; /* NULL = none */
    moe4_dtype source_dtypes[N_SOURCES];
    moe4_dtype bias_dtypes[N_MATRICES];      /* of the experts */
    int64_t part_bytes[N_MATRICES][N_PARTS]; /* of one expert; 0 = none */
    struct slice *slices;                    /* [n_local, MAX_SLICES], the first n_slices of each row used; released
                                                by the plan's owner, also after a failure; NULL = none */
    int32_t n_slices;
};

/* plan.c: finds and checks every tensor of the plan's layer and fills the rest of it. */
moe4_status plan_fill(moe4_context *context, struct plan *plan);
size_t plan_slices_bytes(const struct plan *plan);

/* ---- Finding tensors (tensor_find.c) ----------------------------------------------------------------------------- */

/* Must have exactly this type and shape. */
moe4_status find_exact(moe4_context *context, const moe4_tensors *tensors, const char *name, const char *dtype,
                       int32_t rank, const int64_t *shape, const moe4_tensor **tensor);

/* Must be BF16, F16 or F32, of this shape. */
moe4_status find_float(moe4_context *context, const moe4_tensors *tensors, const char *name, int32_t rank,
                       const int64_t *shape, const moe4_tensor **tensor, moe4_dtype *dtype);

/* Finds the codes or scales of matrices of reduction length K: any of the types and shapes that hold the same bytes
 * behind the n_leading dimensions, e.g. U8 [..., K/32, 16] or [..., K/2]. */
moe4_status find_packed(moe4_context *context, const moe4_tensors *tensors, const char *name, int32_t part,
                        int32_t n_leading, const int64_t *leading, int64_t K, const moe4_tensor **tensor);

/* Whether codes can have this type. */
int is_code_dtype(const char *dtype);

#endif
