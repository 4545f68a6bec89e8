#include "io/json.h"

#include <string.h>

struct json_scanner json_scan(char *text, size_t n_bytes)
{
    return (struct json_scanner){.text = text, .at = text, .end = text + n_bytes, .expect = JSON_EXPECT_VALUE};
}

static json_token fail(struct json_scanner *scanner, char *at, const char *error)
{
    scanner->at = at;
    scanner->error = error;
    return JSON_ERROR;
}

static void skip_space(struct json_scanner *scanner)
{
    char *at = scanner->at;
    while (at < scanner->end && (*at == ' ' || *at == '\n' || *at == '\r' || *at == '\t')) at++;
    scanner->at = at;
}

static int take(struct json_scanner *scanner, char c)
{
    if (scanner->at == scanner->end || *scanner->at != c) return 0;
    scanner->at++;
    return 1;
}

/* ---- Strings ----------------------------------------------------------------------------------------------------- */

size_t utf8_sequence(const char *at, const char *end)
{
    const unsigned char *byte = (const unsigned char *)at;
    unsigned lead = byte[0], low = 0x80, high = 0xBF; /* what the second byte may be */
    if (lead < 0x80) return 1;
    size_t length = lead < 0xC2 ? 0 : lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : lead < 0xF5 ? 4 : 0;
    if (!length || (size_t)(end - at) < length) return 0;
    if (lead == 0xE0) low = 0xA0;  /* shorter forms exist */
    if (lead == 0xED) high = 0x9F; /* surrogates */
    if (lead == 0xF0) low = 0x90;
    if (lead == 0xF4) high = 0x8F; /* past U+10FFFF */
    if (byte[1] < low || byte[1] > high) return 0;
    for (size_t i = 2; i < length; i++)
        if ((byte[i] & 0xC0) != 0x80) return 0;
    return length;
}

static char *utf8_encode(char *out, uint32_t code)
{
    if (code < 0x80) {
        *out++ = (char)code;
        return out;
    }
    static const uint32_t leads[] = {0, 0xC0, 0xE0, 0xF0};
    int rest = code < 0x800 ? 1 : code < 0x10000 ? 2 : 3; /* continuation bytes */
    *out++ = (char)(leads[rest] | code >> 6 * rest);
    while (rest--) *out++ = (char)(0x80u | (code >> 6 * rest & 0x3Fu));
    return out;
}

/* Four hexadecimal digits; -1 if they are not. */
static int32_t hex4(const char *at, const char *end)
{
    static const char digits[] = "0123456789abcdefABCDEF";
    int32_t value = 0;
    if (end - at < 4) return -1;
    for (int i = 0; i < 4; i++) {
        const char *digit = memchr(digits, at[i], sizeof digits - 1);
        if (!digit) return -1;
        int32_t index = (int32_t)(digit - digits);
        value = value << 4 | (index < 16 ? index : index - 6);
    }
    return value;
}

/* Decodes the \u escape at *read (or the two of a surrogate pair); NULL or what is wrong with it. */
static const char *decode_unicode(char **read, const char *end, char **write)
{
    int32_t code = hex4(*read + 2, end);
    if (code < 0) return "an escape without four hexadecimal digits";
    if (code == 0) return "a NUL character in a string";
    if (code >= 0xDC00 && code <= 0xDFFF) return "half of a surrogate pair";
    *read += 6;
    if (code >= 0xD800 && code <= 0xDBFF) {
        int32_t low = end - *read >= 6 && (*read)[0] == '\\' && (*read)[1] == 'u' ? hex4(*read + 2, end) : -1;
        if (low < 0xDC00 || low > 0xDFFF) return "half of a surrogate pair";
        *read += 6;
        code = 0x10000 + ((code - 0xD800) << 10 | (low - 0xDC00));
    }
    *write = utf8_encode(*write, (uint32_t)code);
    return NULL;
}

/* Decodes the escape whose backslash is at *read. */
static const char *decode_escape(char **read, const char *end, char **write)
{
    static const char letters[] = "\"\\/bfnrt", meanings[] = "\"\\/\b\f\n\r\t";
    if (end - *read < 2) return "a string without an end";
    if ((*read)[1] == 'u') return decode_unicode(read, end, write);
    const char *letter = memchr(letters, (*read)[1], sizeof letters - 1);
    if (!letter) return "an unknown escape";
    *(*write)++ = meanings[letter - letters];
    *read += 2;
    return NULL;
}

