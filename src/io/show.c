#include "io/show.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

static const char ellipsis[] = "...";

struct shown show_name(const char *name)
{
    struct shown shown;
    size_t length = 0;
    for (; name[length] && length < sizeof shown.text - 1; length++) {
        unsigned char c = (unsigned char)name[length];
        shown.text[length] = (char)(c < 0x20 || c == 0x7F ? '?' : c);
    }
    shown.text[length] = '\0';
    if (name[length]) {
        size_t cut = sizeof shown.text - sizeof ellipsis;
        while (cut && ((unsigned char)name[cut] & 0xC0) == 0x80) cut--; /* not inside a UTF-8 sequence */
        memcpy(shown.text + cut, ellipsis, sizeof ellipsis);
    }
    return shown;
}

const char *file_name(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash && slash[1] ? slash + 1 : path;
}

struct shown show_file(const char *path)
{
    return show_name(file_name(path));
}

struct shown show_type(const char *dtype, int32_t rank, const int64_t *shape)
{
    char text[32 + 24 * 8];
    size_t length = (size_t)snprintf(text, sizeof text, "%.20s [", dtype);
    for (int32_t i = 0; i < rank && length < sizeof text; i++)
        length += (size_t)snprintf(text + length, sizeof text - length, "%s%" PRId64, i ? ", " : "", shape[i]);
    if (length < sizeof text) snprintf(text + length, sizeof text - length, "]");
    return show_name(text);
}
