/* Model families: how a checkpoint's names, shapes and config become MoE layers.
 *
 * A family is one file with one table, listed in family.c.  It reads config.json once into a `struct model` and, for a
 * layer that is asked for, fills a `struct plan`: which bytes of which tensors make up each expert.  All else -
 * opening, buffers, reading, progress - is the same for every family. */
#ifndef MOE4_IO_FAMILY_H
#define MOE4_IO_FAMILY_H

#include "io/config.h"
#include "moe4/io.h"

/* What config.json says of all MoE layers. */
struct model {
    moe4_layer_config layer; /* sizes, activation, routing; no pointers, no local range */
    int32_t n_layers;
};

enum { MATRIX_GATE_UP, MATRIX_DOWN, N_MATRICES };
enum { PART_CODES, PART_SCALES, PART_BIAS, N_PARTS };

/* Bytes of a tensor that belong to one expert, and their place in a part of it: part_at is not 0 where one part comes
 * from several tensors (gate and up apart). */
struct slice {
    const moe4_tensor *tensor;
    int64_t first, n_bytes;
    int64_t part_at;
    int32_t matrix, part;
};

/* Where everything of one layer lies. */
struct plan {
    /* Given: */
    const moe4_tensors *tensors;
    const struct family *family;
    const struct model *model;
    int32_t layer_number;
    int32_t first_expert, n_local;
    /* Planned: */
    const moe4_tensor *router_weight, *router_bias; /* read whole; NULL = none */
    moe4_dtype router_weight_dtype, router_bias_dtype;
    moe4_dtype bias_dtype;                   /* of the experts */
    int64_t part_bytes[N_MATRICES][N_PARTS]; /* of one expert; 0 = none */
    struct slice *slices;                    /* [n_local, family->n_slices] */
};

struct family {
    const char *model_type; /* config.json's word */
    const char *name, *layout;
    int32_t n_slices; /* of one expert */

    /* Reads and checks config.json. */
    moe4_status (*read_config)(const struct config *config, struct model *model);

    /* The model layer that a tensor's name makes it an expert tensor of, -1 for any other tensor.  Refuses expert
     * tensors that the layout does not have. */
    moe4_status (*classify)(moe4_context *context, const moe4_tensor *tensor, int32_t *layer_number);

    /* Finds and checks every tensor of the plan's layer and fills the rest of it. */
    moe4_status (*plan_layer)(moe4_context *context, struct plan *plan);
};

extern const struct family family_gpt_oss;

/* The family of a config; MOE4_EUNSUPPORTED for a model_type that none has. */
moe4_status family_find(const struct config *config, const struct family **family);

/* ---- For families ------------------------------------------------------------------------------------------------ */

/* H or I: a multiple of 32, at most 2^20, so that no product of sizes can wrap. */
moe4_status family_read_dimension(const struct config *config, const char *key, int64_t *value);

/* Finds a tensor that must have exactly this type and shape. */
moe4_status family_find_tensor(moe4_context *context, const moe4_tensors *tensors, const char *name, const char *dtype,
                               int32_t rank, const int64_t *shape, const moe4_tensor **tensor);

/* Finds the codes or scales of matrices of reduction length K: any of the types and shapes that hold the same bytes
 * behind the n_leading dimensions, e.g. U8 [..., K/32, 16] or [..., K/2]. */
moe4_status family_find_packed(moe4_context *context, const moe4_tensors *tensors, const char *name, int32_t part,
                               int32_t n_leading, const int64_t *leading, int64_t K, const moe4_tensor **tensor);

/* Slice `index` of every expert from a tensor that stacks all E of them along its first dimension. */
void family_plan_stacked(struct plan *plan, int32_t index, int32_t matrix, int32_t part, const moe4_tensor *tensor);

#endif
