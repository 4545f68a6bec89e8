/* Packing: the rows of a panel, as a checkpoint has them, to the blocks of cpu/layout.h.  One algorithm
 * (pack_template.h) around a transposition that each instruction set does with its own vectors. */
#ifndef MOE4_CPU_KERNELS_PACK_H
#define MOE4_CPU_KERNELS_PACK_H

#include "base/dims.h"
#include "cpu/layout.h"

enum { GROUP_BLOCKS = LINE_BYTES / BLOCK_BYTES }; /* blocks packed together: a cache line of every row */

extern pack_rows_fn pack_rows_c, pack_rows_avx2, pack_rows_avx512;

pack_rows_fn *pack_rows_for(moe4_isa isa);

#endif