static int is_plain(char c)
{
    unsigned char byte = (unsigned char)c;
    return byte >= 0x20 && byte < 0x80 && byte != '"' && byte != '\\';
}

/* A string, decoded in place: what is written never overtakes what is read.  at is just after the opening quote. */
static json_token scan_string(struct json_scanner *scanner)
{
    char *read = scanner->at;
    while (read < scanner->end && is_plain(*read)) read++;
    char *write = read;
    for (;;) {
        if (read == scanner->end) return fail(scanner, read, "a string without an end");
        if (*read == '"') break;
        if (*read == '\\') {
            char *escape = read;
            const char *error = decode_escape(&read, scanner->end, &write);
            if (error) return fail(scanner, escape, error);
            continue;
        }
        if ((unsigned char)*read < 0x20) return fail(scanner, read, "a control character in a string");
        size_t length = utf8_sequence(read, scanner->end);
        if (!length) return fail(scanner, read, "a string that is not UTF-8");
        memmove(write, read, length);
        read += length;
        write += length;
    }
    *write = '\0';
    scanner->token = scanner->at;
    scanner->token_bytes = (size_t)(write - scanner->at);
    scanner->at = read + 1;
    return JSON_STRING;
}

/* ---- Numbers ----------------------------------------------------------------------------------------------------- */

static size_t n_digits(const char *at, const char *end)
{
    const char *start = at;
    while (at < end && *at >= '0' && *at <= '9') at++;
    return (size_t)(at - start);
}

static json_token scan_number(struct json_scanner *scanner)
{
    char *start = scanner->at;
    take(scanner, '-');
    size_t digits = n_digits(scanner->at, scanner->end);
    if (!digits) return fail(scanner, scanner->at, "no value");
    if (digits > 1 && *scanner->at == '0') return fail(scanner, scanner->at, "a number with a leading zero");
    scanner->at += digits;
    if (take(scanner, '.')) {
        digits = n_digits(scanner->at, scanner->end);
        if (!digits) return fail(scanner, scanner->at, "a fraction without digits");
        scanner->at += digits;
    }
    if (take(scanner, 'e') || take(scanner, 'E')) {
        if (!take(scanner, '+')) take(scanner, '-');
        digits = n_digits(scanner->at, scanner->end);
        if (!digits) return fail(scanner, scanner->at, "an exponent without digits");
        scanner->at += digits;
    }
    scanner->token = start;
    scanner->token_bytes = (size_t)(scanner->at - start);
    return JSON_NUMBER;
}

int json_integer(const char *token, size_t n_bytes, int64_t *value)
{
    int64_t result = 0;
    if (!n_bytes || n_digits(token, token + n_bytes) != n_bytes) return 0;
    for (size_t i = 0; i < n_bytes; i++)
        if (__builtin_mul_overflow(result, 10, &result) || __builtin_add_overflow(result, token[i] - '0', &result))
            return 0;
    *value = result;
    return 1;
}

/* Adds digits to a mantissa of at most 18 digits; later ones only move the exponent.  Returns the exponent's change. */
static int64_t add_digits(const char *digits, size_t n, int64_t *mantissa, int64_t each)
{
    int64_t exponent = 0;
    for (size_t i = 0; i < n; i++) {
        if (*mantissa < 100000000000000000) {
            *mantissa = *mantissa * 10 + (digits[i] - '0');
            exponent += each;
        } else {
            exponent += each + 1;
        }
    }
    return exponent;
}

/* 10^|exponent|, exact to 10^22. */
static double power_of_ten(int64_t exponent)
{
    double scale = 1.0, power = 10.0;
    for (int64_t steps = exponent < 0 ? -exponent : exponent; steps; steps >>= 1, power *= power)
        if (steps & 1) scale *= power;
    return scale;
}

double json_double(const char *token, size_t n_bytes)
{
    const char *at = token, *end = token + n_bytes;
    int negative = *at == '-';
    at += negative;
    int64_t mantissa = 0, written = 0;
    size_t digits = n_digits(at, end);
    int64_t exponent = add_digits(at, digits, &mantissa, 0);
    at += digits;
    if (at < end && *at == '.') {
        digits = n_digits(++at, end);
        exponent += add_digits(at, digits, &mantissa, -1);
        at += digits;
    }
    if (at < end) { /* e or E */
        int down = *++at == '-';
        at += *at == '-' || *at == '+';
        if (!json_integer(at, (size_t)(end - at), &written) || written > 100000) written = 100000;
        exponent += down ? -written : written;
    }
    double scale = power_of_ten(mantissa ? exponent : 0);
    double value = exponent < 0 ? (double)mantissa / scale : (double)mantissa * scale;
    return negative ? -value : value;
}

