/* Writing MoE layers as a GGUF file, or several, which hold nothing else. */
#ifndef MOE4_CLI_GGUF_OUTPUT_H
#define MOE4_CLI_GGUF_OUTPUT_H

#include "feed.h"
#include "moe4/io.h"

/* Whether gate and up are tensors of their own. */
enum gguf_gate_up { GGUF_SPLIT, GGUF_FUSED };

struct gguf_output {
    moe4_context *context;
    const moe4_checkpoint_info *info; /* of the model */
    struct feed feed;                 /* its layers, with the values of their routers */
    const int32_t *layers;            /* model layers to write, ascending */
    int32_t n_layers;
    enum gguf_gate_up gate_up;
    const char *path;         /* of the file; must end in .gguf */
    int force;                /* replace what is there */
    const char *job;          /* what is made of what: an interrupted run of it is gone on with */
    int64_t file_bytes;       /* about; layers stay whole.  More than one: NAME-00001-of-00003.gguf and so on */
    const char *const *notes; /* key, value, ..., NULL: more metadata; NULL = none */
    int64_t bytes_total;      /* set by write */
    int32_t n_files, n_kept;  /* likewise; kept are those that an interrupted run had finished */
};

/* Writes the files.  Refuses, naming it, whatever of activation and router GGUF has no words for: the files are read
 * again and compared with the source before they get their names.  Until then their names have ".unfinished-" and the
 * job's hash in them; what is complete stays so when something fails, and the same job keeps it. */
int gguf_output_write(struct gguf_output *output);

/* Whether two layers have the same sizes, activation and routing: NULL, or what is not. */
const char *layer_config_difference(const moe4_layer_config *a, const moe4_layer_config *b);

#endif
