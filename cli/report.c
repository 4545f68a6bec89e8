#include "report.h"

#include <langinfo.h>
#include <locale.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int terminal_is_live(FILE *stream)
{
    const char *term = getenv("TERM");
    return isatty(fileno(stream)) && term && strcmp(term, "dumb");
}

/* An escape sequence where colour is wanted (https://no-color.org), else nothing. */
static const char *colour(const char *sequence)
{
    const char *refused = getenv("NO_COLOR");
    return terminal_is_live(stdout) && !(refused && *refused) ? sequence : "";
}

/* value with three significant digits and the largest unit that leaves it >= 1. */
static struct human human_scaled(double value, const char *const *units, int n_units, double step)
{
    int unit = 0;
    while (unit + 1 < n_units && value >= step * 0.9995) {
        value /= step;
        ++unit;
    }
    struct human result;
    int digits = value >= 99.95 ? 0 : value >= 9.995 ? 1 : 2;
    if (unit == 0 && value == (double)(int64_t)value) digits = 0;
    snprintf(result.text, sizeof result.text, "%.*f%s", digits, value, units[unit]);
    return result;
}

struct human human_bytes(double bytes)
{
    static const char *const units[] = {" B", " kB", " MB", " GB", " TB"};
    return human_scaled(bytes, units, 5, 1000);
}

struct human human_plural(int64_t count, const char *noun)
{
    struct human result;
    snprintf(result.text, sizeof result.text, "%lld %s%s", (long long)count, noun, count == 1 ? "" : "s");
    return result;
}

struct human human_milliseconds(double ms)
{
    static const char *const units[] = {" us", " ms", " s"};
    return human_scaled(ms * 1000, units, 3, 1000);
}

struct human human_count(double count)
{
    static const char *const units[] = {"", " k", " M", " G", " T"};
    return human_scaled(count, units, 5, 1000);
}

struct human human_verdict(double ratio)
{
    struct human result;
    if (ratio == 0)
        snprintf(result.text, sizeof result.text, "exact");
    else if (ratio > 1e9)
        snprintf(result.text, sizeof result.text, "wrong");
    else
        snprintf(result.text, sizeof result.text, "%.2g of the bound", ratio);
    return result;
}

void report_title(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    printf("%s", colour("\033[1m"));
    vprintf(format, arguments);
    printf("%s\n", colour("\033[0m"));
    va_end(arguments);
}

void report_field(const char *label, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    printf("  %s%-12s%s ", colour("\033[2m"), label, colour("\033[0m"));
    vprintf(format, arguments);
    printf("\n");
    va_end(arguments);
}

struct human human_outcome(int good)
{
    struct human result;
    snprintf(result.text, sizeof result.text, "%s%s%s", colour(good ? "\033[32m" : "\033[1;31m"),
             good ? "ok" : "FAILED", colour("\033[0m"));
    return result;
}

/* ---- Expert load ------------------------------------------------------------------------------------------------- */

enum { LOAD_BARS = 12, LOAD_BAR_WIDTH = 40 };

/* A bar of `width` cells, in block characters where the terminal's character set has them. */
static void bar_print(int width)
{
    static const char *cell;
    if (!cell) {
        setlocale(LC_CTYPE, "");
        cell = strcmp(nl_langinfo(CODESET), "UTF-8") ? "#" : "\xE2\x96\x87";
    }
    printf("%s", colour("\033[36m"));
    for (int i = 0; i < width; ++i) printf("%s", cell);
    printf("%s", colour("\033[0m"));
}

/* The busiest expert that comes after `previous` in descending order of load, ascending id; -1 at the end. */
static int32_t load_next(const int64_t *load, int32_t n_experts, int32_t previous)
{
    int32_t best = -1;
    for (int32_t e = 0; e < n_experts; ++e) {
        int later = previous < 0 || load[e] < load[previous] || (load[e] == load[previous] && e > previous);
        if (later && (best < 0 || load[e] > load[best])) best = e;
    }
    return best;
}

void report_expert_load(const int64_t *load, int32_t n_experts)
{
    int64_t total = 0, busiest = 0;
    int32_t n_used = 0;
    for (int32_t e = 0; e < n_experts; ++e) {
        total += load[e];
        n_used += load[e] > 0;
        if (load[e] > busiest) busiest = load[e];
    }
    report_field("expert load", "%lld rows on %d of %d experts", (long long)total, n_used, n_experts);
    int64_t shown = 0;
    int32_t n_shown = 0;
    for (int32_t e = load_next(load, n_experts, -1); e >= 0 && load[e] > 0 && n_shown < LOAD_BARS;
         e = load_next(load, n_experts, e)) {
        int width = (int)((load[e] * LOAD_BAR_WIDTH + busiest / 2) / busiest);
        printf("  %12d ", e);
        bar_print(width);
        printf("%*s %6lld %5.1f %%\n", LOAD_BAR_WIDTH - width, "", (long long)load[e],
               100.0 * (double)load[e] / (double)total);
        shown += load[e];
        ++n_shown;
    }
    if (n_used > n_shown)
        report_field("", "and %d more with %.1f %%", n_used - n_shown, 100.0 * (double)(total - shown) / (double)total);
}

/* ---- JSON -------------------------------------------------------------------------------------------------------- */

void report_json(json_t *object)
{
    json_dumpf(object, stdout, JSON_COMPACT | JSON_REAL_PRECISION(7));
    putchar('\n');
    fflush(stdout);
    json_decref(object);
}

void json_put_text(json_t *object, const char *key, const char *value)
{
    json_object_set_new(object, key, json_string(value));
}

void json_put_integer(json_t *object, const char *key, int64_t value)
{
    json_object_set_new(object, key, json_integer(value));
}

void json_put_real(json_t *object, const char *key, double value)
{
    json_object_set_new(object, key, json_real(value));
}

void json_put_truth(json_t *object, const char *key, int value)
{
    json_object_set_new(object, key, json_boolean(value));
}

void json_put_integers(json_t *object, const char *key, const int64_t *values, int64_t count)
{
    json_t *array = json_array();
    for (int64_t i = 0; i < count; ++i) json_array_append_new(array, json_integer(values[i]));
    json_object_set_new(object, key, array);
}
