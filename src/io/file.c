#include "io/file.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "io/show.h"

/* Linux moves at most 0x7FFFF000 bytes a call. */
enum { LARGEST_READ = 1 << 30 };

moe4_status file_open(moe4_context *context, const char *path, struct file *file)
{
    struct stat info;
    /* O_NONBLOCK: a pipe of that name must not hang us. */
    *file = (struct file){path, open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK), 0};
    if (file->fd < 0 || fstat(file->fd, &info) != 0) {
        int error = errno;
        file_close(file);
        return context_fail(context, MOE4_EIO, "%.200s: cannot open: %s", path, strerror(error));
    }
    if (!S_ISREG(info.st_mode)) {
        file_close(file);
        return context_fail(context, MOE4_EIO, "%.200s: not a regular file", path);
    }
    file->n_bytes = info.st_size;
    return MOE4_OK;
}

void file_close(struct file *file)
{
    if (file->fd >= 0) close(file->fd);
    file->fd = -1;
}

int64_t file_copy(const struct file *file, int64_t offset, int64_t n_bytes, void *buffer)
{
    int64_t done = 0;
    while (done < n_bytes) {
        const int64_t wanted = n_bytes - done < LARGEST_READ ? n_bytes - done : LARGEST_READ;
        errno = 0;
        ssize_t n = pread(file->fd, (char *)buffer + done, (size_t)wanted, offset + done);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) break;
        done += n;
    }
    return done;
}

moe4_status file_read(moe4_context *context, const struct file *file, int64_t offset, int64_t n_bytes, void *buffer)
{
    const int64_t done = file_copy(file, offset, n_bytes, buffer);
    if (done >= n_bytes) return MOE4_OK;
    if (errno)
        return context_fail(context, MOE4_EIO, "%s: cannot read %" PRId64 " bytes at %" PRId64 ": %s",
                            show_file(file->path).text, n_bytes - done, offset + done, strerror(errno));
    return context_fail(context, MOE4_EIO, "%s: ends at byte %" PRId64 ", had %" PRId64 " when it was opened",
                        show_file(file->path).text, offset + done, file->n_bytes);
}

moe4_status file_read_all(moe4_context *context, const char *path, int64_t limit, struct file_text *text)
{
    struct file file;
    *text = (struct file_text){NULL, 0};
    moe4_status status = file_open(context, path, &file);
    if (status != MOE4_OK) return status;
    if (file.n_bytes > limit) {
        status = context_fail(context, MOE4_EFORMAT, "%s: %" PRId64 " bytes, at most %" PRId64 " are read",
                              show_file(path).text, file.n_bytes, limit);
        goto done;
    }
    char *bytes = memory_allocate(&context->allocator, (size_t)file.n_bytes);
    if (!bytes) {
        status = context_fail_memory(context, file_name(path), (size_t)file.n_bytes);
        goto done;
    }
    status = file_read(context, &file, 0, file.n_bytes, bytes);
    if (status == MOE4_OK)
        *text = (struct file_text){bytes, (size_t)file.n_bytes};
    else
        memory_release(&context->allocator, bytes, (size_t)file.n_bytes);
done:
    file_close(&file);
    return status;
}

file_kind file_look(const char *path)
{
    struct stat info;
    if (stat(path, &info) != 0) return errno == ENOENT ? FILE_MISSING : FILE_OTHER;
    return S_ISDIR(info.st_mode) ? FILE_FOLDER : FILE_OTHER;
}
