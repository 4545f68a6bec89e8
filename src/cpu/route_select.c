#include "cpu/route_select.h"

#include <string.h>

#include "base/convert.h"
#include "base/dims.h"

void select_order(const float *values, int32_t n, int32_t *keys)
{
    for (int32_t e = 0; e < n; e++) {
        float value = values[e] + 0.0f; /* -0 becomes +0 */
        int32_t bits;
        memcpy(&bits, &value, sizeof bits);
        int32_t ordered = bits < 0 ? bits ^ INT32_MAX : bits; /* negative floats grow downwards */
        keys[e] = value != value ? INT32_MAX : ordered;
    }
}

static float float_of_key(int32_t key)
{
    return f32_from_bits((uint32_t)(key < 0 ? key ^ INT32_MAX : key));
}

/* The best so far, sorted.  Most keys of a row fail against the last of a full list, so that comparison is all they
 * cost. */
struct shortlist {
    int32_t n, capacity;
    int32_t *ids;
    int32_t keys[MAX_TOP_K];
};

/* Puts a key that belongs on the list behind those equal to it, and drops the last of a full list. */
static void shortlist_insert(struct shortlist *list, int32_t key, int32_t id)
{
    int32_t slot = list->n < list->capacity ? list->n++ : list->n - 1;
    for (; slot > 0 && list->keys[slot - 1] < key; slot--) {
        list->keys[slot] = list->keys[slot - 1];
        list->ids[slot] = list->ids[slot - 1];
    }
    list->keys[slot] = key;
    list->ids[slot] = id;
}

static void shortlist_offer(struct shortlist *list, const int32_t *keys, int32_t first, int32_t last)
{
    for (int32_t e = first; e < last; e++)
        if (list->n < list->capacity || keys[e] > list->keys[list->n - 1]) shortlist_insert(list, keys[e], e);
}

enum { BATCH = 16 }; /* keys looked at together */

static int any_above(const int32_t *keys, int32_t threshold)
{
    int32_t any = 0;
    for (int i = 0; i < BATCH; i++) any |= -(keys[i] > threshold);
    return any;
}

/* Offers keys first .. last-1, whole batches without a candidate in one step. */
static void shortlist_scan(struct shortlist *list, const int32_t *keys, int32_t first, int32_t last)
{
    int32_t e = first;
    for (; last - e >= BATCH; e += BATCH)
        if (list->n < list->capacity || any_above(keys + e, list->keys[list->n - 1]))
            shortlist_offer(list, keys, e, e + BATCH);
    shortlist_offer(list, keys, e, last);
}

void select_best(const int32_t *keys, int32_t n, int32_t top_k, int32_t *ids)
{
    struct shortlist list;
    list.n = 0;
    list.capacity = top_k;
    list.ids = ids;
    shortlist_scan(&list, keys, 0, n);
}

/* The sum of a group's two largest keys, ordered as in select_order. */
static int64_t group_score(const int32_t *keys, int32_t n)
{
    int32_t best = INT32_MIN, second = INT32_MIN; /* below -inf's key */
    for (int32_t e = 0; e < n; e++) {
        int32_t lesser = keys[e] < best ? keys[e] : best;
        best = keys[e] > best ? keys[e] : best;
        second = lesser > second ? lesser : second;
    }
    double sum = (double)float_of_key(best) + float_of_key(second) + 0.0;
    if (sum != sum) return INT64_MAX;
    int64_t bits;
    memcpy(&bits, &sum, sizeof bits);
    return bits < 0 ? bits ^ INT64_MAX : bits;
}

void select_best_grouped(const int32_t *keys, int32_t n, int32_t n_group, int32_t topk_group, int32_t top_k,
                         int64_t *groups, int32_t *ids)
{
    const int64_t taken = INT64_MIN; /* no group's score */
    const int32_t size = n / n_group;
    for (int32_t g = 0; g < n_group; g++) groups[g] = group_score(keys + (int64_t)g * size, size);
    for (int32_t i = 0; i < topk_group; i++) {
        int32_t best = 0;
        for (int32_t g = 1; g < n_group; g++)
            if (groups[g] > groups[best]) best = g;
        groups[best] = taken;
    }
    struct shortlist list;
    list.n = 0;
    list.capacity = top_k;
    list.ids = ids;
    for (int32_t g = 0; g < n_group; g++)
        if (groups[g] == taken) shortlist_scan(&list, keys, g * size, (g + 1) * size);
}
