#include "options.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "command.h"
#include "message.h"

struct option option_operand(const char *name, const char **target, const char *help)
{
    return (struct option){.kind = OPTION_OPERAND, .name = name, .target = target, .help = help, .is_required = 1};
}

struct option option_flag(const char *name, int *target, const char *help)
{
    return (struct option){.kind = OPTION_FLAG, .name = name, .target = target, .help = help};
}

struct option option_text(const char *name, const char *value, const char **target, const char *help)
{
    return (struct option){.kind = OPTION_TEXT, .name = name, .value = value, .target = target, .help = help};
}

struct option option_word(const char *name, const char *const *words, int *target, const char *help)
{
    return (struct option){.kind = OPTION_WORD, .name = name, .target = target, .words = words, .help = help};
}

struct option option_words(const char *name, const char *const *words, struct integer_list *target, const char *help)
{
    return (struct option){.kind = OPTION_WORDS, .name = name, .target = target, .words = words, .help = help};
}

struct option option_integer(const char *name, const char *value, int64_t *target, int64_t low, int64_t high,
                             const char *help)
{
    return (struct option){
        .kind = OPTION_INTEGER, .name = name, .value = value, .target = target, .low = low, .high = high, .help = help};
}

struct option option_number(const char *name, const char *value, double *target, const char *help)
{
    return (struct option){.kind = OPTION_NUMBER, .name = name, .value = value, .target = target, .help = help};
}

struct option option_integers(const char *name, const char *value, struct integer_list *target, int64_t low,
                              int64_t high, const char *help)
{
    return (struct option){.kind = OPTION_INTEGERS,
                           .name = name,
                           .value = value,
                           .target = target,
                           .low = low,
                           .high = high,
                           .help = help};
}

struct option option_pair(const char *name, const char *value, struct integer_pair *target, int64_t low, int64_t high,
                          const char *help)
{
    return (struct option){
        .kind = OPTION_PAIR, .name = name, .value = value, .target = target, .low = low, .high = high, .help = help};
}

struct option option_required(struct option option)
{
    option.is_required = 1;
    return option;
}

/* ---- Values ------------------------------------------------------------------------------------------------------ */

/* A decimal integer that ends at `end` (NULL = at the end of the text).  Returns 0 if it is none in low..high. */
static int integer_parse(const char *text, const char *end, int64_t low, int64_t high, int64_t *value)
{
    char *stop;
    errno = 0;
    long long parsed = strtoll(text, &stop, 10);
    if (stop == text || errno || (end ? stop != end : *stop != '\0') || parsed < low || parsed > high) return 0;
    *value = parsed;
    return 1;
}

static int bad_integer(const struct option *option, const char *text, const char *expected)
{
    return fail_usage("%s: \"%s\" is not %s in %lld..%lld", option->name, text, expected, (long long)option->low,
                      (long long)option->high);
}

static int text_parse(const struct option *option, const char *text)
{
    *(const char **)option->target = text;
    return EXIT_OK;
}

/* The index of the word that is the first `length` characters of text; -1 after it has been refused. */
static int word_find(const struct option *option, const char *text, size_t length)
{
    char known[256] = "";
    for (int i = 0; option->words[i]; ++i) {
        if (strlen(option->words[i]) == length && !strncmp(option->words[i], text, length)) return i;
        size_t used = strlen(known);
        snprintf(known + used, sizeof known - used, "%s%s", i ? ", " : "", option->words[i]);
    }
    fail_usage("%s: \"%.*s\" is not one of %s", option->name, (int)length, text, known);
    return -1;
}

static int word_parse(const struct option *option, const char *text)
{
    int word = word_find(option, text, strlen(text));
    if (word < 0) return EXIT_USAGE;
    *(int *)option->target = word;
    return EXIT_OK;
}

