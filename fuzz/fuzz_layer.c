/* A checkpoint folder: config.json, then after a line "---" a shard as container.h describes it, then maybe another.
 * Every layer in it is read expert by expert and, where all of it is there, prepared and run. */
#include <string.h>

#include "container.h"
#include "fuzz.h"

enum { MAX_SHARDS = 2 };

static const char separator[] = "\n---\n";

/* Where the first part of a text ends. */
static size_t part_length(const char *text, size_t n_bytes)
{
    const char *end = memmem(text, n_bytes, separator, sizeof separator - 1);
    return end ? (size_t)(end - text) : n_bytes;
}

static void write_folder(moe4_context *context, const char *text, size_t n_bytes)
{
    static const char *const names[MAX_SHARDS] = {"a.safetensors", "b.safetensors"};
    static struct container container;
    size_t length = part_length(text, n_bytes);
    fuzz_folder_put("config.json", text, length);
    for (int i = 0; i < MAX_SHARDS; i++) {
        if (i && length == n_bytes) {
            fuzz_folder_put(names[i], NULL, 0);
            continue;
        }
        size_t skipped = length == n_bytes ? length : length + sizeof separator - 1;
        text += skipped;
        n_bytes -= skipped;
        length = part_length(text, n_bytes);
        container_build(context, text, length, &container);
        fuzz_folder_put(names[i], container.bytes, container.n_bytes);
        fuzz_justify(container.n_bytes);
    }
}

static void body(moe4_context *context, const uint8_t *data, size_t n_bytes)
{
    write_folder(context, (const char *)data, n_bytes);
    fuzz_use_checkpoint(context, fuzz_folder());
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
    return fuzz_run(data, n_bytes, body);
}
