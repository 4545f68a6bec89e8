/* The points of moe4 bench as a picture: time against tokens, both logarithmic, a line a shape and its floor dashed. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "bench.h"
#include "command.h"
#include "svg.h"

enum {
    WIDTH = 760,
    HEIGHT = 500,
    LEFT = 72,
    RIGHT = 150,
    TOP = 56,
    BOTTOM = 56,
    OVERHANG = 8,    /* of a floor at both ends, so that one batch size has one that is seen */
    LABEL_WIDTH = 28 /* of a number of tokens; one that is nearer to the last has a line only */
};

/* Distinguishable in print and to most eyes. */
static const char *const colours[] = {"#1f4e79", "#b3541e", "#2e7d32", "#7b1fa2", "#b00020"};
enum { N_COLOURS = sizeof colours / sizeof *colours };

/* From logarithms to pixels. */
struct frame {
    double left, right, low, high; /* log10 of tokens and of ms */
};

static double frame_x(const struct frame *frame, double tokens)
{
    return LEFT + (log10(tokens) - frame->left) / (frame->right - frame->left) * (WIDTH - LEFT - RIGHT);
}

static double frame_y(const struct frame *frame, double ms)
{
    return HEIGHT - BOTTOM - (log10(ms) - frame->low) / (frame->high - frame->low) * (HEIGHT - TOP - BOTTOM);
}

/* Whole decades of time, and the tokens with a little air, more where there is one number of them only. */
static struct frame frame_of(const struct bench_series *series, int32_t n_series)
{
    struct frame frame = {HUGE_VAL, -HUGE_VAL, HUGE_VAL, -HUGE_VAL};
    for (int32_t s = 0; s < n_series; ++s)
        for (int32_t i = 0; i < series[s].n_points; ++i) {
            const struct point_summary *point = &series[s].points[i];
            frame.left = fmin(frame.left, log10((double)point->n_tokens));
            frame.right = fmax(frame.right, log10((double)point->n_tokens));
            frame.low = fmin(frame.low, log10(fmin(point->p10, point->floor_ms)));
            frame.high = fmax(frame.high, log10(fmax(point->p90, point->floor_ms)));
        }
    const double air = frame.right > frame.left ? 0.04 * (frame.right - frame.left) : 0.5;
    frame.left -= air;
    frame.right += air;
    frame.low = floor(frame.low);
    frame.high = fmax(ceil(frame.high), frame.low + 1);
    return frame;
}

static int compare_tokens(const void *a, const void *b)
{
    int64_t first = ((const struct point_summary *)a)->n_tokens, second = ((const struct point_summary *)b)->n_tokens;
    return (first > second) - (first < second);
}

static struct bench_series sorted(const struct bench_series *given)
{
    struct bench_series series = *given;
    qsort(series.points, (size_t)series.n_points, sizeof *series.points, compare_tokens);
    return series;
}

/* A line for each batch size, with its number where there is room. */
static void put_tokens(struct svg *svg, const struct frame *frame, const struct bench_series *given)
{
    const struct bench_series series = sorted(given);
    double last_label = -LABEL_WIDTH;
    for (int32_t i = 0; i < series.n_points; ++i) {
        const double x = frame_x(frame, (double)series.points[i].n_tokens);
        fprintf(svg->file, "<line x1=\"%.1f\" y1=\"%d\" x2=\"%.1f\" y2=\"%d\" stroke=\"#eee\"/>\n", x, TOP, x,
                HEIGHT - BOTTOM);
        if (x - last_label < LABEL_WIDTH) continue;
        fprintf(svg->file, "<text x=\"%.1f\" y=\"%d\" text-anchor=\"middle\">%lld</text>\n", x, HEIGHT - BOTTOM + 16,
                (long long)series.points[i].n_tokens);
        last_label = x;
    }
}

