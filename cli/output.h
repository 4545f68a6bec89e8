/* A checkpoint folder being written: tensors in units, units in shards, an index and config.json.
 *
 * Each shard appears under its name only when complete, config.json last of all: a folder without it is unfinished, and
 * the same job started again keeps the shards that are there.  Memory is the producer's own. */
#ifndef MOE4_CLI_OUTPUT_H
#define MOE4_CLI_OUTPUT_H

#include <jansson.h>

#include "moe4/io.h"
#include "progress.h"

/* Tensors that one call produces; they stay in one shard. */
struct output_unit {
    int32_t first, n_tensors; /* of output.tensors */
    int64_t n_bytes;
    int32_t kind, layer, expert;  /* the producer's */
    const moe4_tensor *source[2]; /* likewise */
};

struct output {
    moe4_context *context;
    const char *folder;
    int64_t shard_bytes;
    int force;
    char job[1024]; /* says what is made of what: recorded in every shard */
    const char *metadata[12];

    moe4_tensor *tensors;
    struct output_unit *units;
    int64_t n_tensors, n_units, tensors_room, units_room;
    int64_t bytes_done, bytes_total;
    int32_t n_shards, n_kept;

    moe4_writer *writer; /* of the shard being written, whose first tensor is shard_first */
    int64_t shard_first;
    struct progress bar;
};

/* Refuses to write a folder into itself: an interrupted run would leave neither the source nor the result. */
int output_check_apart(const char *source, const char *folder);

/* Begins a job's description with `what` and what identifies the source: place, sizes, modification times; of the
 * folder `path` also its config.json. */
int output_begin(struct output *output, const char *what, const char *path, const moe4_tensors *source);

/* A pair of metadata for every shard; the strings are not copied. */
void output_note(struct output *output, const char *key, const char *value);

/* Adds a unit without tensors, which is valid until the next; NULL after a failure, which has been reported. */
struct output_unit *output_add_unit(struct output *output, int32_t kind);

/* Adds a tensor to the last unit; the name is copied. */
int output_add(struct output *output, const char *name, const char *dtype, int32_t rank, const int64_t *shape);

typedef int (*output_producer)(void *user, struct output *output, const struct output_unit *unit);

/* Writes everything: calls produce for each unit of a shard that is not there yet. */
int output_write(struct output *output, const json_t *config, output_producer produce, void *user);

/* Bytes of the unit's tensor `index`, from its producer. */
int output_put(struct output *output, const struct output_unit *unit, int32_t index, int64_t first, int64_t n_bytes,
               const void *data);

/* The unit's first tensor, byte for byte its source's. */
int output_copy(struct output *output, const moe4_tensors *tensors, const struct output_unit *unit);

/* What was written, as fields of a report and as members of an object. */
void output_report(const struct output *output, double seconds);
void output_json(const struct output *output, double seconds, json_t *object);

void output_release(struct output *output);

#endif
