/* How the command names and types what it writes: the layouts that quantize and convert have in common. */
#ifndef MOE4_CLI_STORAGE_H
#define MOE4_CLI_STORAGE_H

#include <stdint.h>

#include <jansson.h>

/* Index of storage_words. */
typedef enum storage_kind { STORAGE_GPT_OSS, STORAGE_COMPRESSED_TENSORS, STORAGE_DEEPSEEK_V4 } storage_kind;
extern const char *const storage_words[];

/* Tensors of a layout; stacked ones hold all experts of a layer. */
struct storage {
    int is_stacked;
    const char *codes, *scales; /* ends of names, after those of the projection */
    const char *codes_dtype, *scales_dtype;
    const char
        *model_type; /* the only model it can describe: its activation and router are not in the file; NULL = any */
};
extern const struct storage storages[];

/* Reads config.json of a folder; NULL after a failure, which has been reported. */
json_t *storage_config_read(const char *folder);

/* The config of the same model in a layout; NULL after a failure, which has been reported.  What it says of the
 * quantisation of other tensors is kept, and comes back when the layout does. */
json_t *storage_config(storage_kind kind, const json_t *source);

/* A config.json for the layers of a gpt-oss model that came without one. */
struct moe_sizes {
    int64_t hidden_size, intermediate_size, n_experts, top_k, n_layers;
    double limit;
};
json_t *storage_config_of_gpt_oss(const struct moe_sizes *sizes);

/* A member of the config, or of its text part. */
const json_t *config_member(const json_t *config, const char *key);

/* "w1", "w3", "w2" where the source or its block has these, else "gate_proj", "up_proj", "down_proj". */
enum projection_role { ROLE_GATE, ROLE_UP, ROLE_DOWN, N_PROJECTIONS };
const char *projection_word(const char *block_path, enum projection_role role);

#endif
