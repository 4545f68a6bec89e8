/* MoE layers to be written: those of a checkpoint, generated ones, or such as are being quantised. */
#ifndef MOE4_CLI_FEED_H
#define MOE4_CLI_FEED_H

#include "moe4/moe4.h"

struct feed {
    void *user;
    /* Turns to a model layer; its config is valid until the next, with the router's values if they are wanted. */
    int (*open)(void *user, int32_t layer, const moe4_layer_config **config);
    /* The biases of its experts: whether they are there and of which types, no values. */
    int (*sample)(void *user, moe4_expert *result);
    /* One expert of that layer, valid until the next. */
    int (*read)(void *user, int32_t expert, moe4_expert *result);
};

#endif
