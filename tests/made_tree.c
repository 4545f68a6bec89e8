#include "made_tree.h"

#include <setjmp.h>
#include <stdarg.h> /* for cmocka.h, as the next two */
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include <cmocka.h>

char made_root[] = "/tmp/moe4_made_XXXXXX";

int made_tree_create(void **state)
{
    (void)state;
    return mkdtemp(made_root) ? 0 : -1;
}

int made_tree_clear(void **state)
{
    (void)state;
    char command[64];
    snprintf(command, sizeof command, "rm -rf %s/*", made_root);
    return system(command);
}

int made_tree_remove(void **state)
{
    (void)state;
    char command[64];
    snprintf(command, sizeof command, "rm -rf %s", made_root);
    return system(command);
}

void put(const char *path, const char *text)
{
    char full[256];
    snprintf(full, sizeof full, "%s%s", made_root, path);
    for (char *slash = full + strlen(made_root) + 1; (slash = strchr(slash, '/')); slash++) {
        *slash = '\0';
        mkdir(full, 0755);
        *slash = '/';
    }
    FILE *file = fopen(full, "w");
    assert_non_null(file);
    fputs(text, file);
    fclose(file);
}
