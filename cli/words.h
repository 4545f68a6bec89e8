/* The command's words for the library's enums.  Lists are NULL-terminated. */
#ifndef MOE4_CLI_WORDS_H
#define MOE4_CLI_WORDS_H

#include "moe4/moe4.h"

extern const char *const isa_words[];     /* index = moe4_isa */
extern const char *const compute_words[]; /* index = moe4_compute */
extern const char *const routing_words[]; /* index + 1 = moe4_routing_method */
extern const char *const backend_words[]; /* index = moe4_device */
extern const char *const weight_words[];  /* index = moe4_weight_use */
extern const char *const output_words[];  /* what y may be; */
moe4_dtype output_dtype(int index);       /* one of them */

const char *routing_word(moe4_routing_method method);
const char *activation_word(moe4_activation activation);
const char *gate_up_word(moe4_gate_up order);

#endif
