/* The tensors of one or more files, while they are collected and afterwards. */
#ifndef MOE4_IO_TENSORS_H
#define MOE4_IO_TENSORS_H

#include "io/file.h"
#include "io/json.h"
#include "io/names.h"
#include "io/storage.h"
#include "moe4/io.h"

struct metadata_pair {
    const char *key, *value; /* value as text */
    size_t file;
    json_token token; /* what kind of value; safetensors has STRING only */
};

struct moe4_tensors {
    moe4_allocator allocator;
    struct arena strings;
    char *path; /* as it was opened */
    struct file *files;
    size_t n_files, files_capacity;
    moe4_tensor *items;
    size_t count, capacity;
    struct names by_name; /* index into items */
    struct metadata_pair *metadata;
    size_t n_metadata, metadata_capacity;
    struct names by_key; /* index into metadata */
};

/* Opens one more safetensors file and adds its tensors and metadata.  The path must be in `strings`. */
moe4_status tensors_add_file(moe4_context *context, moe4_tensors *tensors, const char *path);

/* Reads bytes that are in the tensor, from any thread: 1, or 0 if not all could be read, without a word. */
int tensors_copy(const moe4_tensors *tensors, const moe4_tensor *tensor, int64_t first, int64_t n_bytes, void *to);

/* ---- For the formats --------------------------------------------------------------------------------------------- */

/* Opens one more file as the last of `files`. */
moe4_status tensors_open_file(moe4_context *context, moe4_tensors *tensors, const char *path);

/* Appends a tensor of the last file; its name must be in `strings`. */
moe4_status tensors_add(moe4_context *context, moe4_tensors *tensors, const moe4_tensor *tensor);

/* Enters the names of the tensors from index `first` on; one twice is refused. */
moe4_status tensors_enter_names(moe4_context *context, moe4_tensors *tensors, size_t first);

/* Adds a pair of the last file; both strings must be in `strings`.  The first file that has a key wins, one that has it
 * twice is refused. */
moe4_status tensors_add_metadata(moe4_context *context, moe4_tensors *tensors, const char *key, const char *value,
                                 json_token token);

/* folder.c: adds the shards of a folder. */
moe4_status folder_add_files(moe4_context *context, moe4_tensors *tensors);

/* folder/name in `strings`; NULL with a message when there is no memory. */
char *tensors_join(moe4_context *context, moe4_tensors *tensors, const char *folder, const char *name);

#endif