static int words_parse(const struct option *option, const char *text)
{
    struct integer_list *list = option->target;
    int32_t capacity = (int32_t)(sizeof list->values / sizeof *list->values);
    list->count = 0;
    for (const char *item = text; item;) {
        const char *comma = strchr(item, ',');
        int word = word_find(option, item, comma ? (size_t)(comma - item) : strlen(item));
        if (word < 0) return EXIT_USAGE;
        if (list->count == capacity) return fail_usage("%s: more than %d words", option->name, (int)capacity);
        list->values[list->count++] = word;
        item = comma ? comma + 1 : NULL;
    }
    return EXIT_OK;
}

static int whole_integer_parse(const struct option *option, const char *text)
{
    if (integer_parse(text, NULL, option->low, option->high, option->target)) return EXIT_OK;
    return bad_integer(option, text, "a number");
}

static int number_parse(const struct option *option, const char *text)
{
    char *stop;
    double value = strtod(text, &stop);
    if (stop == text || *stop || !isfinite(value))
        return fail_usage("%s: \"%s\" is not a finite number", option->name, text);
    *(double *)option->target = value;
    return EXIT_OK;
}

static int integers_parse(const struct option *option, const char *text)
{
    struct integer_list *list = option->target;
    int32_t capacity = (int32_t)(sizeof list->values / sizeof *list->values);
    list->count = 0;
    for (const char *item = text; item;) {
        const char *comma = strchr(item, ',');
        if (list->count == capacity) return fail_usage("%s: more than %d numbers", option->name, (int)capacity);
        if (!integer_parse(item, comma, option->low, option->high, &list->values[list->count++]))
            return bad_integer(option, text, "a list (1,2,3) of numbers");
        item = comma ? comma + 1 : NULL;
    }
    return EXIT_OK;
}

static int pair_parse(const struct option *option, const char *text)
{
    struct integer_pair *pair = option->target;
    const char *colon = strchr(text, ':');
    if (colon && integer_parse(text, colon, option->low, option->high, &pair->first) &&
        integer_parse(colon + 1, NULL, option->low, option->high, &pair->second))
        return EXIT_OK;
    return bad_integer(option, text, "a pair (8:4) of numbers");
}

static int (*const value_parsers[])(const struct option *, const char *) = {
    [OPTION_OPERAND] = text_parse,
    [OPTION_TEXT] = text_parse,
    [OPTION_WORD] = word_parse,
    [OPTION_WORDS] = words_parse,
    [OPTION_INTEGER] = whole_integer_parse,
    [OPTION_NUMBER] = number_parse,
    [OPTION_INTEGERS] = integers_parse,
    [OPTION_PAIR] = pair_parse,
};

/* ---- Help -------------------------------------------------------------------------------------------------------- */

enum { HELP_WIDTH = 80, HELP_COLUMN = 28 };

/* Prints text from `column` on, wrapped between words, continued at HELP_COLUMN. */
static void help_print_wrapped(const char *text, int column)
{
    if (column >= HELP_COLUMN) {
        printf("\n");
        column = 0;
    }
    column += printf("%*s", HELP_COLUMN - column, "");
    for (const char *space = ""; *text; space = " ") {
        int length = (int)strcspn(text, " ");
        if (column + 1 + length > HELP_WIDTH) {
            column = printf("\n%*s", HELP_COLUMN, "") - 1;
            space = "";
        }
        column += printf("%s%.*s", space, length, text);
        text += length;
        text += *text == ' ';
    }
    printf("\n");
}

/* " one|two|three", continued after a | under the first word.  Returns the column reached. */
static int help_print_words(const char *const *words, int column)
{
    int indent = column + 1;
    column += printf(" ");
    for (int i = 0; words[i]; ++i) {
        if (i) column += printf("|");
        if (column + (int)strlen(words[i]) >= HELP_WIDTH) column = printf("\n%*s", indent, "") - 1;
        column += printf("%s", words[i]);
    }
    return column;
}

static void help_print_option(const struct option *option)
{
    int column = printf("  %s", option->name);
    if (option->value) column += printf(" %s", option->value);
    if (option->words) column = help_print_words(option->words, column);
    help_print_wrapped(option->help, column);
}

