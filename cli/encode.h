/* Quantising rows of a slab on several threads, with an account of what was lost. */
#ifndef MOE4_CLI_ENCODE_H
#define MOE4_CLI_ENCODE_H

#include <jansson.h>

#include "dense.h"
#include "moe4/quant.h"

/* What quantising one matrix, or many, has cost. */
struct encode_loss {
    double squared, squared_error;   /* sums over finite blocks */
    int64_t n_elements, n_saturated; /* magnitudes beyond 6 times the scale */
    int64_t n_blocks, n_zero, n_nan; /* blocks whose codes are all zero; blocks that are not finite */
};

struct encode_entry {
    char *name; /* of the tensor that was quantised */
    struct encode_loss loss;
};

struct encoder {
    moe4_scale_rule rule;
    int32_t n_threads;
    int32_t n_checked_rows; /* a matrix, against the oracle */
    int64_t n_rows_checked;

    int64_t losses_room;
    struct encode_loss *losses;   /* [rows] */
    struct encode_entry *entries; /* one a tensor */
    int64_t n_entries, entries_room;
};

/* Encodes a slab into codes [rows, K/2] and scales [rows, K/32]; the loss goes to the entry `name`.  Fails when the
 * oracle disagrees. */
int encode_slab(struct encoder *encoder, const struct slab *slab, const char *name, uint8_t *codes, uint8_t *scales);

/* The tensors of largest error and the total, as text; all of them, into the object. */
void encoder_report(const struct encoder *encoder);
void encoder_json(const struct encoder *encoder, json_t *object);

void encoder_release(struct encoder *encoder);

#endif
