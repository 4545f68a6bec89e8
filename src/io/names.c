#include "io/names.h"

#include <string.h>
#include <sys/random.h>

#include "base/checked.h"

enum { FIRST_SLOTS = 16 };

struct names_slot {
    const char *name; /* NULL = free */
    uint64_t hash;
    int64_t value;
};

/* The halves of a 128-bit product, folded: every input bit reaches every output bit. */
static uint64_t mix(uint64_t a, uint64_t b)
{
    unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static uint64_t hash_name(const char *name, uint64_t key)
{
    const uint64_t odd_a = 0x9E3779B97F4A7C15u, odd_b = 0xD1B54A32D192ED03u;
    size_t rest = strlen(name);
    uint64_t hash = key ^ mix(rest + 1, odd_a), word = 0;
    for (; rest >= sizeof word; rest -= sizeof word, name += sizeof word) {
        memcpy(&word, name, sizeof word);
        hash = mix(hash ^ word, odd_b);
    }
    word = 0;
    memcpy(&word, name, rest);
    return mix(mix(hash ^ word, odd_b) ^ key, odd_a);
}

static uint64_t new_key(const struct names *names)
{
    uint64_t key;
    if (getrandom(&key, sizeof key, GRND_NONBLOCK) != (ssize_t)sizeof key) key = (uint64_t)(uintptr_t)names;
    return key;
}

/* The slot that holds name, or the free one where it belongs. */
static struct names_slot *slot_of(const struct names *names, const char *name, uint64_t hash)
{
    size_t mask = names->capacity - 1, i = (size_t)hash & mask;
    while (names->slots[i].name && (names->slots[i].hash != hash || strcmp(names->slots[i].name, name) != 0))
        i = (i + 1) & mask;
    return &names->slots[i];
}

static int grow(struct names *names, const moe4_allocator *allocator)
{
    struct names larger = *names;
    size_t bytes;
    if (!names->slots) larger.key = new_key(names);
    larger.capacity = names->slots ? names->capacity : FIRST_SLOTS / 2;
    if (!size_multiply(larger.capacity, 2, &larger.capacity)) return 0;
    if (!size_multiply(larger.capacity, sizeof *larger.slots, &bytes)) return 0;
    larger.slots = memory_allocate_zeroed(allocator, bytes);
    if (!larger.slots) return 0;
    for (size_t i = 0; i < names->capacity; i++) {
        const struct names_slot *old = &names->slots[i];
        if (old->name) *slot_of(&larger, old->name, old->hash) = *old;
    }
    names_release(names, allocator);
    *names = larger;
    return 1;
}

int64_t names_add(struct names *names, const moe4_allocator *allocator, const char *name, int64_t value)
{
    if (2 * (names->count + 1) > names->capacity && !grow(names, allocator)) return NAMES_NO_MEMORY;
    uint64_t hash = hash_name(name, names->key);
    struct names_slot *slot = slot_of(names, name, hash);
    if (slot->name) return slot->value;
    *slot = (struct names_slot){name, hash, value};
    names->count++;
    return value;
}

int64_t names_find(const struct names *names, const char *name)
{
    if (!names->slots) return NAMES_NONE;
    const struct names_slot *slot = slot_of(names, name, hash_name(name, names->key));
    return slot->name ? slot->value : NAMES_NONE;
}

void names_release(struct names *names, const moe4_allocator *allocator)
{
    memory_release(allocator, names->slots, names->capacity * sizeof *names->slots);
    *names = (struct names){0};
}
