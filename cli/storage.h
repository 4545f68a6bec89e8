/* The layouts that the command writes: their names, types and shapes, and what config.json says of them. */
#ifndef MOE4_CLI_STORAGE_H
#define MOE4_CLI_STORAGE_H

#include <stdint.h>

#include <jansson.h>

/* Index of storage_words. */
typedef enum storage_kind {
    STORAGE_GPT_OSS,
    STORAGE_ORIGINAL,
    STORAGE_COMPRESSED_TENSORS,
    STORAGE_DEEPSEEK_V4,
    STORAGE_QUARK,
    STORAGE_MODELOPT,
    STORAGE_MLX,
    STORAGE_GGUF, /* gate, up and down apart; from here on files, not folders */
    STORAGE_GGUF_FUSED,
    N_STORAGES
} storage_kind;
extern const char *const storage_words[];

enum projection_role { ROLE_GATE, ROLE_UP, ROLE_DOWN, N_PROJECTIONS };
enum matrix_part { PART_CODES, PART_SCALES, PART_BIAS, N_PARTS };

/* How the experts of a layer are spread over tensors. */
enum arrangement {
    ARRANGED_APART, /* a tensor a projection and expert */
    ARRANGED_SPLIT, /* a tensor a projection, of all experts: [E, ...] */
    ARRANGED_FUSED  /* the same, but gate and up are one, their rows interleaved */
};

/* Tensors of a layout, named BASE [expert "."] WORD END. */
struct storage {
    enum arrangement arrangement;
    const char *const *words;  /* of a projection; NULL = as the base has them.  FUSED: of gate_up and down */
    const char *ends[N_PARTS]; /* of codes, scales and biases */
    const char *dtypes[2];     /* of codes and scales */
    int32_t code_elements;     /* in one element of the codes' tensor; 0 = the last dimension is blocks of 16 bytes */
    const char *model_type;    /* the only model that it can describe; NULL = any */
};

/* The table entry of a layout; that of modelopt differs by model. */
const struct storage *storage_find(storage_kind kind, const json_t *config);

/* What the names of a layer's expert tensors begin with, from what they begin with in other layouts: text through
 * "experts.", which is changed and returned. */
const char *storage_base(storage_kind kind, const json_t *config, int32_t layer, char *base, size_t bytes);

/* Reads config.json of a folder; NULL after a failure, which has been reported. */
json_t *storage_config_read(const char *folder);

/* The config of the same model in a layout; NULL after a failure, which has been reported.  What it says of the
 * quantisation of other tensors is kept, and comes back when the layout does. */
json_t *storage_config(storage_kind kind, const json_t *source);

/* Whether a config is of this layout already. */
int storage_has_config(storage_kind kind, const json_t *config);

/* A member of the config, or of its text part. */
const json_t *config_member(const json_t *config, const char *key);

/* Whether its model_type, or that of its text part, begins so. */
int config_is_model(const json_t *config, const char *model_type);

/* "w1", "w3", "w2" where the block of that path has these, else "gate_proj", "up_proj", "down_proj". */
const char *projection_word(const char *block_path, enum projection_role role);

#endif
