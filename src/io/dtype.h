/* The element types of the safetensors format. */
#ifndef MOE4_IO_DTYPE_H
#define MOE4_IO_DTYPE_H

#include "context.h"
#include "moe4/io.h"

/* The library's own copy of a type's name, which is what moe4_tensor.dtype points to; NULL if there is no such type. */
const char *dtype_find(const char *name);

/* Bytes of a tensor from its dtype (one of dtype_find), rank and shape; all else of it is only for the message.
 * The status is `refusal` for a negative dimension, a size beyond 63 bits, or elements that do not fill whole bytes. */
moe4_status tensor_size(moe4_context *context, moe4_status refusal, const char *path, const moe4_tensor *tensor,
                        int64_t *n_bytes);

#endif
