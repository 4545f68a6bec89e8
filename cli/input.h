/* The inputs of `moe4 run` and `moe4 check`: from a file, or generated. */
#ifndef MOE4_CLI_INPUT_H
#define MOE4_CLI_INPUT_H

#include "model.h"
#include "pass.h"

/* Which tensors of a file route the tokens. */
typedef enum input_routing { INPUT_ANY, INPUT_LOGITS, INPUT_IDS, INPUT_ROUTER } input_routing;
extern const char *const input_routing_words[];

/* What the command line says of the inputs. */
struct input_choice {
    const char *file;       /* NULL = generated tokens: */
    int64_t n_tokens, seed; /* so many, of this seed */
    int routing;            /* input_routing; INPUT_ANY takes logits, else ids, else the layer's own router */
    int compute;            /* moe4_compute */
    int weight_use;         /* moe4_weight_use, of given ids */
    int output;             /* output_words */
};

/* What does not go together on the command line, before anything is opened. */
int input_refuse(const struct input_choice *choice);

/* Begins a pass of these tokens.  Generated ones are routed by the layer's own router; those of a safetensors file are
 *
 *   hidden_states [T, H]           BF16, F16, F32; in MXFP8 and FP8 compute also F8_E4M3 with
 *   hidden_states_scale            [T, H/32] E8M0, or [T] F32
 *   router_logits [T, E]           F32, BF16, F16
 *   topk_ids, topk_weights [T, A]  I32, and F32 or BF16; or both in topk_packed [T, A] I32
 *   router_hidden_states [T, width], token_ids [T]   for the layer's own router and for hash routing
 *   addend [T, output_size]        of the output's type: what the output is added to
 *   expert_map [E]                 I32: the model then has the experts that it names
 *
 * On failure says why; pass_end is needed either way. */
int input_open(moe4_context *context, const struct input_choice *choice, struct model *model, struct pass *pass);

#endif
