/* Safetensors files described by lines of text, so that a fuzzer changes names, types, shapes and values rather than
 * offsets that no longer fit: those it finds in fuzz_safetensors.c.
 *
 *     @format moe4 prepared layer, version 1      metadata
 *     numbers I64 4 = 64 96 -1                    name, dtype, dimensions; values, the rest of its bytes follow a
 * pattern gate_up.panels U8 2,3,64 scale F32 = 0x1p-3                          no dimensions: one value
 *
 * %version and %layout stand for the library's version and the layout of its prepared layers.  A line that cannot be
 * read is passed over. */
#ifndef MOE4_FUZZ_CONTAINER_H
#define MOE4_FUZZ_CONTAINER_H

#include "context.h"

/* Room for one file's tensors: larger ones are left out. */
enum { CONTAINER_DATA_BYTES = 1 << 16, CONTAINER_HEADER_BYTES = 1 << 16 };

struct container {
    unsigned char bytes[8 + CONTAINER_HEADER_BYTES + CONTAINER_DATA_BYTES];
    size_t n_bytes;
};

void container_build(const moe4_context *context, const char *text, size_t n_bytes, struct container *container);

/* Replaces %version, %layout and whatever else `words` (pairs word, replacement, ..., NULL) has; the result,
 * NUL-terminated, is valid until the next call.  What does not fit into 64 KB is cut off. */
const char *expand_words(const char *text, size_t n_bytes, const char *const *words);

#endif
