/* What the fuzz targets share.
 *
 * A target is one file with one function, LLVMFuzzerTestOneInput, which hands its input and a body to fuzz_run.  Linked
 * with libFuzzer it is a fuzzer, with replay.c a test that reads the kept corpus; both are called in the same way. */
#ifndef MOE4_FUZZ_H
#define MOE4_FUZZ_H

#include <stddef.h>
#include <stdint.h>

#include "context.h"
#include "moe4/io.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

/* Ends the process with a message: a property does not hold. */
__attribute__((noreturn, format(printf, 1, 2))) void fuzz_fail(const char *format, ...);
#define FUZZ_CHECK(condition)                                                                                          \
    do {                                                                                                               \
        if (!(condition)) fuzz_fail("%s:%d: %s", __FILE__, __LINE__, #condition);                                      \
    } while (0)

/* What is done with one input.  The context is a whole one: portable kernels, one thread, device "fuzz". */
typedef void fuzz_body(moe4_context *context, const uint8_t *data, size_t n_bytes);

/* Runs the body twice: as it is, then with one of its allocations failing; which one follows from the input.  Fails if
 * anything is left allocated, or if more memory was taken at once than the input justifies. */
int fuzz_run(const uint8_t *data, size_t n_bytes, fuzz_body *body);

/* The body made files of n_bytes more than its input: so much more may be allocated. */
void fuzz_justify(size_t n_bytes);

/* A moe4_status that a call on hostile input may return: not MOE4_ENOMEM, but for an allocation that was made to fail,
 * and a failure says why.  With FUZZ_VERBOSE in the environment both are printed. */
void fuzz_check_status(const moe4_context *context, moe4_status status);

/* So that a sanitizer sees every byte. */
void fuzz_touch(const void *bytes, size_t n_bytes);

/* ---- Files ---------------------------------------------------------------------------------------------------------
 */

/* A file in memory with these bytes; its path is valid, and its content the same, until the next call. */
const char *fuzz_file(const void *bytes, size_t n_bytes);
/* Cuts it to so many bytes. */
void fuzz_file_shrink(size_t n_bytes);

/* A folder in memory, one a process and removed at its end. */
const char *fuzz_folder(void);
/* Path of a file in it; valid until the next call. */
const char *fuzz_folder_path(const char *name);
/* Writes a file of it, or with bytes NULL removes it. */
void fuzz_folder_put(const char *name, const void *bytes, size_t n_bytes);

/* ---- Layers --------------------------------------------------------------------------------------------------------
 */

/* Describes a layer and runs it on one token, through its own router where it has one. */
void fuzz_use_layer(moe4_context *context, const moe4_layer *layer);

/* Opens a checkpoint, checks what is said of it, reads the experts of its first layers, and prepares and runs those. */
void fuzz_use_checkpoint(moe4_context *context, const char *path);

#endif
