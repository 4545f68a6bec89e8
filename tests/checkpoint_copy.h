/* The golden gpt-oss layers: compared whole, and copied with changes into a scratch folder. */
#ifndef CHECKPOINT_COPY_H
#define CHECKPOINT_COPY_H

#include "io_helpers.h"

enum {
    DOWN_BIAS,
    GATE_UP_BIAS,
    ROUTER_BIAS,
    ROUTER_WEIGHT,
    DOWN_CODES,
    DOWN_SCALES,
    GATE_UP_CODES,
    GATE_UP_SCALES,
    N_PLACES
};

/* Sizes as config.json has them, and where each tensor's bytes lie in model.safetensors. */
struct golden {
    const char *name;
    int64_t E, H, I, A;
    int64_t places[N_PLACES];
};
enum { N_GOLDENS = 3 };
extern const struct golden goldens[N_GOLDENS];
#define SMALL (&goldens[0])

/* Path of a file of a golden layer's folder; "" = the folder itself. */
void golden_path(const struct golden *golden, const char *file, char *path, size_t n_bytes);
/* The whole file; free it. */
unsigned char *golden_bytes(const struct golden *golden, const char *file, size_t *n_bytes);
/* Its tensors; close them. */
moe4_tensors *open_golden(struct fixture *fixture, const struct golden *golden);

/* Expert e of the layer, compared with the file's bytes. */
void check_expert(const struct golden *golden, const unsigned char *file, int64_t e, const moe4_expert *expert);
/* Opens a folder that must hold a golden layer and compares all of it. */
void check_layer(struct fixture *fixture, const struct golden *golden, const char *folder);

/* The expected value of `tensor` in a copy: another description of it, or none at all. */
struct change {
    const char *tensor;  /* the end of its name; NULL = no change */
    moe4_tensor instead; /* its dtype, rank and shape; dtype NULL = left out; with another name = added */
};

/* Writes the tensors of `source` whose index is `part` modulo `n_parts` as one shard; a changed tensor gets as many of
 * its bytes as it has room for, then zeros. */
void write_copy(struct fixture *fixture, const moe4_tensors *source, const char *name, int part, int n_parts,
                const struct change *change);
/* Copies config.json, with the first `old` in it replaced. */
void copy_config(struct fixture *fixture, const struct golden *golden, const char *old, const char *replacement);

#endif
