#include "io/pattern.h"

#include <string.h>

enum { MAX_INSTRUCTIONS = 512, MAX_DEPTH = 16, SET_WORDS = 4 };

/* Jumps are relative, so that code can be moved. */
enum operation { OP_SET, OP_SPLIT, OP_JUMP, OP_BEGIN, OP_END, OP_MATCH };
struct instruction {
    enum operation operation;
    int32_t to, other;       /* JUMP, SPLIT */
    uint64_t set[SET_WORDS]; /* SET: one bit for each byte that it takes */
};

/* ---- Reading ----------------------------------------------------------------------------------------------------- */

struct parser {
    const char *at;
    struct instruction *code;
    int32_t n, depth;
    int failed;               /* something that is not read, or too long */
    int is_alternative;       /* no needle is in all of them */
    const char *run, *needle; /* of characters outside of all parentheses that follow each other */
    size_t run_bytes, needle_bytes;
};

static struct instruction *emit(struct parser *parser, int32_t at, enum operation operation)
{
    if (parser->n == MAX_INSTRUCTIONS) {
        parser->failed = 1;
        at = parser->n - 1; /* somewhere that can be written */
    } else {
        memmove(parser->code + at + 1, parser->code + at, (size_t)(parser->n - at) * sizeof *parser->code);
        parser->n++;
    }
    parser->code[at] = (struct instruction){.operation = operation};
    return &parser->code[at];
}

static void set_add(uint64_t *set, unsigned char first, unsigned char last)
{
    for (unsigned c = first; c <= last; c++) set[c / 64] |= (uint64_t)1 << c % 64;
}

static void set_invert(uint64_t *set)
{
    for (int i = 0; i < SET_WORDS; i++) set[i] = ~set[i];
}

/* \d and its like, or the character itself; 0 for what is not read. */
static int set_add_escape(uint64_t *set, char letter)
{
    uint64_t class[SET_WORDS] = {0};
    switch (letter | 0x20) {
    case 'd': set_add(class, '0', '9'); break;
    case 'w':
        set_add(class, '0', '9');
        set_add(class, 'a', 'z');
        set_add(class, 'A', 'Z');
        set_add(class, '_', '_');
        break;
    case 's':
        set_add(class, '\t', '\r');
        set_add(class, ' ', ' ');
        break;
    default:
        if (!letter || (letter >= '0' && letter <= '9') || ((letter | 0x20) >= 'a' && (letter | 0x20) <= 'z')) return 0;
        set_add(class, (unsigned char)letter, (unsigned char)letter);
        letter = 'x';
    }
    if (!(letter & 0x20)) set_invert(class); /* \D \W \S */
    for (int i = 0; i < SET_WORDS; i++) set[i] |= class[i];
    return 1;
}

/* [...], behind the bracket. */
static void parse_set(struct parser *parser)
{
    uint64_t *set = emit(parser, parser->n, OP_SET)->set;
    int inverted = *parser->at == '^';
    parser->at += inverted;
    for (int first = 1; first || *parser->at != ']'; first = 0) {
        unsigned char low = (unsigned char)*parser->at++, high = low;
        if (!low) {
            parser->failed = 1;
            parser->at--;
            return;
        }
        if (low == '\\') {
            if (!set_add_escape(set, *parser->at)) parser->failed = 1;
            if (*parser->at) parser->at++;
            continue;
        }
        if (parser->at[0] == '-' && parser->at[1] && parser->at[1] != ']') {
            high = (unsigned char)parser->at[1];
            parser->at += 2;
            if (high < low || high == '\\') parser->failed = 1;
        }
        set_add(set, low, high);
    }
    parser->at++;
    if (inverted) set_invert(set);
}

static void end_run(struct parser *parser)
{
    if (parser->run_bytes > parser->needle_bytes) {
        parser->needle = parser->run;
        parser->needle_bytes = parser->run_bytes;
    }
    parser->run_bytes = 0;
}

static void parse_alternatives(struct parser *parser);

