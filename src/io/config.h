/* A config - config.json, or the metadata of a GGUF file - and the questions that a model family asks of it.  Every
 * answer that is not there, of the wrong type or out of range is an error that names file, key and both values. */
#ifndef MOE4_IO_CONFIG_H
#define MOE4_IO_CONFIG_H

#include "io/file.h"
#include "io/json_tree.h"

enum config_kind { CONFIG_JSON, CONFIG_GGUF };

struct config {
    moe4_context *context;
    enum config_kind kind;
    const char *path;
    moe4_allocator allocator;
    struct file_text text, beside_text;
    struct arena nodes;
    struct json_value *root;
    struct json_value *beside;        /* hf_quant_config.json, for what config.json does not say; NULL = none */
    const struct json_value *section; /* looked into first: "text_config", or a GGUF architecture's keys; NULL = none */
};

/* Opens config.json and, if it says nothing of a quantisation or that modelopt made it, the hf_quant_config.json beside
 * it. path must outlive *config.  config_close is needed only after success. */
moe4_status config_open(moe4_context *context, const char *path, struct config *config);
void config_close(struct config *config);

/* Keys below name a value of the section or the top level or, as "section.name", of an object in it. */

/* NULL if absent. */
const struct json_value *config_find(const struct config *config, const char *key);

/* The same, but null is absent too. */
const struct json_value *config_present(const struct config *config, const char *key);

/* The first of a NULL-ended list of keys that is present; if none is, the first. */
const char *config_key(const struct config *config, const char *const *keys);

/* Whether a value is present and this string. */
int config_says(const struct config *config, const char *key, const char *word);

moe4_status config_integer(const struct config *config, const char *key, int64_t least, int64_t most, int64_t *value);
/* Keys for one thing, NULL-ended: at least one must be there, and all that are must agree. */
moe4_status config_integer_of(const struct config *config, const char *const *keys, int64_t least, int64_t most,
                              int64_t *value);
/* Leaves *value alone if all are absent or null. */
moe4_status config_optional_integer(const struct config *config, const char *const *keys, int64_t least, int64_t most,
                                    int64_t *value);
/* Leaves *value alone if absent. */
moe4_status config_number(const struct config *config, const char *key, double *value);
/* true or false; leaves *value alone if absent or null. */
moe4_status config_truth(const struct config *config, const char *key, int *value);
/* *value points into the config. */
moe4_status config_string(const struct config *config, const char *key, const char **value);

/* context_fail with "config.json: KEY is VALUE, expected ..." (VALUE from the file, or "missing"). */
__attribute__((format(printf, 4, 5))) moe4_status config_fail(const struct config *config, moe4_status status,
                                                              const char *key, const char *format, ...);

#endif
