/* What the CPU backend makes of a layer's weights. */
#ifndef MOE4_CPU_PREPARED_H
#define MOE4_CPU_PREPARED_H

#include "backend.h"
#include "cpu/activation.h"
#include "cpu/kernels/kernel.h"
#include "cpu/kernels/rows.h"
#include "cpu/layout.h"
#include "layer.h"

/* One of the two matrices, of every expert. */
struct packed_matrix {
    struct row_order order;
    int64_t K, n_panels; /* of one expert */
    int64_t panel_bytes;
    uint8_t *panels; /* [L][n_panels] panels */
    float *bias;     /* [L][n_panels][PANEL_ROWS] */
};

struct prepared {
    moe4_isa isa;
    const struct kernel *kernel; /* of every expert but those that need the exact one */
    const struct kernel *kernel_int8;
    const struct row_kernels *rows;
    pack_rows_fn *pack;
    activation_fn *activate;
    void (*round)(const float *v, int64_t n, uint16_t *rounded);
    struct packed_matrix gate_up, down;
    uint8_t *is_exact; /* [L] 1 = has scales that only the exact kernel holds */
    int32_t n_exact;
};

static inline const uint8_t *packed_panel(const struct packed_matrix *matrix, int64_t l, int64_t panel)
{
    return matrix->panels + (l * matrix->n_panels + panel) * matrix->panel_bytes;
}

static inline const float *packed_bias(const struct packed_matrix *matrix, int64_t l, int64_t panel)
{
    return matrix->bias + (l * matrix->n_panels + panel) * PANEL_ROWS;
}

/* The functions of struct backend that make and fill it. */
moe4_status prepared_plan(struct moe4_context *context, struct moe4_layer *layer);
moe4_status prepared_list_parts(struct moe4_context *context, const struct moe4_layer *layer, struct layer_part *parts,
                                int32_t *n_parts);
void *prepared_allocate_part(const struct moe4_layer *layer, size_t bytes);
void prepared_release_part(const struct moe4_layer *layer, void *memory, size_t bytes);
moe4_status prepared_fill(struct moe4_context *context, struct moe4_layer *layer, const moe4_expert_source *source);
moe4_status prepared_check_parts(struct moe4_context *context, struct moe4_layer *layer);
void prepared_release(struct moe4_layer *layer);

#endif
