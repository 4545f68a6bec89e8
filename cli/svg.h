/* A picture being written: it appears under its name only when complete. */
#ifndef MOE4_CLI_SVG_H
#define MOE4_CLI_SVG_H

#include <stdio.h>

struct svg {
    FILE *file; /* beside the path, for elements; what fails there is told by svg_close */
    const char *path;
    char temporary[4096];
};

/* Begins a white picture of so many pixels, text in 11 of a sans-serif font.  On failure says why. */
int svg_open(struct svg *svg, const char *path, int width, int height);

/* Whether one can be begun there: for who has long to work before it.  If not, says why. */
int svg_check(const char *path);

/* Text within an element. */
void svg_text(struct svg *svg, const char *text);

/* Ends it and renames it to its path. */
int svg_close(struct svg *svg);

#endif
