/* Made-up /proc and /sys: files under a root of one's own, which the functions under test take for "/". */
#ifndef MOE4_TEST_MADE_TREE_H
#define MOE4_TEST_MADE_TREE_H

/* Where the tree lies, from made_tree_create on. */
extern char made_root[];

/* Makes the root, empties it, removes it.  0, or not if that failed. */
int made_tree_create(void **state);
int made_tree_clear(void **state);
int made_tree_remove(void **state);

/* A file under the root, with the folders around it. */
void put(const char *path, const char *text);

#endif