/* (...), behind the parenthesis. */
static void parse_group(struct parser *parser)
{
    if (parser->at[0] == '?') {
        if (parser->at[1] != ':') parser->failed = 1; /* (?=...) and the like */
        parser->at += parser->at[1] ? 2 : 1;
    }
    if (++parser->depth > MAX_DEPTH) parser->failed = 1;
    if (!parser->failed) parse_alternatives(parser);
    parser->depth--;
    if (*parser->at == ')')
        parser->at++;
    else
        parser->failed = 1;
}

/* One thing that can be repeated.  Returns it if it is a plain character, else NULL. */
static const char *parse_atom(struct parser *parser)
{
    const char *character = parser->at++;
    switch (*character) {
    case '(': parse_group(parser); return NULL;
    case '[': parse_set(parser); return NULL;
    case '^': emit(parser, parser->n, OP_BEGIN); return NULL;
    case '$': emit(parser, parser->n, OP_END); return NULL;
    case '.': set_invert(emit(parser, parser->n, OP_SET)->set); return NULL;
    case '\\':
        if (!set_add_escape(emit(parser, parser->n, OP_SET)->set, *parser->at)) parser->failed = 1;
        if (*parser->at) parser->at++;
        return NULL;
    case '*':
    case '+':
    case '?':
    case '{':
    case '}': parser->failed = 1; return NULL;
    default:
        set_add(emit(parser, parser->n, OP_SET)->set, (unsigned char)*character, (unsigned char)*character);
        return character;
    }
}

/* * + ? behind what began at instruction `first`. */
static void parse_repeat(struct parser *parser, int32_t first)
{
    char kind = *parser->at++;
    int32_t length = parser->n - first;
    struct instruction *split;
    if (*parser->at == '?') parser->at++; /* lazy: the same names */
    if (*parser->at == '+') parser->failed = 1;
    switch (kind) {
    case '+':
        split = emit(parser, parser->n, OP_SPLIT);
        split->to = -length;
        split->other = 1;
        break;
    case '*':
        emit(parser, parser->n, OP_JUMP)->to = -length - 1;
        split = emit(parser, first, OP_SPLIT);
        split->to = 1;
        split->other = length + 2;
        break;
    default:
        split = emit(parser, first, OP_SPLIT);
        split->to = 1;
        split->other = length + 1;
    }
}

static void parse_sequence(struct parser *parser)
{
    while (*parser->at && *parser->at != '|' && *parser->at != ')' && !parser->failed) {
        int32_t first = parser->n;
        const char *character = parse_atom(parser);
        int repeated = *parser->at == '*' || *parser->at == '+' || *parser->at == '?';
        if (repeated) parse_repeat(parser, first);
        if (parser->depth) continue;
        if (!character || repeated) {
            end_run(parser);
        } else {
            if (!parser->run_bytes) parser->run = character;
            parser->run_bytes++;
        }
    }
}

static void parse_alternatives(struct parser *parser)
{
    int32_t first = parser->n;
    parse_sequence(parser);
    while (*parser->at == '|' && !parser->failed) {
        int32_t length = parser->n - first;
        parser->at++;
        struct instruction *split = emit(parser, first, OP_SPLIT);
        split->to = 1;
        split->other = length + 2;
        int32_t jump = parser->n;
        emit(parser, jump, OP_JUMP);
        parse_sequence(parser);
        parser->code[jump].to = parser->n - jump;
        if (!parser->depth) parser->is_alternative = 1;
    }
}

static int read_regex(struct arena *arena, const moe4_allocator *allocator, struct pattern *pattern)
{
    struct instruction code[MAX_INSTRUCTIONS];
    struct parser parser = {.at = pattern->text + 3, .code = code};
    parse_alternatives(&parser);
    emit(&parser, parser.n, OP_MATCH);
    end_run(&parser);
    if (parser.failed || *parser.at) return 1; /* UNREAD */
    size_t bytes = (size_t)parser.n * sizeof *code;
    pattern->program = arena_allocate(arena, allocator, bytes);
    if (!pattern->program) return 0;
    memcpy(pattern->program, code, bytes);
    pattern->n_instructions = parser.n;
    pattern->kind = PATTERN_REGEX;
    if (!parser.is_alternative) {
        pattern->needle = parser.needle;
        pattern->needle_bytes = parser.needle_bytes;
    }
    return 1;
}

