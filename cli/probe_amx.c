#include "probe_kernel.h"

#include <stdint.h>

enum { CHAINS = 6, ROWS = 16, ROW_BYTES = 64, FLOPS = 2 * ROWS * ROWS * 32 };

/* What LDTILECFG reads: eight tiles of 16 rows of 64 bytes. */
struct tile_config {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};

/* In assembly, so that no compiler rearranges what is measured.  Tiles 6 and 7 hold 1 and 2^-20. */
static void run(int64_t rounds)
{
    struct tile_config config = {.palette = 1};
    uint32_t ones[ROWS * ROW_BYTES / 4], terms[ROWS * ROW_BYTES / 4];
    for (int i = 0; i < 8; ++i) config.row_bytes[i] = ROW_BYTES, config.rows[i] = ROWS;
    for (int i = 0; i < ROWS * ROW_BYTES / 4; ++i) ones[i] = 0x3F803F80, terms[i] = 0x35803580;
    __asm__ volatile("ldtilecfg %1\n\t"
                     "tileloadd (%2,%4,1), %%tmm6\n\t"
                     "tileloadd (%3,%4,1), %%tmm7\n\t"
                     ".irp sum,0,1,2,3,4,5\n\t"
                     "tilezero %%tmm\\sum\n\t"
                     ".endr\n"
                     "1:\n\t"
                     ".irp sum,0,1,2,3,4,5\n\t"
                     "tdpbf16ps %%tmm7, %%tmm6, %%tmm\\sum\n\t"
                     ".endr\n\t"
                     "dec %0\n\t"
                     "jnz 1b\n\t"
                     "tilerelease"
                     : "+r"(rounds)
                     : "m"(config), "r"(ones), "r"(terms), "r"((int64_t)ROW_BYTES)
                     : "cc", "memory");
}

const struct probe_kernel probe_kernel_amx = {"tdpbf16ps", MOE4_ISA_AMX, MOE4_COMPUTE_BF16, FLOPS, CHAINS, 1, run};
