#include "probe_kernel.h"

enum { LANES = 48 };

static volatile float factor = 1.0f, term = 0x1p-20f, result; /* volatile: nothing can be foreseen or left out */

/* Whatever the compiler makes of it for the baseline instruction set. */
static void run(int64_t rounds)
{
    float sums[LANES] = {0};
    while (rounds--) {
        float x = factor, y = term;
        for (int i = 0; i < LANES; ++i) sums[i] = sums[i] * x + y;
    }
    for (int i = 0; i < LANES; ++i) result = sums[i];
}

const struct probe_kernel probe_kernel_c = {"mul + add", MOE4_ISA_C, MOE4_COMPUTE_BF16, 2 * LANES, 1, 0, run};
