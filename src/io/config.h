/* config.json, and the questions that a model family asks of it.  Every answer that is not there, of the wrong type or
 * out of range is an error that names file, key and both values. */
#ifndef MOE4_IO_CONFIG_H
#define MOE4_IO_CONFIG_H

#include "io/file.h"
#include "io/json_tree.h"

struct config {
    moe4_context *context;
    const char *path;
    moe4_allocator allocator;
    struct file_text text;
    struct arena nodes;
    struct json_value *root;
};

/* path must outlive *config.  config_close is needed only after success. */
moe4_status config_open(moe4_context *context, const char *path, struct config *config);
void config_close(struct config *config);

/* Keys below name a value of the top level or, as "section.name", of an object in it. */

/* NULL if absent. */
const struct json_value *config_find(const struct config *config, const char *key);

moe4_status config_integer(const struct config *config, const char *key, int64_t least, int64_t most, int64_t *value);
/* Leaves *value alone if absent. */
moe4_status config_number(const struct config *config, const char *key, double *value);
/* *value points into the config. */
moe4_status config_string(const struct config *config, const char *key, const char **value);

/* context_fail with "config.json: KEY is VALUE, expected ..." (VALUE from the file, or "missing"). */
__attribute__((format(printf, 4, 5))) moe4_status config_fail(const struct config *config, moe4_status status,
                                                              const char *key, const char *format, ...);

#endif
