/* How fast a layer is prepared. */
#ifndef MOE4_CLI_PACKING_H
#define MOE4_CLI_PACKING_H

#include "machine.h"

/* Prepares a layer of a few experts twice, the second time in the memory of the first, and says how many bytes a second
 * were read and written then.  The source's own time does not count; nor does what the kernel needs to clear new pages,
 * which depends on the machine and is anything from ten times more to ten times less. */
int packing_measure(const struct machine_choice *where, const moe4_layer_config *config,
                    const moe4_expert_source *source, double *gbs);

#endif
