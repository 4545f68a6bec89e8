/* The GGUF format, version 3 (and 2, which differs in nothing that is read here): magic, version, counts, key-value
 * pairs, tensor descriptions, then the tensors' bytes, each aligned.  Everything is little-endian. */
#ifndef MOE4_IO_GGUF_H
#define MOE4_IO_GGUF_H

#include "io/config.h"
#include "io/tensors.h"

/* Whether a path is a GGUF file by its name, or a folder of such files and no others of tensors. */
int gguf_is_at(const char *path);

/* What a file says of itself as one of several; -1 = nothing. */
struct gguf_split {
    int64_t number, count, n_tensors; /* number from 0; n_tensors of all files */
};

/* Reads the header of the last file of `tensors` and adds what it describes. */
moe4_status gguf_read_header(moe4_context *context, moe4_tensors *tensors, struct gguf_split *split);

/* Adds the file at path and, when its name says that it is one of several, the others in their order. */
moe4_status gguf_add_files(moe4_context *context, moe4_tensors *tensors, const char *path);

/* Adds the files of a folder, which must be one model's. */
moe4_status gguf_add_folder(moe4_context *context, moe4_tensors *tensors);

/* The metadata of an open file as a config, whose section is the keys of general.architecture.  config_close it;
 * `tensors` must outlive it. */
moe4_status gguf_config(moe4_context *context, const moe4_tensors *tensors, struct config *config);

/* Whether a name ends in .gguf. */
int gguf_is_name(const char *name);

#endif
