/* The scale histograms of all layers as a picture: a row a layer, a column a scale, darker where more blocks have it.
 */
#include <math.h>
#include <stdio.h>

#include "command.h"
#include "health.h"
#include "svg.h"

enum { LEFT = 64, TOP = 56, CELL_W = 14, CELL_H = 14, RIGHT = 24, BOTTOM = 48, LOWEST_WIDTH = 420 };

struct span {
    int first, last; /* scale bytes in use; 0 is that of blocks of zeros */
};

static struct span span_of(const struct health *health)
{
    struct span span = {254, 1};
    for (int32_t i = 0; i < health->n_layers; ++i)
        for (int byte = 1; byte < 255; ++byte) {
            if (!health->layers[i].scales[byte]) continue;
            span.first = byte < span.first ? byte : span.first;
            span.last = byte > span.last ? byte : span.last;
        }
    return span.first > span.last ? (struct span){127, 127} : span;
}

/* Logarithmic: one block in a million is still seen. */
static void put_layer(FILE *file, const struct layer_health *layer, struct span span, int y)
{
    fprintf(file, "<text x=\"%d\" y=\"%d\" text-anchor=\"end\">%d</text>\n", LEFT - 8, y + CELL_H - 3, layer->layer);
    for (int byte = span.first; byte <= span.last; ++byte) {
        if (!layer->scales[byte]) continue;
        double share = (double)layer->scales[byte] / (double)layer->n_blocks, depth = 1 + log10(share) / 6;
        fprintf(file,
                "<rect x=\"%d\" y=\"%d\" width=\"%d\" height=\"%d\" fill=\"#1f4e79\" fill-opacity=\"%.3f\">"
                "<title>layer %d, 2^%d: %.4g%%</title></rect>\n",
                LEFT + (byte - span.first) * CELL_W, y, CELL_W - 1, CELL_H - 1, depth < 0.06 ? 0.06 : depth,
                layer->layer, byte - 127, 100 * share);
    }
    if (layer->scales[255])
        fprintf(file, "<text x=\"%d\" y=\"%d\" fill=\"#b00020\">NaN: %lld</text>\n",
                LEFT + (span.last - span.first + 1) * CELL_W + 6, y + CELL_H - 3, (long long)layer->scales[255]);
}

static void put_axis(FILE *file, struct span span, int y)
{
    for (int byte = span.first; byte <= span.last; ++byte)
        if ((byte - 127) % 5 == 0 || span.last - span.first < 5)
            fprintf(file, "<text x=\"%d\" y=\"%d\" text-anchor=\"middle\">%d</text>\n",
                    LEFT + (byte - span.first) * CELL_W + CELL_W / 2, y, byte - 127);
}

int health_plot(const struct health *health, const char *title, const char *path)
{
    struct span span = span_of(health);
    struct svg svg;
    int width = LEFT + (span.last - span.first + 1) * CELL_W + RIGHT + 72, bottom = TOP + health->n_layers * CELL_H;
    int code = svg_open(&svg, path, width < LOWEST_WIDTH ? LOWEST_WIDTH : width, bottom + BOTTOM);
    if (code) return code;
    fprintf(svg.file, "<text x=\"%d\" y=\"22\" font-size=\"14\">", LEFT);
    svg_text(&svg, title);
    fprintf(svg.file, "</text>\n<text x=\"%d\" y=\"40\">share of blocks with each scale, logarithmic</text>\n", LEFT);
    for (int32_t i = 0; i < health->n_layers; ++i) put_layer(svg.file, &health->layers[i], span, TOP + i * CELL_H);
    put_axis(svg.file, span, bottom + 14);
    fprintf(svg.file, "<text x=\"%d\" y=\"%d\">exponent of the scale (rows: layers)</text>\n", LEFT, bottom + 34);
    return svg_close(&svg);
}
