/* What the two formats that can be written share: checks at the door, targets and the temporary file are writer.c's; a
 * format brings the sizes of its types, its alignment and its header. */
#ifndef MOE4_IO_WRITER_H
#define MOE4_IO_WRITER_H

#include "context.h"
#include "io/storage.h"
#include "moe4/io.h"

struct target {
    moe4_tensor tensor; /* its offset is in the data until the header's length is known, then in the file */
    int64_t n_written;
};

struct moe4_writer {
    moe4_allocator allocator;
    struct arena strings;
    const char *path;
    char *temporary; /* beside path, with another extension */
    int fd;          /* of temporary; -1 = there is none */
    int32_t n_targets;
    struct target *targets;
    int64_t data_bytes; /* padded */
};

/* A header in the making.  A failed allocation is remembered and turns what follows into nothing, so that it is asked
 * for once, at the end. */
struct text {
    const moe4_allocator *allocator;
    char *bytes;
    size_t n_bytes, capacity;
    int failed;
};
void text_add_byte(struct text *text, char byte);
void text_add_string(struct text *text, const char *string);

struct writer_format {
    /* Fills in dtype (the library's own word) and n_bytes of a tensor whose name is checked. */
    moe4_status (*measure)(moe4_context *context, const char *path, moe4_tensor *tensor);
    int64_t alignment; /* of every tensor in the data */
    void (*add_header)(struct text *text, const moe4_writer *writer, const void *metadata);
};

/* The text must not be NULL and must be UTF-8. */
moe4_status writer_check_text(moe4_context *context, const char *path, const char *what, const char *string);

moe4_status writer_create(moe4_context *context, const char *path, const moe4_tensor *tensors, int32_t n_tensors,
                          const struct writer_format *format, const void *metadata, moe4_writer **writer);

#endif
