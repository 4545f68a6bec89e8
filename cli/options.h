/* Command-line options as a table: parsing, error messages and --help all come from it. */
#ifndef MOE4_CLI_OPTIONS_H
#define MOE4_CLI_OPTIONS_H

#include <stdint.h>

struct integer_list {
    int32_t count;
    int64_t values[64];
};

struct integer_pair {
    int64_t first, second;
};

typedef enum option_kind {
    OPTION_OPERAND, /* an argument without dashes; required */
    OPTION_FLAG,
    OPTION_TEXT,
    OPTION_WORD,
    OPTION_WORDS,
    OPTION_INTEGER,
    OPTION_NUMBER,
    OPTION_INTEGERS,
    OPTION_PAIR
} option_kind;

struct option {
    option_kind kind;
    const char *name;         /* "--tokens"; of an operand "PATH" */
    const char *value;        /* its placeholder in the help: "T" */
    void *target;             /* of the type that the kind's function below takes; untouched when not given */
    int64_t low, high;        /* INTEGER, INTEGERS, PAIR */
    const char *const *words; /* WORD, WORDS: NULL-terminated */
    const char *help;
    int is_required;
};

/* The same row, but the command line must have it. */
struct option option_required(struct option option);

/* Rows of the table, one function a kind so that targets are type-checked. */
struct option option_operand(const char *name, const char **target, const char *help);
struct option option_flag(const char *name, int *target, const char *help); /* sets 1 */
struct option option_text(const char *name, const char *value, const char **target, const char *help);
struct option option_word(const char *name, const char *const *words, int *target,
                          const char *help); /* index of the word */
struct option option_words(const char *name, const char *const *words, struct integer_list *target,
                           const char *help); /* their indices: word,word */
struct option option_integer(const char *name, const char *value, int64_t *target, int64_t low, int64_t high,
                             const char *help);
struct option option_number(const char *name, const char *value, double *target, const char *help); /* finite */
struct option option_integers(const char *name, const char *value, struct integer_list *target, int64_t low,
                              int64_t high, const char *help); /* 1,2,3 */
struct option option_pair(const char *name, const char *value, struct integer_pair *target, int64_t low, int64_t high,
                          const char *help); /* 8:4 */

struct usage {
    const char *verb, *summary;
    const struct option *options;
    int32_t n_options;
};

/* Parses argv[1..].  Returns 1 to go on; 0 when the command is done, with *status its exit status: after --help, or
 * after a mistake that has been reported. */
int options_parse(const struct usage *usage, int argc, char **argv, int *status);

#endif
