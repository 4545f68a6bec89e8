/* Runs a target on every file that it is given and on every file of every folder: fuzzing's corpus as a test, with any
 * compiler.  Arguments that begin with '-' are libFuzzer's, and passed over. */
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>

#include "fuzz.h"

static long n_run;

static void run_file(const char *path)
{
    FILE *file = fopen(path, "rb");
    struct stat info;
    if (!file || fstat(fileno(file), &info) != 0) fuzz_fail("%s: cannot be read", path);
    size_t n_bytes = (size_t)info.st_size;
    uint8_t *bytes = malloc(n_bytes ? n_bytes : 1); /* of just this size: a sanitizer sees the first byte beyond */
    if (!bytes || fread(bytes, 1, n_bytes, file) != n_bytes) fuzz_fail("%s: cannot be read", path);
    fclose(file);
    printf("%s\n", path); /* the last one is that which failed */
    fflush(stdout);
    LLVMFuzzerTestOneInput(bytes, n_bytes);
    free(bytes);
    n_run++;
}

static void run_folder(const char *path, DIR *folder)
{
    char file[1024];
    for (const struct dirent *entry; (entry = readdir(folder));) {
        if (entry->d_name[0] == '.') continue;
        int length = snprintf(file, sizeof file, "%s/%s", path, entry->d_name);
        if (length < 0 || length >= (int)sizeof file) fuzz_fail("%s: too long a path", path);
        run_file(file);
    }
}

int main(int argc, char **argv)
{
    for (int i = 1; i < argc; i++) {
        if (argv[i][0] == '-') continue;
        DIR *folder = opendir(argv[i]);
        if (folder) {
            run_folder(argv[i], folder);
            closedir(folder);
        } else {
            run_file(argv[i]);
        }
    }
    printf("%ld inputs\n", n_run);
    return n_run ? 0 : 1;
}
