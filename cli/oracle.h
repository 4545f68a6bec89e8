/* The oracle as a backend: a whole pass in double precision.  Slow. */
#ifndef MOE4_CLI_ORACLE_H
#define MOE4_CLI_ORACLE_H

#include "pass.h"
#include "ref.h"

/* Fills every result of the pass that has been allocated, as pass_forward does.  Reads each named expert once. */
int oracle_forward(const moe4_layer_config *config, const moe4_expert_source *source, int32_t n_threads,
                   struct pass *pass);

/* The roundings of a compute mode. */
ref_mode oracle_mode(moe4_compute compute);

#endif
