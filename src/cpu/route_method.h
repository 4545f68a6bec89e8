/* What distinguishes the routing methods: one row of a table each (route.c). */
#ifndef MOE4_CPU_ROUTE_METHOD_H
#define MOE4_CPU_ROUTE_METHOD_H

#include "cpu/route.h"

/* One token on its way.  logits are the row as f32; keys and groups are scratch. */
struct route_row {
    const float *logits;      /* [E] */
    const int32_t *table_row; /* [A], HASH only */
    int32_t *keys;            /* [E] */
    int64_t *groups;          /* [n_group] */
    int32_t *ids;             /* [A] */
};

/* Fields of moe4_routing that only some methods have. */
enum route_fields { ROUTE_BIAS = 1, ROUTE_GROUPS = 2, ROUTE_TABLE = 4, ROUTE_RENORMALIZE = 8 };

struct route_method {
    const char *name;
    int fields; /* enum route_fields, or-ed */
    int32_t max_top_k;
    /* Fills row->ids. */
    void (*select)(const struct router *router, const struct route_row *row);
    /* The unbiased score of a logit; best is the logit in slot 0. */
    double (*score)(double logit, double best);
    /* What the scores [A] of the chosen are divided by. */
    double (*divisor)(const struct router *router, const struct route_row *row, const double *scores);
};

/* NULL for NONE and for what is no method. */
const struct route_method *route_method_of(moe4_routing_method method);

#endif
