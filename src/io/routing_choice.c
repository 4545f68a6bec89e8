#include "io/routing_choice.h"

#include <math.h>

#include "base/dims.h"

/* With a selection bias or scores that are not softmax's, weights are divided by their sum: no method does otherwise.
 */
static moe4_status check_renormalized(const struct config *config, const struct routing_words *words)
{
    if (words->renormalize == RENORMALIZE_YES) return MOE4_OK;
    return config_fail(config, MOE4_EUNSUPPORTED, words->renormalize_key,
                       "true: this router's weights must be normalised");
}

static moe4_status choose_sigmoid(const struct config *config, const struct routing_words *words, struct model *model)
{
    moe4_routing *routing = &model->layer.routing;
    if (words->renormalize == RENORMALIZE_NO && model->selection_bias == NEED_NONE && routing->n_group <= 1) {
        routing->method = MOE4_ROUTING_SIGMOID;
        routing->n_group = routing->topk_group = 0;
        return MOE4_OK;
    }
    routing->method = routing->n_group > 0 ? MOE4_ROUTING_DEEPSEEK_V3 : MOE4_ROUTING_MINIMAX2;
    return check_renormalized(config, words);
}

moe4_status routing_choose(const struct config *config, const struct routing_words *words, struct model *model)
{
    moe4_routing *routing = &model->layer.routing;
    if (words->score == SCORE_SIGMOID) return choose_sigmoid(config, words, model);
    if (routing->n_group > 1)
        return config_fail(config, MOE4_EUNSUPPORTED, words->group_key, "1 with a router that is not sigmoid");
    routing->n_group = routing->topk_group = 0;
    if (words->score == SCORE_SQRT_SOFTPLUS) {
        routing->method = MOE4_ROUTING_SQRT_SOFTPLUS;
        return check_renormalized(config, words);
    }
    if (model->selection_bias == NEED_REQUIRED)
        return config_fail(config, MOE4_EUNSUPPORTED, words->score_key,
                           "sigmoid or sqrtsoftplus with a selection bias");
    routing->method = words->renormalize == RENORMALIZE_YES ? MOE4_ROUTING_RENORMALIZE : MOE4_ROUTING_DEFAULT;
    return MOE4_OK;
}

moe4_status routing_read_groups(const struct config *config, const char *const *n_group_keys,
                                const char *const *topk_group_keys, moe4_routing *routing)
{
    int64_t n_group = 0, topk_group = 0;
    moe4_status status = config_optional_integer(config, n_group_keys, 0, MAX_EXPERTS, &n_group);
    if (status == MOE4_OK && n_group > 1) status = config_integer_of(config, topk_group_keys, 1, n_group, &topk_group);
    if (status == MOE4_OK && n_group == 1) status = config_optional_integer(config, topk_group_keys, 0, 1, &topk_group);
    routing->n_group = (int32_t)n_group;
    routing->topk_group = (int32_t)topk_group;
    return status;
}

moe4_status routing_read_scaling(const struct config *config, const char *key, double none, moe4_routing *routing)
{
    double factor = none;
    moe4_status status = config_present(config, key) ? config_number(config, key, &factor) : MOE4_OK;
    if (status != MOE4_OK || factor == none || factor == 1.0) return status;
    routing->scaling_factor = (float)factor;
    if (!(routing->scaling_factor > 0.0f) || isinf(routing->scaling_factor))
        return config_fail(config, MOE4_EFORMAT, key, "a finite number above 0");
    return MOE4_OK;
}
