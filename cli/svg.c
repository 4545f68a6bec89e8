#include "svg.h"

#include <errno.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "command.h"
#include "message.h"

int svg_open(struct svg *svg, const char *path, int width, int height)
{
    struct stat info;
    if (!stat(path, &info) && !S_ISREG(info.st_mode)) return fail("%s: is there, and not a regular file", path);
    svg->path = path;
    int length = snprintf(svg->temporary, sizeof svg->temporary, "%s.%ld.tmp", path, (long)getpid());
    if (length >= (int)sizeof svg->temporary) return fail("%s: %s", path, strerror(ENAMETOOLONG));
    svg->file = fopen(svg->temporary, "w");
    if (!svg->file) return fail("%s: %s", path, strerror(errno));
    fprintf(svg->file,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%d\" height=\"%d\" font-family=\"sans-serif\" "
            "font-size=\"11\">\n<rect width=\"100%%\" height=\"100%%\" fill=\"white\"/>\n",
            width, height);
    return EXIT_OK;
}

int svg_check(const char *path)
{
    struct svg svg;
    int code = svg_open(&svg, path, 1, 1);
    if (code) return code;
    fclose(svg.file);
    unlink(svg.temporary);
    return EXIT_OK;
}

void svg_text(struct svg *svg, const char *text)
{
    for (; *text; ++text) {
        const char *entity = *text == '<' ? "&lt;" : *text == '>' ? "&gt;" : *text == '&' ? "&amp;" : NULL;
        if (entity)
            fputs(entity, svg->file);
        else
            fputc(*text, svg->file);
    }
}

int svg_close(struct svg *svg)
{
    fputs("</svg>\n", svg->file);
    int failed = ferror(svg->file);
    if (!fclose(svg->file) && !failed && !rename(svg->temporary, svg->path)) return EXIT_OK;
    int code = fail("%s: %s", svg->path, strerror(errno));
    unlink(svg->temporary);
    return code;
}
