/* The safetensors format: 8 bytes length N (little-endian), N bytes of JSON, then the tensors' bytes without a gap. */
#ifndef MOE4_IO_SAFETENSORS_H
#define MOE4_IO_SAFETENSORS_H

#include "io/tensors.h"

enum { LENGTH_BYTES = 8, LARGEST_HEADER = 100000000 };

#define METADATA_KEY "__metadata__" /* the one entry that is no tensor */

/* Reads the header of the last file of `tensors` and adds what it describes. */
moe4_status safetensors_read_header(moe4_context *context, moe4_tensors *tensors);

#endif
