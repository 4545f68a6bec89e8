/* Regular files, read with pread: complete reads or a message, whatever happens to the file meanwhile. */
#ifndef MOE4_IO_FILE_H
#define MOE4_IO_FILE_H

#include "context.h"

/* What a tensor file holds is little-endian, and bytes are handed out as they are. */
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "moe4 needs a little-endian machine");

struct file {
    const char *path; /* not owned */
    int fd;           /* -1 = closed */
    int64_t n_bytes;  /* when it was opened */
};

/* MOE4_EIO if the system refuses or it is not a regular file.  On failure fd is -1. */
moe4_status file_open(moe4_context *context, const char *path, struct file *file);
void file_close(struct file *file);

/* Reads exactly n_bytes at offset; MOE4_EIO if the file has become shorter. */
moe4_status file_read(moe4_context *context, const struct file *file, int64_t offset, int64_t n_bytes, void *buffer);

/* The same without a word, from any thread: how many bytes could be read; errno is 0 where the file ends. */
int64_t file_copy(const struct file *file, int64_t offset, int64_t n_bytes, void *buffer);

/* The bytes of a whole file; released with memory_release. */
struct file_text {
    char *text;
    size_t n_bytes;
};
/* MOE4_EFORMAT for a file of more than `limit` bytes. */
moe4_status file_read_all(moe4_context *context, const char *path, int64_t limit, struct file_text *text);

typedef enum file_kind { FILE_MISSING, FILE_FOLDER, FILE_OTHER } file_kind;
/* What is at path; FILE_OTHER also for whatever cannot be looked at, so that opening it tells why. */
file_kind file_look(const char *path);

#endif