/* Every shape has the batch sizes of this one. */
static void put_axes(struct svg *svg, const struct frame *frame, const struct bench_series *series)
{
    const int bottom = HEIGHT - BOTTOM, right = WIDTH - RIGHT;
    for (int decade = (int)frame->low; decade <= (int)frame->high; ++decade)
        for (int digit = 1; digit < 10 && decade + log10(digit) <= frame->high + 1e-9; ++digit) {
            const double y = frame_y(frame, digit * pow(10, decade));
            fprintf(svg->file, "<line x1=\"%d\" y1=\"%.1f\" x2=\"%d\" y2=\"%.1f\" stroke=\"%s\"/>\n", LEFT, y, right, y,
                    digit == 1 ? "#bbb" : "#eee");
            if (digit == 1)
                fprintf(svg->file, "<text x=\"%d\" y=\"%.1f\" text-anchor=\"end\">%g</text>\n", LEFT - 8, y + 4,
                        pow(10, decade));
        }
    put_tokens(svg, frame, series);
    fprintf(svg->file,
            "<rect x=\"%d\" y=\"%d\" width=\"%d\" height=\"%d\" fill=\"none\" stroke=\"#888\"/>\n"
            "<text x=\"%d\" y=\"%d\" text-anchor=\"middle\">tokens</text>\n"
            "<text x=\"18\" y=\"%d\" text-anchor=\"middle\" transform=\"rotate(-90 18 %d)\">milliseconds</text>\n",
            LEFT, TOP, right - LEFT, bottom - TOP, (LEFT + right) / 2, bottom + 40, (TOP + bottom) / 2,
            (TOP + bottom) / 2);
}

static void put_line(struct svg *svg, const struct frame *frame, const struct bench_series *series, int is_floor,
                     const char *colour)
{
    fprintf(svg->file, "<polyline fill=\"none\" stroke=\"%s\" stroke-width=\"%s\"%s points=\"", colour,
            is_floor ? "1.2" : "1.8", is_floor ? " stroke-dasharray=\"5 4\"" : "");
    for (int32_t i = 0; i < series->n_points; ++i) {
        const struct point_summary *point = &series->points[i];
        const double x = frame_x(frame, (double)point->n_tokens);
        const double y = frame_y(frame, is_floor ? point->floor_ms : point->median);
        if (is_floor && i == 0) fprintf(svg->file, "%.1f,%.1f ", x - OVERHANG, y);
        fprintf(svg->file, "%.1f,%.1f ", x, y);
        if (is_floor && i == series->n_points - 1) fprintf(svg->file, "%.1f,%.1f", x + OVERHANG, y);
    }
    fprintf(svg->file, "\"/>\n");
}

/* The medians as dots with their spread from p10 to p90, and what they are when pointed at. */
static void put_points(struct svg *svg, const struct frame *frame, const struct bench_series *series,
                       const char *colour)
{
    for (int32_t i = 0; i < series->n_points; ++i) {
        const struct point_summary *point = &series->points[i];
        const double x = frame_x(frame, (double)point->n_tokens);
        fprintf(svg->file,
                "<line x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\" stroke=\"%s\"/>\n"
                "<circle cx=\"%.1f\" cy=\"%.1f\" r=\"3\" fill=\"%s\"><title>",
                x, frame_y(frame, point->p10), x, frame_y(frame, point->p90), colour, x, frame_y(frame, point->median),
                colour);
        svg_text(svg, series->shape);
        fprintf(svg->file, ", %lld tokens: %.4g ms, floor %.4g ms, ratio %.3f</title></circle>\n",
                (long long)point->n_tokens, point->median, point->floor_ms, point->ratio);
    }
}

static void put_series(struct svg *svg, const struct frame *frame, const struct bench_series *given, int32_t index)
{
    const char *colour = colours[index % N_COLOURS];
    const struct bench_series series = sorted(given);
    put_line(svg, frame, &series, 1, colour);
    put_line(svg, frame, &series, 0, colour);
    put_points(svg, frame, &series, colour);
    fprintf(svg->file, "<text x=\"%d\" y=\"%d\" fill=\"%s\">", WIDTH - RIGHT + 12, TOP + 16 + 18 * index, colour);
    svg_text(svg, series.shape);
    fprintf(svg->file, "</text>\n");
}

int bench_plot(const char *path, const char *title, const struct bench_series *series, int32_t n_series)
{
    const struct frame frame = frame_of(series, n_series);
    struct svg svg;
    int code = svg_open(&svg, path, WIDTH, HEIGHT);
    if (code) return code;
    fprintf(svg.file, "<text x=\"%d\" y=\"22\" font-size=\"14\">", LEFT);
    svg_text(&svg, title);
    fprintf(svg.file,
            "</text>\n<text x=\"%d\" y=\"40\">median of calls, p10 to p90; dashed: the least time that the "
            "measured machine allows</text>\n",
            LEFT);
    put_axes(&svg, &frame, series);
    for (int32_t s = 0; s < n_series; ++s) put_series(&svg, &frame, &series[s], s);
    return svg_close(&svg);
}
