/* The inputs of `moe4 run`: from a file, or generated. */
#ifndef MOE4_CLI_INPUT_H
#define MOE4_CLI_INPUT_H

#include "pass.h"

/* Which tensors of a file route the tokens. */
typedef enum input_routing { INPUT_ANY, INPUT_LOGITS, INPUT_IDS, INPUT_ROUTER } input_routing;
extern const char *const input_routing_words[];

/* Begins a pass of n_tokens generated tokens, routed by the layer's own router. */
int input_generate(const moe4_layer_config *config, int64_t n_tokens, int64_t seed, moe4_compute compute,
                   struct pass *pass);

/* Begins a pass of the tokens in a safetensors file: hidden_states [T, H] (in MXFP8 and FP8 compute
 * it may be F8_E4M3, with hidden_states_scale [T, H/32] E8M0 or [T] F32) and router_logits [T, E], or topk_ids and
 * topk_weights [T, A], or neither; hash routing also wants token_ids [T], a router of another width than the experts'
 * router_hidden_states [T, width].  INPUT_ANY takes logits, else ids, else the layer's own router.
 * On failure says why; pass_end is needed either way. */
int input_read(moe4_context *context, const char *path, const moe4_layer_config *config, input_routing routing,
               moe4_compute compute, struct pass *pass);

#endif