static void help_print(const struct usage *usage)
{
    printf("Usage: moe4 %s [options]", usage->verb);
    for (int32_t i = 0; i < usage->n_options; ++i)
        if (usage->options[i].kind == OPTION_OPERAND) printf(" %s", usage->options[i].name);
    printf("\n\n%s\n\n", usage->summary);
    for (int32_t i = 0; i < usage->n_options; ++i) help_print_option(&usage->options[i]);
    help_print_wrapped("print this and exit", printf("  --help"));
}

/* ---- Arguments --------------------------------------------------------------------------------------------------- */

enum { MAX_OPTIONS = 64 };

struct arguments {
    const struct usage *usage;
    int count;
    char **values;
    int next;                   /* the argument to look at next */
    int options_end;            /* 1 after "--" */
    uint8_t given[MAX_OPTIONS]; /* a row of the table each */
};

/* The row of the option whose name is the first `length` characters of argument; -1 if there is none. */
static int32_t option_find(const struct usage *usage, const char *argument, size_t length)
{
    for (int32_t i = 0; i < usage->n_options; ++i) {
        const char *name = usage->options[i].name;
        if (strlen(name) == length && !strncmp(name, argument, length)) return i;
    }
    return -1;
}

/* The row of the first operand not yet given; -1 if there is none. */
static int32_t operand_find(const struct arguments *arguments)
{
    for (int32_t i = 0; i < arguments->usage->n_options; ++i)
        if (arguments->usage->options[i].kind == OPTION_OPERAND && !arguments->given[i]) return i;
    return -1;
}

static int operand_take(struct arguments *arguments)
{
    const char *text = arguments->values[arguments->next++];
    int32_t row = operand_find(arguments);
    if (row < 0) return fail_usage("unexpected argument \"%s\"", text);
    arguments->given[row] = 1;
    return text_parse(&arguments->usage->options[row], text);
}

/* Takes "--name value", "--name=value" or "--flag". */
static int option_take(struct arguments *arguments)
{
    const struct usage *usage = arguments->usage;
    const char *argument = arguments->values[arguments->next++];
    size_t length = strcspn(argument, "=");
    const char *value = argument[length] ? argument + length + 1 : NULL;
    int32_t row = option_find(usage, argument, length);
    if (row < 0) return fail_usage("unknown option \"%.*s\" (see moe4 %s --help)", (int)length, argument, usage->verb);
    const struct option *option = &usage->options[row];
    arguments->given[row] = 1;
    if (option->kind == OPTION_FLAG) {
        if (value) return fail_usage("%s takes no value, but is given \"%s\"", option->name, value);
        *(int *)option->target = 1;
        return EXIT_OK;
    }
    if (!value && arguments->next == arguments->count) return fail_usage("%s needs a value", option->name);
    if (!value) value = arguments->values[arguments->next++];
    return value_parsers[option->kind](option, value);
}

static int argument_take(struct arguments *arguments)
{
    const char *argument = arguments->values[arguments->next];
    if (arguments->options_end || argument[0] != '-') return operand_take(arguments);
    if (strcmp(argument, "--")) return option_take(arguments);
    arguments->options_end = 1;
    ++arguments->next;
    return EXIT_OK;
}

int options_parse(const struct usage *usage, int argc, char **argv, int *status)
{
    struct arguments arguments = {.usage = usage, .count = argc, .values = argv, .next = 1};
    *status = EXIT_OK;
    while (*status == EXIT_OK && arguments.next < argc) {
        if (!arguments.options_end && !strcmp(argv[arguments.next], "--help")) {
            help_print(usage);
            return 0;
        }
        *status = argument_take(&arguments);
    }
    for (int32_t i = 0; *status == EXIT_OK && i < usage->n_options; ++i)
        if (usage->options[i].is_required && !arguments.given[i])
            *status = fail_usage("%s is missing (see moe4 %s --help)", usage->options[i].name, usage->verb);
    return *status == EXIT_OK;
}
