/* Blocks of memory and their copies on a GPU, so that the rest of the command knows only its own memory. */
#ifndef MOE4_CLI_MIRROR_H
#define MOE4_CLI_MIRROR_H

#include "gpu.h"

struct mirror {
    struct gpu *gpu; /* borrowed; NULL: nothing is mirrored, and a block is its own copy */
    struct mirror_block {
        void *host, *device;
        size_t bytes;
    } blocks[24];
    int32_t n_blocks;
};

/* Gives a block room on the GPU, without copying it; nothing for NULL. */
int mirror_add(struct mirror *mirror, void *host, size_t bytes, const char *what);

/* Where the GPU finds what lies at `host`, anywhere within a block; NULL for NULL. */
void *mirror_of(const struct mirror *mirror, const void *host);

/* Copies the whole block that begins at `host`, which must have been added; nothing for NULL or without a GPU. */
int mirror_upload(const struct mirror *mirror, const void *host);
int mirror_download(const struct mirror *mirror, void *host);

void mirror_close(struct mirror *mirror);

#endif
