/* Which routing method a model's words about its router mean, the same for every kind of config. */
#ifndef MOE4_IO_ROUTING_CHOICE_H
#define MOE4_IO_ROUTING_CHOICE_H

#include "io/family.h"

enum score { SCORE_SOFTMAX, SCORE_SIGMOID, SCORE_SQRT_SOFTPLUS, N_SCORES, SCORE_UNSAID };

enum { RENORMALIZE_NO, RENORMALIZE_YES, RENORMALIZE_UNSAID };

/* Keys, for messages. */
struct routing_words {
    enum score score;
    int renormalize; /* NO or YES */
    const char *score_key, *renormalize_key, *group_key;
};

/* Sets the method from these and from what *model has of groups and biases; refuses what no method is. */
moe4_status routing_choose(const struct config *config, const struct routing_words *words, struct model *model);

/* Groups from two lists of keys; topk_group must be there when there are groups. */
moe4_status routing_read_groups(const struct config *config, const char *const *n_group_keys,
                                const char *const *topk_group_keys, moe4_routing *routing);

/* The factor of all weights; `none` also means 1. */
moe4_status routing_read_scaling(const struct config *config, const char *key, double none, moe4_routing *routing);

#endif
