/* The tensors of one or more files, while they are collected and afterwards. */
#ifndef MOE4_IO_TENSORS_H
#define MOE4_IO_TENSORS_H

#include "io/file.h"
#include "io/names.h"
#include "io/storage.h"
#include "moe4/io.h"

struct metadata_pair {
    const char *key, *value;
    size_t file;
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

/* Opens one more file and adds its tensors and metadata.  The path must be in `strings`. */
moe4_status tensors_add_file(moe4_context *context, moe4_tensors *tensors, const char *path);

/* folder.c: adds the shards of a folder. */
moe4_status folder_add_files(moe4_context *context, moe4_tensors *tensors);

/* folder/name in `strings`; NULL with a message when there is no memory. */
char *tensors_join(moe4_context *context, moe4_tensors *tensors, const char *folder, const char *name);

#endif
