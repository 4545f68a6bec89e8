/* What the CUDA backend makes of a layer: everything on the device, the weights in parts of their own. */
#ifndef MOE4_CUDA_PREPARED_H
#define MOE4_CUDA_PREPARED_H

#include "cuda/isa.h"
#include "layer.h"

/* One of the two matrices, of every expert. */
struct cuda_matrix {
    struct cuda_row_order order;
    int64_t rows, K; /* of the checkpoint's matrix */
    int32_t n_tiles, n_steps;
    size_t expert_bytes; /* n_tiles * n_steps steps */
    uint8_t *packed;     /* [L][n_tiles][n_steps] */
    float *bias;         /* [L][n_tiles][64] */
    float *unit;         /* [L] */
    uint8_t *tile_base;  /* [L][n_tiles] of the fp8 arrangement, else unused */
};

struct cuda_prepared {
    int32_t device_index, n_multiprocessors;
    const struct cuda_level *level; /* whose kernels run it */
    struct cuda_matrix gate_up, down;
    struct activation_params *params; /* [L] */
    int32_t *local_of;                /* [E] */
    uint8_t *is_exact;                /* [L] */
    int is_fp8;                       /* the layer's arrangement */
    int32_t n_exact;
    struct device_router router;
    float *router_weight, *router_bias;
    void *memory;
};

moe4_status cuda_prepared_plan(struct moe4_context *context, struct moe4_layer *layer);
moe4_status cuda_prepared_fill(struct moe4_context *context, struct moe4_layer *layer,
                               const moe4_expert_source *source);
moe4_status cuda_prepared_list_parts(struct moe4_context *context, const struct moe4_layer *layer,
                                     struct layer_part *parts, int32_t *n_parts);
void *cuda_prepared_allocate_part(const struct moe4_layer *layer, size_t bytes);
void cuda_prepared_release_part(const struct moe4_layer *layer, void *memory, size_t bytes);
moe4_status cuda_prepared_download_part(struct moe4_context *context, const struct moe4_layer *layer, void *to,
                                        const void *part, size_t bytes);
moe4_status cuda_prepared_upload_part(struct moe4_context *context, const struct moe4_layer *layer, void *part,
                                      const void *from, size_t bytes);
moe4_status cuda_prepared_check_parts(struct moe4_context *context, struct moe4_layer *layer);
void cuda_prepared_release(struct moe4_layer *layer);

#endif
