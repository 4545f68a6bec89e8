#include "pairwise.h"

#include <string.h>

void pairwise_init(struct pairwise *pairwise, const int32_t *n_values, int32_t n_factors, uint64_t seed)
{
    memset(pairwise, 0, sizeof *pairwise);
    pairwise->n_factors = n_factors;
    pairwise->n_values = n_values;
    pairwise->random.state = seed;
    for (int32_t f = 0; f < n_factors; f++)
        for (int32_t g = 0; g < f; g++) pairwise->n_uncovered += n_values[f] * n_values[g];
}

/* Pairs of factor f at `value`, with the factors already chosen, that have not occurred. */
static int32_t new_pairs(const struct pairwise *pairwise, const int32_t *values, int32_t f, int32_t value)
{
    int32_t n = 0;
    for (int32_t g = 0; g < pairwise->n_factors; g++)
        if (g != f && values[g] >= 0) n += !pairwise->covered[f][value][g][values[g]];
    return n;
}

/* The value of factor f that brings most new pairs; of equals a random one. */
static int32_t best_value(struct pairwise *pairwise, const int32_t *values, int32_t f)
{
    int32_t n = pairwise->n_values[f], start = (int32_t)random_below(&pairwise->random, n), best = start;
    for (int32_t i = 1; i < n; i++) {
        int32_t value = (start + i) % n;
        if (new_pairs(pairwise, values, f, value) > new_pairs(pairwise, values, f, best)) best = value;
    }
    return best;
}

/* Begins a case with a pair that has not occurred. */
static void choose_pair(const struct pairwise *pairwise, int32_t *values)
{
    for (int32_t f = 0; f < pairwise->n_factors; f++)
        for (int32_t g = 0; g < f; g++)
            for (int32_t v = 0; v < pairwise->n_values[f]; v++)
                for (int32_t w = 0; w < pairwise->n_values[g]; w++)
                    if (!pairwise->covered[f][v][g][w]) {
                        values[f] = v;
                        values[g] = w;
                        return;
                    }
}

static void cover(struct pairwise *pairwise, const int32_t *values)
{
    for (int32_t f = 0; f < pairwise->n_factors; f++)
        for (int32_t g = 0; g < f; g++) {
            if (pairwise->covered[f][values[f]][g][values[g]]) continue;
            pairwise->covered[f][values[f]][g][values[g]] = 1;
            pairwise->covered[g][values[g]][f][values[f]] = 1;
            pairwise->n_uncovered--;
        }
}

int pairwise_next(struct pairwise *pairwise, int32_t *values)
{
    const int32_t n = pairwise->n_factors;
    if (pairwise->n_uncovered == 0) return 0;
    for (int32_t f = 0; f < n; f++) values[f] = -1;
    choose_pair(pairwise, values);
    int32_t start = (int32_t)random_below(&pairwise->random, n);
    for (int32_t i = 0; i < n; i++) {
        int32_t f = (start + i) % n;
        if (values[f] < 0) values[f] = best_value(pairwise, values, f);
    }
    cover(pairwise, values);
    return 1;
}
