/* The JSON scanner and tree: what is JSON and what is not, decoded strings, numbers. */
#include "io_helpers.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "io/json.h"
#include "io/json_tree.h"

/* Scans a document to its end in memory of exactly its size; NULL or the error. */
static const char *scan_all(const char *text)
{
    size_t n_bytes = strlen(text);
    char *copy = malloc(n_bytes ? n_bytes : 1);
    assert_non_null(copy);
    memcpy(copy, text, n_bytes);
    struct json_scanner scanner = json_scan(copy, n_bytes);
    json_token token;
    while ((token = json_next(&scanner)) != JSON_END && token != JSON_ERROR) continue;
    if (token == JSON_ERROR) assert_int_equal(json_next(&scanner), JSON_ERROR);
    free(copy);
    return scanner.error;
}

static void test_accepts(void **state)
{
    static const char *const documents[] = {
        "{}",
        "[]",
        "0",
        "-0.5e+10",
        "1E5",
        "\"\"",
        "true",
        " [ ] ",
        "\t{\r\n\"a\" : [1 , 2,{\"b\":null}] , \"c\":false}\n",
        "\"\\\"\\\\\\/\\b\\f\\n\\r\\t\\u0041\\ud83d\\ude00\"",
        "\"\xc3\xa9 \xe2\x82\xac \xf0\x9f\x98\x80 \xed\x9f\xbf \xf4\x8f\xbf\xbf\"",
        "[[[[[[[[[[1]]]]]]]]]]",
    };
    (void)state;
    for (size_t i = 0; i < sizeof documents / sizeof *documents; i++) {
        const char *error = scan_all(documents[i]);
        if (error) fail_msg("%s: %s", documents[i], error);
    }
}

static void test_refuses(void **state)
{
    static const struct {
        const char *document, *error;
    } cases[] = {
        {"", "no value"},
        {"{", "no key"},
        {"[", "no value"},
        {"[1", "no ',' or ']'"},
        {"[1,", "no value"},
        {"[1,]", "no value"},
        {"[,1]", "no value"},
        {"[1 2]", "no ',' or ']'"},
        {"[1}", "no ',' or ']'"},
        {"{\"a\":1]", "no ',' or '}'"},
        {"{\"a\"}", "no ':'"},
        {"{\"a\":}", "no value"},
        {"{\"a\":1,}", "no key"},
        {"{1:2}", "no key"},
        {"{} {}", "text after the end"},
        {"1x", "text after the end"},
        {"]", "no value"},
        {"nul", "no value"},
        {"True", "no value"},
        {"NaN", "no value"},
        {"-", "no value"},
        {"+1", "no value"},
        {"01", "leading zero"},
        {"-00", "leading zero"},
        {".5", "no value"},
        {"1.", "fraction without"},
        {"1e", "exponent without"},
        {"1e+", "exponent without"},
        {"\"", "without an end"},
        {"\"a", "without an end"},
        {"\"\\", "without an end"},
        {"\"\\x\"", "unknown escape"},
        {"\"\\u12\"", "four hexadecimal"},
        {"\"\\u12g4\"", "four hexadecimal"},
        {"\"\\u000", "four hexadecimal"},
        {"\"\\u0000\"", "NUL"},
        {"\"\\ud800\"", "surrogate"},
        {"\"\\ud800\\u0041\"", "surrogate"},
        {"\"\\ud800\\ud8", "surrogate"},
        {"\"\\udc00\"", "surrogate"},
        {"\"a\nb\"", "control character"},
        {"\"\x80\"", "not UTF-8"},
        {"\"\xc1\x81\"", "not UTF-8"},
        {"\"\xe0\x80\x80\"", "not UTF-8"},
        {"\"\xed\xa0\x80\"", "not UTF-8"},
        {"\"\xf4\x90\x80\x80\"", "not UTF-8"},
        {"\"\xf5\x80\x80\x80\"", "not UTF-8"},
        {"\"\xf0\x8f\x80\x80\"", "not UTF-8"},
        {"\"\xe2\x82\"", "not UTF-8"},
        {"\"\xe2\x82", "not UTF-8"},
        {"\"\xff\"", "not UTF-8"},
        {"\xef\xbb\xbf{}", "no value"},
        {"/**/{}", "no value"},
    };
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const char *error = scan_all(cases[i].document);
        if (!error || !strstr(error, cases[i].error))
            fail_msg("%s: \"%s\" instead of \"%s\"", cases[i].document, error ? error : "accepted", cases[i].error);
    }
}

static void test_depth(void **state)
{
    char text[2 * JSON_MAX_DEPTH + 3] = {0};
    (void)state;
    for (int depth = JSON_MAX_DEPTH; depth <= JSON_MAX_DEPTH + 1; depth++) {
        memset(text, '[', (size_t)depth);
        memset(text + depth, ']', (size_t)depth);
        const char *error = scan_all(text);
        if (depth == JSON_MAX_DEPTH)
            assert_null(error);
        else
            assert_string_equal(error, "nesting deeper than 64");
    }
}

static void test_strings_are_decoded(void **state)
{
    char text[] = "[\"plain\", \"\\u0041\\n\\\"\\u00e9\\u20ac\\ud83D\\uDe00\xc3\xa9x\"]";
    struct json_scanner scanner = json_scan(text, sizeof text - 1);
    (void)state;
    assert_int_equal(json_next(&scanner), JSON_ARRAY);
    assert_int_equal(json_next(&scanner), JSON_STRING);
    assert_string_equal(scanner.token, "plain");
    assert_int_equal(json_next(&scanner), JSON_STRING);
    assert_string_equal(scanner.token, "A\n\"\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80\xc3\xa9x");
    assert_int_equal(scanner.token_bytes, strlen(scanner.token));
    assert_int_equal(json_next(&scanner), JSON_ARRAY_END);
    assert_int_equal(json_next(&scanner), JSON_END);
}