int pattern_read(struct arena *arena, const moe4_allocator *allocator, const char *text, struct pattern *pattern)
{
    *pattern = (struct pattern){.kind = strchr(text, '*') ? PATTERN_GLOB : PATTERN_NAME, .text = text};
    if (strncmp(text, "re:", 3) != 0) return 1;
    pattern->kind = PATTERN_UNREAD;
    return read_regex(arena, allocator, pattern);
}

/* ---- Matching ---------------------------------------------------------------------------------------------------- */

static int glob_matches(const char *pattern, const char *name, size_t n_bytes)
{
    const char *end = name + n_bytes, *star = NULL, *retry = NULL;
    while (name < end || *pattern) {
        if (*pattern == '*') {
            star = pattern++;
            retry = name;
        } else if (name < end && *pattern == *name) {
            pattern++;
            name++;
        } else if (star && retry < end) {
            pattern = star + 1;
            name = ++retry;
        } else {
            return 0;
        }
    }
    return 1;
}

/* Instructions that wait for the next byte, each once. */
struct threads {
    uint16_t at[MAX_INSTRUCTIONS];
    int32_t n;
    uint64_t seen[MAX_INSTRUCTIONS / 64];
};

/* Follows everything that takes no byte; 1 if that ends the match. */
static int add_thread(const struct pattern *pattern, struct threads *threads, int32_t first, int at_begin, int at_end)
{
    uint16_t stack[2 * MAX_INSTRUCTIONS];
    int32_t n = 0;
    stack[n++] = (uint16_t)first;
    while (n) {
        int32_t i = stack[--n];
        const struct instruction *instruction = &pattern->program[i];
        if (threads->seen[i / 64] >> i % 64 & 1) continue;
        threads->seen[i / 64] |= (uint64_t)1 << i % 64;
        switch (instruction->operation) {
        case OP_MATCH: return 1;
        case OP_SET: threads->at[threads->n++] = (uint16_t)i; break;
        case OP_SPLIT: stack[n++] = (uint16_t)(i + instruction->other); /* fallthrough */
        case OP_JUMP: stack[n++] = (uint16_t)(i + instruction->to); break;
        case OP_BEGIN:
            if (at_begin) stack[n++] = (uint16_t)(i + 1);
            break;
        case OP_END:
            if (at_end) stack[n++] = (uint16_t)(i + 1);
            break;
        }
    }
    return 0;
}

static int regex_matches(const struct pattern *pattern, const char *name, size_t n_bytes)
{
    struct threads threads = {.n = 0}, next;
    if (pattern->needle_bytes && !memmem(name, n_bytes, pattern->needle, pattern->needle_bytes)) return 0;
    if (add_thread(pattern, &threads, 0, 1, !n_bytes)) return 1;
    for (size_t k = 0; k < n_bytes && threads.n; k++) {
        unsigned char byte = (unsigned char)name[k];
        next.n = 0;
        memset(next.seen, 0, sizeof next.seen);
        for (int32_t t = 0; t < threads.n; t++) {
            const struct instruction *instruction = &pattern->program[threads.at[t]];
            if (instruction->set[byte / 64] >> byte % 64 & 1 &&
                add_thread(pattern, &next, threads.at[t] + 1, 0, k + 1 == n_bytes))
                return 1;
        }
        threads.n = next.n;
        memcpy(threads.at, next.at, (size_t)next.n * sizeof *next.at);
    }
    return 0;
}

int pattern_matches(const struct pattern *pattern, const char *name, size_t n_bytes)
{
    switch (pattern->kind) {
    case PATTERN_NAME: return strlen(pattern->text) == n_bytes && memcmp(pattern->text, name, n_bytes) == 0;
    case PATTERN_GLOB: return glob_matches(pattern->text, name, n_bytes);
    case PATTERN_REGEX: return regex_matches(pattern, name, n_bytes);
    default: return 0;
    }
}