/* ---- Structure --------------------------------------------------------------------------------------------------- */

static json_token open_container(struct json_scanner *scanner, int is_object)
{
    if (scanner->depth == JSON_MAX_DEPTH) return fail(scanner, scanner->at - 1, "nesting deeper than 64");
    uint64_t bit = (uint64_t)1 << scanner->depth++;
    scanner->objects = is_object ? scanner->objects | bit : scanner->objects & ~bit;
    scanner->expect = is_object ? JSON_EXPECT_KEY_OR_END : JSON_EXPECT_ELEMENT_OR_END;
    return is_object ? JSON_OBJECT : JSON_ARRAY;
}

static json_token close_container(struct json_scanner *scanner, json_token token)
{
    scanner->depth--;
    scanner->expect = JSON_EXPECT_SEPARATOR;
    return token;
}

static json_token scan_word(struct json_scanner *scanner)
{
    static const struct {
        const char *word;
        json_token token;
    } words[] = {{"true", JSON_TRUE}, {"false", JSON_FALSE}, {"null", JSON_NULL}};
    for (size_t i = 0; i < sizeof words / sizeof *words; i++) {
        size_t length = strlen(words[i].word);
        if ((size_t)(scanner->end - scanner->at) < length || memcmp(scanner->at, words[i].word, length) != 0) continue;
        scanner->at += length;
        return words[i].token;
    }
    return scan_number(scanner);
}

static json_token scan_value(struct json_scanner *scanner)
{
    if (take(scanner, '{')) return open_container(scanner, 1);
    if (take(scanner, '[')) return open_container(scanner, 0);
    scanner->expect = JSON_EXPECT_SEPARATOR;
    if (take(scanner, '"')) return scan_string(scanner);
    return scan_word(scanner);
}

static json_token scan_key(struct json_scanner *scanner)
{
    if (!take(scanner, '"')) return fail(scanner, scanner->at, "no key");
    if (scan_string(scanner) == JSON_ERROR) return JSON_ERROR;
    skip_space(scanner);
    if (!take(scanner, ':')) return fail(scanner, scanner->at, "no ':' after a key");
    scanner->expect = JSON_EXPECT_VALUE;
    return JSON_KEY;
}

/* After a value: the end of the text, the end of the container, or a comma and what must follow it. */
static json_token scan_separator(struct json_scanner *scanner)
{
    if (!scanner->depth) {
        if (scanner->at == scanner->end) return JSON_END;
        return fail(scanner, scanner->at, "text after the end");
    }
    int in_object = scanner->objects >> (scanner->depth - 1) & 1;
    if (take(scanner, in_object ? '}' : ']'))
        return close_container(scanner, in_object ? JSON_OBJECT_END : JSON_ARRAY_END);
    if (!take(scanner, ',')) return fail(scanner, scanner->at, in_object ? "no ',' or '}'" : "no ',' or ']'");
    skip_space(scanner);
    return in_object ? scan_key(scanner) : scan_value(scanner);
}

json_token json_next(struct json_scanner *scanner)
{
    if (scanner->error) return JSON_ERROR;
    skip_space(scanner);
    switch (scanner->expect) {
    case JSON_EXPECT_KEY_OR_END:
        if (take(scanner, '}')) return close_container(scanner, JSON_OBJECT_END);
        return scan_key(scanner);
    case JSON_EXPECT_ELEMENT_OR_END:
        if (take(scanner, ']')) return close_container(scanner, JSON_ARRAY_END);
        return scan_value(scanner);
    case JSON_EXPECT_SEPARATOR: return scan_separator(scanner);
    default: return scan_value(scanner);
    }
}

int json_skip(struct json_scanner *scanner, json_token first)
{
    int depth = scanner->depth - (first == JSON_OBJECT || first == JSON_ARRAY);
    while (scanner->depth > depth)
        if (json_next(scanner) == JSON_ERROR) return 0;
    return first != JSON_ERROR;
}
