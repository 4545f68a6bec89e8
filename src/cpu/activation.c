#include "cpu/activation.h"

#include <math.h>
#include <stddef.h>

#include "context.h"
#include "cpu/isa.h"

/* What values a parameter may have.  NEEDED: as POSITIVE, but it may not be absent. */
enum param_use { PARAM_UNUSED = 0, PARAM_FINITE, PARAM_POSITIVE, PARAM_NEEDED, PARAM_LIMIT };
enum { N_PARAMS = 3 };

static const char *const param_names[N_PARAMS] = {"alpha", "beta", "limit"};

/* With these absent parameters are gone from the formulas. */
static const struct activation_params neutral = {.alpha = 1.0f, .beta = -0.0f, .limit = INFINITY};
static const struct activation_params neutral_situ = {.alpha = NAN, .beta = INFINITY, .limit = INFINITY};

/* What an activation is to a config. */
struct activation_row {
    const char *name;
    int has_gate;
    enum param_use uses[N_PARAMS]; /* alpha, beta, limit */
    const struct activation_params *absent;
};

static const struct activation_row rows[N_ACTIVATIONS] = {
    [MOE4_ACTIVATION_SILU] = {"silu", 1, {PARAM_UNUSED, PARAM_UNUSED, PARAM_LIMIT}, &neutral},
    [MOE4_ACTIVATION_SWIGLU_OAI] = {"swiglu_oai", 1, {PARAM_FINITE, PARAM_FINITE, PARAM_LIMIT}, &neutral},
    /* Implementations disagree on the default of alpha (1 or 4), so it has none here. */
    [MOE4_ACTIVATION_SITU] = {"situ", 1, {PARAM_NEEDED, PARAM_POSITIVE, PARAM_LIMIT}, &neutral_situ},
    [MOE4_ACTIVATION_GEGLU] = {"geglu", 1, {PARAM_FINITE, PARAM_FINITE, PARAM_LIMIT}, &neutral},
    [MOE4_ACTIVATION_GEGLU_TANH] = {"geglu_tanh", 1, {PARAM_FINITE, PARAM_FINITE, PARAM_LIMIT}, &neutral},
    [MOE4_ACTIVATION_SWIGLU_STEP] = {"swiglu_step", 1, {PARAM_UNUSED, PARAM_UNUSED, PARAM_LIMIT}, &neutral},
    [MOE4_ACTIVATION_RELU2] = {"relu2", 0, {PARAM_UNUSED, PARAM_UNUSED, PARAM_UNUSED}, &neutral},
    [MOE4_ACTIVATION_IDENTITY] = {"identity", 0, {PARAM_UNUSED, PARAM_UNUSED, PARAM_UNUSED}, &neutral},
};

static const struct activation_row *row_of(moe4_activation activation)
{
    unsigned index = (unsigned)activation;
    return index < N_ACTIVATIONS && rows[index].name ? &rows[index] : NULL;
}

static const moe4_param *param_of(const moe4_layer_config *config, int param)
{
    const moe4_param *const params[N_PARAMS] = {&config->alpha, &config->beta, &config->limit};
    return params[param];
}

const struct activation_kernels *activation_kernels_for(moe4_isa isa)
{
#if defined(__x86_64__)
    if (isa_includes(isa, MOE4_ISA_AVX512)) return &activation_avx512;
    if (isa_includes(isa, MOE4_ISA_AVX2)) return &activation_avx2;
#endif
    (void)isa;
    return &activation_c;
}

const char *activation_name(moe4_activation activation)
{
    const struct activation_row *row = row_of(activation);
    return row ? row->name : NULL;
}

int activation_has_gate(moe4_activation activation)
{
    return row_of(activation)->has_gate;
}

/* NULL if the value is fine, else what it should have been. */
static const char *value_complaint(enum param_use use, float value)
{
    switch (use) {
    case PARAM_FINITE: return isfinite(value) ? NULL : "a finite number";
    case PARAM_POSITIVE:
    case PARAM_NEEDED: return isfinite(value) && value > 0.0f ? NULL : "a finite number above 0";
    case PARAM_LIMIT: return value > 0.0f ? NULL : "a number above 0 (absent or +inf: no clamp)";
    case PARAM_UNUSED: break;
    }
    return NULL;
}

