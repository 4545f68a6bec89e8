/* Files that cost no disk. */
#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "fuzz.h"

static int memory_file = -1;
static char folder[64];
static pid_t folder_owner;

static void put(int fd, const void *bytes, size_t n_bytes)
{
    FUZZ_CHECK(pwrite(fd, bytes, n_bytes, 0) == (ssize_t)n_bytes);
    FUZZ_CHECK(ftruncate(fd, (off_t)n_bytes) == 0);
}

const char *fuzz_file(const void *bytes, size_t n_bytes)
{
    static char path[64];
    if (memory_file < 0) {
        memory_file = memfd_create("fuzz", MFD_CLOEXEC);
        FUZZ_CHECK(memory_file >= 0);
        snprintf(path, sizeof path, "/proc/self/fd/%d", memory_file);
    }
    put(memory_file, bytes, n_bytes);
    return path;
}

void fuzz_file_shrink(size_t n_bytes)
{
    FUZZ_CHECK(ftruncate(memory_file, (off_t)n_bytes) == 0);
}

/* Only by the process that made it: libFuzzer forks. */
static void remove_folder(void)
{
    if (getpid() != folder_owner) return;
    DIR *entries = opendir(folder);
    if (!entries) return;
    for (const struct dirent *entry; (entry = readdir(entries));)
        if (entry->d_name[0] != '.') unlink(fuzz_folder_path(entry->d_name));
    closedir(entries);
    rmdir(folder);
}

const char *fuzz_folder(void)
{
    if (folder[0]) return folder;
    const char *base = getenv("TMPDIR"), *memory = "/dev/shm";
    if (!base) base = access(memory, W_OK) == 0 ? memory : "/tmp";
    snprintf(folder, sizeof folder, "%.40s/moe4-fuzz-XXXXXX", base);
    FUZZ_CHECK(mkdtemp(folder));
    folder_owner = getpid();
    FUZZ_CHECK(atexit(remove_folder) == 0);
    return folder;
}

const char *fuzz_folder_path(const char *name)
{
    static char path[512];
    snprintf(path, sizeof path, "%s/%.300s", fuzz_folder(), name);
    return path;
}

void fuzz_folder_put(const char *name, const void *bytes, size_t n_bytes)
{
    const char *path = fuzz_folder_path(name);
    if (!bytes) {
        unlink(path);
        return;
    }
    int fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
    FUZZ_CHECK(fd >= 0);
    put(fd, bytes, n_bytes);
    close(fd);
}
