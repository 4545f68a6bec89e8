/* Names of expert tensors, taken apart by the tables of a family. */
#include <stdlib.h>
#include <string.h>

#include "io/family.h"

enum { MOST_DIGITS = 9 };

/* What follows `word` in text; NULL if text does not begin with it. */
static const char *after(const char *text, const char *word)
{
    size_t length = strlen(word);
    return strncmp(text, word, length) == 0 ? text + length : NULL;
}

/* What follows a number of up to nine digits; NULL without one. */
static const char *after_number(const char *text, int32_t *number)
{
    size_t n_digits = strspn(text, "0123456789");
    if (n_digits < 1 || n_digits > MOST_DIGITS) return NULL;
    *number = (int32_t)strtol(text, NULL, 10);
    return text + n_digits;
}

/* What follows PREFIX STEM layer-number. */
static const char *after_layer(const struct family *family, const struct spelling *spelling, int32_t n_layers,
                               const char *name, int32_t *layer_number)
{
    const char *stem, *rest;
    name = after(name, spelling->prefix);
    if (!name) return NULL;
    stem = after(name, family->words->stem);
    if (stem) return after_number(stem, layer_number);
    stem = spelling->extra_stem ? after(name, spelling->extra_stem) : NULL;
    rest = stem ? after_number(stem, layer_number) : NULL;
    if (rest) *layer_number += n_layers;
    return rest;
}

const char *spelling_block(const struct family *family, const struct spelling *spelling, int32_t n_layers,
                           const char *name, int32_t *layer_number)
{
    const char *rest = after_layer(family, spelling, n_layers, name, layer_number);
    return rest ? after(rest, spelling->block) : NULL;
}

/* The projection and suffix of the end of a name. */
static void parse_end(const struct family *family, const struct spelling *spelling, const char *end,
                      struct place *place)
{
    for (int32_t p = 0; p < spelling->projections->count; p++) {
        const struct projection *projection = &spelling->projections->items[p];
        const char *rest = after(end, projection->name);
        if (!rest) continue;
        for (int32_t s = 0; s < family->n_suffixes; s++)
            if (strcmp(family->suffixes[s].name, rest) == 0) {
                place->projection = projection;
                place->suffix = &family->suffixes[s];
                return;
            }
    }
}

int spelling_parse(const struct family *family, const struct spelling *spelling, int32_t n_layers, const char *name,
                   struct place *place)
{
    *place = (struct place){.layer_number = -1, .expert = -1};
    const char *rest = spelling_block(family, spelling, n_layers, name, &place->layer_number);
    if (rest) rest = after(rest, spelling->experts);
    if (rest && family->storage == STORED_APART) {
        rest = after_number(rest, &place->expert);
        if (rest) rest = after(rest, ".");
    }
    if (!rest) return 0;
    parse_end(family, spelling, rest, place);
    /* Where nothing but its end tells an expert tensor from others of the block, an unknown end is another's. */
    return place->suffix || *spelling->experts;
}

struct spelling spelling_first(const struct family *family)
{
    return (struct spelling){family->words->prefixes[0], family->words->blocks[0], family->words->experts[0],
                             family->words->extra_stem, family->projections[0]};
}

int spelling_find(const struct family *family, const char *name, int32_t matrix, struct spelling *spelling)
{
    struct place place;
    struct spelling tried = {.extra_stem = family->words->extra_stem};
    for (int prefix = 0; (tried.prefix = family->words->prefixes[prefix]); prefix++) {
        if (!after_layer(family, &tried, 0, name, &place.layer_number)) continue;
        for (int block = 0; (tried.block = family->words->blocks[block]); block++)
            for (int experts = 0; (tried.experts = family->words->experts[experts]); experts++)
                for (int set = 0; (tried.projections = family->projections[set]); set++)
                    if (spelling_parse(family, &tried, 0, name, &place) && place.suffix &&
                        place.projection->matrix == matrix) {
                        *spelling = tried;
                        return 1;
                    }
    }
    return 0;
}
