/* Writing the MoE layers of a checkpoint as a GGUF file, which holds nothing else. */
#ifndef MOE4_CLI_GGUF_OUTPUT_H
#define MOE4_CLI_GGUF_OUTPUT_H

#include "moe4/io.h"

struct gguf_output {
    moe4_context *context;
    const moe4_checkpoint *checkpoint;
    const moe4_checkpoint_info *info;
    const int32_t *layers; /* model layers to write, ascending */
    int32_t n_layers;
    const char *path; /* of the file; ends in .gguf */
    int64_t bytes_total;
};

/* Writes the file.  Refuses, naming it, whatever of activation and router GGUF has no words for: the file is read again
 * and compared with the source before it gets its name. */
int gguf_output_write(struct gguf_output *output);

#endif