static moe4_status validate_param(struct moe4_context *context, const struct activation_row *row, int param,
                                  const moe4_param *given)
{
    const char *name = param_names[param];
    if (given->presence == MOE4_ABSENT) {
        if (row->uses[param] != PARAM_NEEDED) return MOE4_OK;
        return context_fail(context, MOE4_EINVAL, "%s is absent: %s has no default for it", name, row->name);
    }
    if (given->presence != MOE4_SAME && given->presence != MOE4_PER_EXPERT)
        return context_fail(context, MOE4_EINVAL, "%s: presence %d is none of absent, same, per expert", name,
                            (int)given->presence);
    if (row->uses[param] == PARAM_UNUSED)
        return context_fail(context, MOE4_EINVAL, "%s is given, but activation %s does not use it", name, row->name);
    if (given->presence == MOE4_PER_EXPERT) return MOE4_OK;
    const char *complaint = value_complaint(row->uses[param], given->value);
    if (!complaint) return MOE4_OK;
    return context_fail(context, MOE4_EINVAL, "%s is %g, expected %s for activation %s", name, (double)given->value,
                        complaint, row->name);
}

static moe4_status validate_gate_up(struct moe4_context *context, const struct activation_row *row, moe4_gate_up order)
{
    static const char *const names[] = {"none", "interleaved", "gate_first", "up_first"};
    if ((unsigned)order >= sizeof names / sizeof *names)
        return context_fail(context, MOE4_EINVAL, "gate_up %d is none of none, interleaved, gate_first, up_first",
                            (int)order);
    if (row->has_gate && order == MOE4_GATE_UP_NONE)
        return context_fail(context, MOE4_EINVAL,
                            "gate_up is none, but activation %s has a gate: expected interleaved, gate_first or "
                            "up_first",
                            row->name);
    if (!row->has_gate && order != MOE4_GATE_UP_NONE)
        return context_fail(context, MOE4_EINVAL, "gate_up is %s, but activation %s has no gate: expected none",
                            names[order], row->name);
    return MOE4_OK;
}

moe4_status activation_validate(struct moe4_context *context, const moe4_layer_config *config)
{
    const struct activation_row *row = row_of(config->activation);
    if (config->activation == MOE4_ACTIVATION_NONE) return context_fail(context, MOE4_EINVAL, "activation is not set");
    if (!row)
        return context_fail(context, MOE4_EINVAL, "activation %d is unknown, expected 1..%d", (int)config->activation,
                            N_ACTIVATIONS - 1);
    for (int param = 0; param < N_PARAMS; param++) {
        moe4_status status = validate_param(context, row, param, param_of(config, param));
        if (status != MOE4_OK) return status;
    }
    return validate_gate_up(context, row, config->gate_up);
}

moe4_status activation_validate_values(struct moe4_context *context, const moe4_layer_config *config,
                                       int32_t n_local_experts)
{
    const struct activation_row *row = row_of(config->activation);
    for (int param = 0; param < N_PARAMS; param++) {
        const moe4_param *given = param_of(config, param);
        if (given->presence != MOE4_PER_EXPERT) continue;
        if (!given->values)
            return context_fail(context, MOE4_EINVAL, "%s is per expert, but its values are NULL", param_names[param]);
        for (int32_t l = 0; l < n_local_experts; l++) {
            const char *complaint = value_complaint(row->uses[param], given->values[l]);
            if (complaint)
                return context_fail(context, MOE4_EINVAL, "%s of local expert %d is %g, expected %s for activation %s",
                                    param_names[param], l, (double)given->values[l], complaint, row->name);
        }
    }
    return MOE4_OK;
}

static float resolve(const moe4_param *given, int32_t local_expert, float absent)
{
    switch (given->presence) {
    case MOE4_SAME: return given->value;
    case MOE4_PER_EXPERT: return given->values[local_expert];
    case MOE4_ABSENT: break;
    }
    return absent;
}

struct activation_params activation_resolve(const moe4_layer_config *config, int32_t local_expert)
{
    const struct activation_params *absent = row_of(config->activation)->absent;
    return (struct activation_params){
        .alpha = resolve(&config->alpha, local_expert, absent->alpha),
        .beta = resolve(&config->beta, local_expert, absent->beta),
        .limit = resolve(&config->limit, local_expert, absent->limit),
    };
}
