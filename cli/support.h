/* What a machine is, and what it can do with a layer, asked before anything is loaded. */
#ifndef MOE4_CLI_SUPPORT_H
#define MOE4_CLI_SUPPORT_H

#include <jansson.h>

#include "machine.h"

/* {"backend": "cuda", "name": "NVIDIA H200", "isa": "sm_90a", ...} */
json_t *support_machine_json(const struct machine *machine);
void support_machine_print(const struct machine *machine);

/* {"bf16": "ok", "fp8": "the reason why not", ...}: a layer's own router and experts in each format of activations. */
json_t *support_layer_json(const struct machine *machine, const moe4_layer_config *config);
void support_layer_print(const struct machine *machine, const moe4_layer_config *config);

#endif
