/* Parts of messages.  What comes from a file is cut to a readable length and stripped of control characters, so that a
 * hostile name can neither push the values out of a message nor act on a terminal.
 * Returned by value: `show_name(name).text` lives until the end of the statement. */
#ifndef MOE4_IO_SHOW_H
#define MOE4_IO_SHOW_H

#include <stdint.h>

struct shown {
    char text[112];
};

struct shown show_name(const char *name);
/* The last component of a path. */
struct shown show_file(const char *path);
/* "U8 [4, 96, 2, 16]" */
struct shown show_type(const char *dtype, int32_t rank, const int64_t *shape);

/* The last component itself. */
const char *file_name(const char *path);

#endif
