/* Which revision of the source this command was built from. */
#ifndef MOE4_CLI_COMMIT_H
#define MOE4_CLI_COMMIT_H

/* A short commit id; "unknown" when it was not built from a git work tree. */
const char *commit_id(void);

#endif
