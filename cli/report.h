/* What a person reads on stdout, and what a program does: fields, bars, human units, JSON. */
#ifndef MOE4_CLI_REPORT_H
#define MOE4_CLI_REPORT_H

#include <stdint.h>
#include <stdio.h>

#include <jansson.h>

/* A short text by value, for printf("%s", human_bytes(n).text). */
struct human {
    char text[32];
};

struct human human_bytes(double bytes);                     /* "430 MB" */
struct human human_milliseconds(double ms);                 /* "1.24 ms", "870 us" */
struct human human_count(double count);                     /* "12.3 k" */
struct human human_plural(int64_t count, const char *noun); /* "1 layer", "2 layers" */
struct human human_verdict(double ratio); /* worst ratio of a stage to its bound: "0.31 of the bound" */
struct human human_outcome(int good);     /* "ok" or "FAILED", coloured */

/* A line in bold. */
__attribute__((format(printf, 1, 2))) void report_title(const char *format, ...);

/* "  label        value", labels in one column. */
__attribute__((format(printf, 2, 3))) void report_field(const char *label, const char *format, ...);

/* Which experts the slots of a call went to: the busiest as bars, the rest in a sentence. */
void report_expert_load(const int64_t *load, int32_t n_experts);

/* Prints the object on a line of its own and releases it. */
void report_json(json_t *object);

/* Adds one value to an object. */
void json_put_text(json_t *object, const char *key, const char *value);
void json_put_integer(json_t *object, const char *key, int64_t value);
void json_put_real(json_t *object, const char *key, double value);
void json_put_truth(json_t *object, const char *key, int value);
void json_put_integers(json_t *object, const char *key, const int64_t *values, int64_t count);

/* Whether a stream is a terminal that wants more than plain lines. */
int terminal_is_live(FILE *stream);

#endif
