/* The files of tests/data/witness, which tests/witness/generate.py wrote: what other programs make of inputs, beside
 * the parameters they were given.  Anything amiss fails the running cmocka test. */
#ifndef MOE4_TEST_WITNESS_H
#define MOE4_TEST_WITNESS_H

#include "golden.h"

/* name: without folder and ".safetensors". */
golden_file *witness_open(const char *name);

/* Parameters in the metadata; 0 if absent. */
int32_t witness_integer(const golden_file *file, const char *key);
float witness_number(const golden_file *file, const char *key);
int witness_says(const golden_file *file, const char *key, const char *word);

/* NONE if the file says no method of ours. */
moe4_routing_method witness_method(const golden_file *file);
moe4_activation witness_activation(const golden_file *file);

/* The routing of a file: its words and numbers, and its tensors correction_bias and hash_table where it has them. */
moe4_routing witness_routing(const golden_file *file);

/* Names another file's bias (F32) and table (I32) in a routing. */
void witness_set_bias(moe4_routing *routing, const golden_tensor *bias);
void witness_set_table(moe4_routing *routing, const golden_tensor *table);

#endif
