/* Quantising the rows of matrices on several threads, with an account of what was lost. */
#ifndef MOE4_CLI_ENCODE_H
#define MOE4_CLI_ENCODE_H

#include <jansson.h>

#include "dense.h"
#include "moe4/quant.h"

struct encode_entry {
    char *name; /* of the tensor that was quantised */
    moe4_mxfp4_loss loss;
};

struct encoder {
    moe4_scale_rule rule;
    int32_t n_threads;
    int32_t n_checked_rows; /* a matrix, against the oracle */
    int64_t n_rows_checked;

    int64_t losses_room;
    moe4_mxfp4_loss *losses;      /* [rows]: their sum does not depend on who made them */
    struct encode_entry *entries; /* one a tensor */
    int64_t n_entries, entries_room;
    struct encode_lane *lanes; /* one a thread, made when first needed */
    int32_t n_lanes;
    struct slab whole; /* a matrix that lies transposed */
};

/* Reads a matrix and encodes it into codes [rows, K/2] and scales [rows, K/32]; the loss goes to the entry of the
 * tensor. Fails when the oracle disagrees. */
int encode_matrix(struct encoder *encoder, const struct dense_matrix *matrix, uint8_t *codes, uint8_t *scales);

/* The tensors of largest error and the total, as text; all of them, into the object. */
void encoder_report(const struct encoder *encoder);
void encoder_json(const struct encoder *encoder, json_t *object);

void encoder_release(struct encoder *encoder);

#endif
