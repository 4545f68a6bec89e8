#include "io/json_tree.h"

#include <string.h>

#include "io/names.h"

struct builder {
    struct arena *arena;
    const moe4_allocator *allocator;
    struct json_scanner scanner;
};

static moe4_status build_value(struct builder *builder, json_token token, const char *key, struct json_value **value);

/* The members after an opening bracket, down to the closing one.  Recursion is bounded by JSON_MAX_DEPTH. */
static moe4_status build_members(struct builder *builder, struct json_value *container, struct names *keys)
{
    struct json_scanner *scanner = &builder->scanner;
    struct json_value **tail = &container->child;
    for (json_token token = json_next(scanner);; token = json_next(scanner)) {
        const char *key = NULL;
        if (token == JSON_OBJECT_END || token == JSON_ARRAY_END) return MOE4_OK;
        if (token == JSON_KEY) {
            key = scanner->token;
            int64_t entered = names_add(keys, builder->allocator, key, scanner->token - scanner->text);
            if (entered == NAMES_NO_MEMORY) return MOE4_ENOMEM;
            if (entered != scanner->token - scanner->text) {
                scanner->error = "a key for the second time";
                return MOE4_EFORMAT;
            }
            token = json_next(scanner);
        }
        moe4_status status = build_value(builder, token, key, tail);
        if (status != MOE4_OK) return status;
        tail = &(*tail)->next;
    }
}

static moe4_status build_value(struct builder *builder, json_token token, const char *key, struct json_value **value)
{
    struct json_scanner *scanner = &builder->scanner;
    if (token == JSON_ERROR) return MOE4_EFORMAT;
    struct json_value *node = arena_allocate(builder->arena, builder->allocator, sizeof *node);
    if (!node) return MOE4_ENOMEM;
    *node = (struct json_value){.type = token, .key = key};
    *value = node;
    if (token == JSON_STRING || token == JSON_NUMBER) {
        node->text = scanner->token;
        node->n_bytes = scanner->token_bytes;
    }
    if (token != JSON_OBJECT && token != JSON_ARRAY) return MOE4_OK;
    struct names keys = {0};
    moe4_status status = build_members(builder, node, &keys);
    names_release(&keys, builder->allocator);
    return status;
}

moe4_status json_tree(struct arena *arena, const moe4_allocator *allocator, char *text, size_t n_bytes,
                      struct json_value **root, const char **error, size_t *error_at)
{
    struct builder builder = {arena, allocator, json_scan(text, n_bytes)};
    moe4_status status = build_value(&builder, json_next(&builder.scanner), NULL, root);
    if (status == MOE4_OK && json_next(&builder.scanner) != JSON_END) status = MOE4_EFORMAT;
    *error = builder.scanner.error;
    *error_at = (size_t)(builder.scanner.at - builder.scanner.text);
    return status;
}

const struct json_value *json_member(const struct json_value *object, const char *key, size_t n_bytes)
{
    if (!object || object->type != JSON_OBJECT) return NULL;
    for (const struct json_value *member = object->child; member; member = member->next)
        if (strlen(member->key) == n_bytes && memcmp(member->key, key, n_bytes) == 0) return member;
    return NULL;
}
