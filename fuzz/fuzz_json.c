/* JSON text, read as a stream of tokens, as a tree, and by jansson: all three must agree on what is JSON, and on the
 * numbers and strings in it. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "fuzz.h"
#include "io/json_tree.h"
#include "json_other.h"

/* ---- Tokens --------------------------------------------------------------------------------------------------------
 */

static void check_token(const struct json_scanner *scanner, json_token token)
{
    int has_text = token == JSON_KEY || token == JSON_STRING || token == JSON_NUMBER;
    FUZZ_CHECK(scanner->at >= scanner->text && scanner->at <= scanner->end);
    FUZZ_CHECK(scanner->depth >= 0 && scanner->depth <= JSON_MAX_DEPTH);
    if (!has_text) return;
    FUZZ_CHECK(scanner->token >= scanner->text && scanner->token + scanner->token_bytes <= scanner->at);
    if (token != JSON_NUMBER) FUZZ_CHECK(strlen(scanner->token) == scanner->token_bytes);
}

/* Whether the text is one JSON document; with skip the top value is passed over as a whole. */
static int scan(char *text, size_t n_bytes, int skip)
{
    struct json_scanner scanner = json_scan(text, n_bytes);
    json_token token = json_next(&scanner);
    check_token(&scanner, token);
    if (skip) {
        if (!json_skip(&scanner, token)) return 0;
        return json_next(&scanner) == JSON_END;
    }
    while (token != JSON_ERROR && token != JSON_END) {
        token = json_next(&scanner);
        check_token(&scanner, token);
    }
    FUZZ_CHECK((token == JSON_ERROR) == (scanner.error != NULL));
    return token == JSON_END;
}

/* ---- Against jansson -----------------------------------------------------------------------------------------------
 */

static void compare(const struct json_value *ours, const void *theirs);

static void compare_number(const struct json_value *ours, const void *theirs)
{
    int64_t integer;
    double value = json_double(ours->text, ours->n_bytes), expected = other_number(theirs);
    if (json_integer(ours->text, ours->n_bytes, &integer))
        FUZZ_CHECK(other_type(theirs) == OTHER_INTEGER && integer == other_integer(theirs));
    FUZZ_CHECK(fabs(value - expected) <= 4e-15 * fabs(expected) || fabs(expected) < 1e-290);
}

static void compare_members(const struct json_value *ours, const void *theirs)
{
    size_t n = 0;
    for (const struct json_value *member = ours->child; member; member = member->next, n++)
        if (ours->type == JSON_ARRAY) {
            compare(member, other_element(theirs, n));
        } else {
            FUZZ_CHECK(json_member(ours, member->key, strlen(member->key)) == member);
            compare(member, other_member(theirs, member->key));
        }
    FUZZ_CHECK(n == other_count(theirs));
}

static void compare(const struct json_value *ours, const void *theirs)
{
    static const enum other_type types[] = {
        [JSON_OBJECT] = OTHER_OBJECT, [JSON_ARRAY] = OTHER_ARRAY, [JSON_STRING] = OTHER_STRING,
        [JSON_TRUE] = OTHER_TRUE,     [JSON_FALSE] = OTHER_FALSE, [JSON_NULL] = OTHER_NULL};
    FUZZ_CHECK(theirs);
    if (ours->type == JSON_NUMBER) {
        compare_number(ours, theirs);
        return;
    }
    FUZZ_CHECK(other_type(theirs) == types[ours->type]);
    if (ours->type == JSON_STRING) FUZZ_CHECK(strcmp(ours->text, other_string(theirs)) == 0);
    if (ours->type == JSON_OBJECT || ours->type == JSON_ARRAY) compare_members(ours, theirs);
}

/* Either may be alone with its limits, ours being nesting deeper than 64. */
static void check_against_other(const struct json_value *root, const char *error, const uint8_t *data, size_t n_bytes)
{
    char reason[160];
    int is_limit;
    void *theirs = other_parse(data, n_bytes, reason, &is_limit);
    is_limit |= error && strstr(error, "nesting");
    if (theirs && root)
        compare(root, theirs);
    else if ((theirs || root) && !is_limit)
        fuzz_fail("we say \"%s\", jansson \"%s\"", error ? error : "yes", theirs ? "yes" : reason);
    other_release(theirs);
}

static void check_tree(moe4_context *context, char *text, const uint8_t *data, size_t n_bytes, int is_json)
{
    struct arena arena = {0};
    struct json_value *root = NULL;
    const char *error = NULL;
    size_t error_at = 0;
    memcpy(text, data, n_bytes);
    moe4_status status = json_tree(&arena, &context->allocator, text, n_bytes, &root, &error, &error_at);
    if (status != MOE4_ENOMEM) {
        FUZZ_CHECK((status == MOE4_OK) == (error == NULL) && error_at <= n_bytes);
        FUZZ_CHECK(is_json || status == MOE4_EFORMAT); /* a tree has no key twice, a stream may */
        check_against_other(status == MOE4_OK ? root : NULL, error, data, n_bytes);
    }
    arena_release(&arena, &context->allocator);
}

static void body(moe4_context *context, const uint8_t *data, size_t n_bytes)
{
    char *text = malloc(n_bytes ? n_bytes : 1);
    FUZZ_CHECK(text);
    memcpy(text, data, n_bytes);
    int is_json = scan(text, n_bytes, 0);
    memcpy(text, data, n_bytes);
    FUZZ_CHECK(scan(text, n_bytes, 1) == is_json);
    check_tree(context, text, data, n_bytes, is_json);
    free(text);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
    return fuzz_run(data, n_bytes, body);
}