static void test_skip(void **state)
{
    char text[] = "{\"a\":[1,{\"b\":[]}],\"c\":2}";
    struct json_scanner scanner = json_scan(text, sizeof text - 1);
    (void)state;
    assert_int_equal(json_next(&scanner), JSON_OBJECT);
    assert_int_equal(json_next(&scanner), JSON_KEY);
    assert_true(json_skip(&scanner, json_next(&scanner)));
    assert_int_equal(json_next(&scanner), JSON_KEY);
    assert_string_equal(scanner.token, "c");
    assert_true(json_skip(&scanner, json_next(&scanner)));
    assert_int_equal(json_next(&scanner), JSON_OBJECT_END);
    char broken[] = "{\"a\":[1,{\"b\":[}]}";
    scanner = json_scan(broken, sizeof broken - 1);
    json_next(&scanner);
    json_next(&scanner);
    assert_false(json_skip(&scanner, json_next(&scanner)));
}

static void test_integers(void **state)
{
    static const struct {
        const char *text;
        int accepted;
        int64_t value;
    } cases[] = {
        {"0", 1, 0},
        {"7", 1, 7},
        {"9223372036854775807", 1, INT64_MAX},
        {"9223372036854775808", 0, 0},
        {"-0", 0, 0},
        {"-1", 0, 0},
        {"1.0", 0, 0},
        {"1e2", 0, 0},
        {"18446744073709551616", 0, 0},
        {"99999999999999999999999", 0, 0},
        {"", 0, 0},
    };
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        int64_t value = -1;
        assert_int_equal(json_integer(cases[i].text, strlen(cases[i].text), &value), cases[i].accepted);
        assert_true(value == (cases[i].accepted ? cases[i].value : -1));
    }
}

static void test_doubles(void **state)
{
    static const char *const exact[] = {"0",
                                        "-0",
                                        "7.0",
                                        "1.702",
                                        "-2.5e-3",
                                        "1E22",
                                        "123e-22",
                                        "0.001",
                                        "1e-5",
                                        "0.1e1",
                                        "9007199254740991",
                                        "1e0",
                                        "5.0e+2",
                                        "3.14159265358979",
                                        "000.5",
                                        "-0.000000000000001"};
    static const char *const close[] = {"123456789012345678901234567890", "1.7e308", "3e-200",
                                        "0.12345678901234567890123", "1e100"};
    (void)state;
    for (size_t i = 0; i < sizeof exact / sizeof *exact; i++) {
        double wanted = strtod(exact[i], NULL), got = json_double(exact[i], strlen(exact[i]));
        if (memcmp(&got, &wanted, sizeof got) != 0) fail_msg("%s is %.17g", exact[i], got);
    }
    for (size_t i = 0; i < sizeof close / sizeof *close; i++) {
        double wanted = strtod(close[i], NULL), got = json_double(close[i], strlen(close[i]));
        if (!(fabs(got - wanted) <= 4e-15 * wanted)) fail_msg("%s is %.17g", close[i], got);
    }
    assert_true(isinf(json_double("1e999999999999999999999", 23)));
    assert_true(json_double("1e-999999999999999999999", 24) == 0.0);
    assert_true(json_double("0e999", 5) == 0.0);
}

static void test_tree(void **state)
{
    struct test_context test;
    struct arena arena = {0};
    struct json_value *root;
    const char *error;
    size_t error_at;
    char text[] = "{\"a\": {\"b\": \"c\", \"d\": [1, true]}, \"e\": null}";
    (void)state;
    context_start(&test);
    const moe4_allocator *allocator = &test.context.allocator;
    assert_int_equal(json_tree(&arena, allocator, text, sizeof text - 1, &root, &error, &error_at), MOE4_OK);
    const struct json_value *a = json_member(root, "a", 1), *d = json_member(a, "d", 1);
    assert_string_equal(json_member(a, "b", 1)->text, "c");
    assert_int_equal(d->type, JSON_ARRAY);
    assert_int_equal(d->child->type, JSON_NUMBER);
    assert_int_equal(d->child->next->type, JSON_TRUE);
    assert_null(d->child->next->next);
    assert_int_equal(json_member(root, "e", 1)->type, JSON_NULL);
    assert_null(json_member(root, "b", 1));
    assert_null(json_member(d, "b", 1));
    assert_null(json_member(NULL, "b", 1));
    arena_release(&arena, allocator);

    char twice[] = "{\"a\": {\"b\": 1, \"c\": 2, \"\\u0062\": 3}}";
    assert_int_equal(json_tree(&arena, allocator, twice, sizeof twice - 1, &root, &error, &error_at), MOE4_EFORMAT);
    assert_string_equal(error, "a key for the second time");
    arena_release(&arena, allocator);
    char trailing[] = "{\"a\": 1} 2";
    assert_int_equal(json_tree(&arena, allocator, trailing, sizeof trailing - 1, &root, &error, &error_at),
                     MOE4_EFORMAT);
    arena_release(&arena, allocator);
    context_end(&test);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_accepts), cmocka_unit_test(test_refuses),
        cmocka_unit_test(test_depth),   cmocka_unit_test(test_strings_are_decoded),
        cmocka_unit_test(test_skip),    cmocka_unit_test(test_integers),
        cmocka_unit_test(test_doubles), cmocka_unit_test(test_tree),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
