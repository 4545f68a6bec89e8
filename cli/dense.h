/* Expert weights that are not quantised yet: recognising their tensors and reading them row by row. */
#ifndef MOE4_CLI_DENSE_H
#define MOE4_CLI_DENSE_H

#include "moe4/io.h"
#include "storage.h"

enum dense_kind {
    DENSE_NONE,   /* of something else */
    DENSE_EXPERT, /* one matrix of one expert, [rows, K] */
    DENSE_EXPERT_BIAS,
    DENSE_GATE_UP, /* of all experts, stacked: [E, 2I, H] or transposed [E, H, 2I] */
    DENSE_DOWN,    /* [E, H, I] or [E, I, H] */
    DENSE_GATE_UP_BIAS,
    DENSE_DOWN_BIAS
};

/* What a name says. */
struct dense_name {
    enum dense_kind kind;
    int32_t layer, expert;     /* -1 = none */
    int is_extra;              /* the layer is one for multi-token prediction, counted from the model's last */
    int base_length;           /* of the name through "experts." */
    enum projection_role role; /* of an EXPERT */
};
struct dense_name dense_parse(const char *name);

/* A model's stacked tensors: sizes, and how they lie. */
struct dense_model {
    int64_t H, I, E;
    int64_t n_experts; /* by the config; 0 = it does not say */
    int is_transposed, is_interleaved;
};

/* Sizes from the config; transposed or not from the shapes of a stacked gate_up tensor (NULL = there is none). */
int dense_model_read(const json_t *config, const moe4_tensor *gate_up, struct dense_model *model);

/* A matrix in a file: from an element of a tensor on, [rows, K] or, transposed, [K, rows]. */
struct dense_matrix {
    const moe4_tensors *tensors;
    const moe4_tensor *tensor;
    int64_t first_element, rows, K;
    int is_transposed;
};

/* Rows of one in memory: bf16, or f32 for whatever else the file has. */
struct slab {
    int64_t rows, K;
    int is_bf16;
    void *data; /* [rows, K] */
    void *raw;  /* as read */
    int64_t data_room, raw_room;
};

/* Reads rows of a matrix; all of them, of one that is transposed.  The slab's memory is reused. */
int slab_read(moe4_context *context, const struct dense_matrix *matrix, int64_t first_row, int64_t rows,
              struct slab *slab);
void slab_release(struct slab *slab);

/* Makes room in a buffer of `*room` bytes. */
int buffer_reserve(void *buffer, int64_t *room, int64_t bytes, const char *what);

#endif
