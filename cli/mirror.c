#include "mirror.h"

#include <assert.h>

#include "command.h"

enum { MAX_BLOCKS = sizeof(struct mirror) / sizeof(struct mirror_block) - 1 };

int mirror_add(struct mirror *mirror, void *host, size_t bytes, const char *what)
{
    if (!host || !mirror->gpu) return EXIT_OK;
    assert(mirror->n_blocks < MAX_BLOCKS);
    struct mirror_block *block = &mirror->blocks[mirror->n_blocks];
    *block = (struct mirror_block){.host = host, .bytes = bytes};
    int code = mirror->gpu->calls->allocate(mirror->gpu, &block->device, bytes, what);
    if (!code) ++mirror->n_blocks;
    return code;
}

static const struct mirror_block *block_of(const struct mirror *mirror, const void *host)
{
    const uintptr_t place = (uintptr_t)host;
    for (int32_t i = 0; i < mirror->n_blocks; ++i) {
        const uintptr_t first = (uintptr_t)mirror->blocks[i].host;
        if (place >= first && (place == first || place - first < mirror->blocks[i].bytes)) return &mirror->blocks[i];
    }
    return NULL;
}

void *mirror_of(const struct mirror *mirror, const void *host)
{
    if (!host || !mirror->gpu) return (void *)host;
    const struct mirror_block *block = block_of(mirror, host);
    assert(block);
    return (char *)block->device + ((const char *)host - (const char *)block->host);
}

int mirror_upload(const struct mirror *mirror, const void *host)
{
    if (!host || !mirror->gpu) return EXIT_OK;
    const struct mirror_block *block = block_of(mirror, host);
    return mirror->gpu->calls->upload(mirror->gpu, block->device, block->host, block->bytes);
}

int mirror_download(const struct mirror *mirror, void *host)
{
    if (!host || !mirror->gpu) return EXIT_OK;
    const struct mirror_block *block = block_of(mirror, host);
    return mirror->gpu->calls->download(mirror->gpu, block->host, block->device, block->bytes);
}

void mirror_close(struct mirror *mirror)
{
    for (int32_t i = 0; i < mirror->n_blocks; ++i) mirror->gpu->calls->release(mirror->gpu, mirror->blocks[i].device);
    *mirror = (struct mirror){0};
}
