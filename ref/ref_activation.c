/* The activations, and the ranges they take over ranges of their inputs.
 *
 * Each is a product F(gate) * U(up), the inputs clamped first (the gate from above, the up on both sides).  U never
 * falls. F has one extremum, below (alpha > 0) or above (alpha < 0) of gate 0, so that its range over an interval is
 * spanned by its values at the ends and, where it lies between them, at that "turn". */
#include <math.h>

#include "ref_internal.h"

/* ---- Factors ---- */

static double sigmoid(double z)
{
    return 1 / (1 + exp(-z));
}

static double normal_cdf(double z)
{
    return 0.5 * erfc(-z / sqrt(2));
}

/* 0.5 * (1 + tanh(c * (z + 0.044715 z^3))), written so that its small values are accurate. */
static double normal_cdf_tanh(double z)
{
    return sigmoid(2 * 0.7978845608028654 * (z + 0.044715 * z * z * z));
}

static double gate_silu(double g, double alpha)
{
    return g * sigmoid(alpha * g);
}

static double gate_gelu(double g, double alpha)
{
    return g * normal_cdf(alpha * g);
}

static double gate_gelu_tanh(double g, double alpha)
{
    return g * normal_cdf_tanh(alpha * g);
}

static double gate_situ(double g, double alpha)
{
    return alpha * tanh(g / alpha) * sigmoid(g);
}

/* Turns of z * S(z): the roots of S(z) + z * S'(z), for z = alpha * g. */
static double turn_silu(double alpha)
{
    return -1.2784645427610738 / alpha;
}

static double turn_gelu(double alpha)
{
    return -0.7517915246935645 / alpha;
}

static double turn_gelu_tanh(double alpha)
{
    return -0.7524614220710163 / alpha;
}

/* The root of d/dg log(tanh(g/alpha) * sigmoid(g)), at g = -t: 2/alpha / sinh(2t/alpha) falls, sigmoid(t) rises, and
 * since sinh(z) >= z the root is not beyond that of 1/t = sigmoid(t). */
static double turn_situ(double alpha)
{
    double below = 0, above = 1.2784645427610738;
    for (int step = 0; step < 60; step++) {
        double t = (below + above) / 2;
        if (2 / alpha / sinh(2 * t / alpha) > sigmoid(t))
            below = t;
        else
            above = t;
    }
    return -above;
}

static double up_shifted(double u, double beta)
{
    return u + beta;
}

static double up_tanh(double u, double beta)
{
    return isinf(beta) ? u : beta * tanh(u / beta);
}

static double up_squared(double u, double beta)
{
    (void)beta;
    return u <= 0 ? 0 : u * u; /* a NaN stays */
}

/* ---- What an activation is ---- */

typedef struct shape {
    double (*gate)(double g, double alpha); /* NULL: no gate, factor 1 */
    double (*turn)(double alpha);
    double (*up)(double u, double beta);
    double alpha, beta; /* when absent */
    int caps_factor;    /* the limit caps the gate's factor, not the gate */
} shape;

static const shape shapes[] = {
    [MOE4_ACTIVATION_SILU] = {gate_silu, turn_silu, up_shifted, 1, 0, 0},
    [MOE4_ACTIVATION_SWIGLU_OAI] = {gate_silu, turn_silu, up_shifted, 1, 0, 0},
    [MOE4_ACTIVATION_SITU] = {gate_situ, turn_situ, up_tanh, 1, INFINITY, 0},
    [MOE4_ACTIVATION_GEGLU] = {gate_gelu, turn_gelu, up_shifted, 1, 0, 0},
    [MOE4_ACTIVATION_GEGLU_TANH] = {gate_gelu_tanh, turn_gelu_tanh, up_shifted, 1, 0, 0},
    [MOE4_ACTIVATION_SWIGLU_STEP] = {gate_silu, turn_silu, up_shifted, 1, 0, 1},
    [MOE4_ACTIVATION_RELU2] = {0, 0, up_squared, 1, 0, 0},
    [MOE4_ACTIVATION_IDENTITY] = {0, 0, up_shifted, 1, 0, 0},
};

/* A shape with the parameters of one expert. */
typedef struct curve {
    const shape *shape;
    double alpha, beta, limit;
} curve;

static double param_value(const moe4_param *param, int32_t l, double absent)
{
    switch (param->presence) {
    case MOE4_ABSENT: break;
    case MOE4_SAME: return param->value;
    case MOE4_PER_EXPERT: return param->values[l];
    }
    return absent;
}

static curve curve_of(const moe4_layer_config *config, int32_t l)
{
    const shape *s = &shapes[config->activation];
    return (curve){s, param_value(&config->alpha, l, s->alpha), param_value(&config->beta, l, s->beta),
                   param_value(&config->limit, l, INFINITY)};
}

/* Clamps that keep NaN. */
static double at_most(double x, double limit)
{
    return x > limit ? limit : x;
}

static double within(double x, double limit)
{
    return x > limit ? limit : x < -limit ? -limit : x;
}

static double gate_factor(const curve *c, double gate)
{
    if (!c->shape->gate) return 1;
    if (c->shape->caps_factor) return at_most(c->shape->gate(gate, c->alpha), c->limit);
    return c->shape->gate(at_most(gate, c->limit), c->alpha);
}

static double up_factor(const curve *c, double up)
{
    return c->shape->up(within(up, c->limit), c->beta);
}

double ref_activation(const moe4_layer_config *config, int32_t l, double gate, double up)
{
    curve c = curve_of(config, l);
    return gate_factor(&c, gate) * up_factor(&c, up);
}

double ref_weighted_input(double x, double weight)
{
    return ref_round_bf16(ref_round_f32(x * weight));
}

/* ---- Ranges ---- */

static const ref_range unbounded = {-INFINITY, INFINITY, REF_NAN_MAYBE};

static ref_range range_around(double value, ref_nan nan)
{
    return (ref_range){value, value, isnan(value) ? REF_NAN_ALWAYS : nan};
}

/* Stretches a range to hold a value; a NaN can only be possible in a range that is more than one point. */
static void range_include(ref_range *range, double value)
{
    if (isnan(value)) *range = unbounded;
    if (value < range->low) range->low = value;
    if (value > range->high) range->high = value;
}

/* An end beyond fp32 is an infinity there. */
static double end_in_f32(double end)
{
    return isinf(ref_round_f32(end)) ? ref_round_f32(end) : end;
}

static ref_range range_in_f32(ref_range range)
{
    return (ref_range){end_in_f32(range.low), end_in_f32(range.high), range.nan};
}

static int is_point(const ref_range *range)
{
    return range->low == range->high;
}

static ref_range gate_range(const curve *c, ref_range gate)
{
    if (!c->shape->gate) return range_around(1, REF_NAN_NEVER);
    if (gate.nan == REF_NAN_ALWAYS) return gate;
    ref_range range = range_around(gate_factor(c, gate.low), gate.nan);
    if (is_point(&gate)) return range;
    if (range.nan == REF_NAN_ALWAYS) return unbounded;
    range_include(&range, gate_factor(c, gate.high));
    double turn = c->shape->turn(c->alpha);
    if (gate.low < turn && turn < gate.high) range_include(&range, gate_factor(c, turn));
    return range;
}

static ref_range up_range(const curve *c, ref_range up)
{
    if (up.nan == REF_NAN_ALWAYS) return up;
    return (ref_range){up_factor(c, up.low), up_factor(c, up.high), up.nan};
}

static int may_be_zero(const ref_range *range)
{
    return range->low <= 0 && range->high >= 0;
}

static int may_be_infinite(const ref_range *range)
{
    return isinf(range->low) || isinf(range->high);
}

static ref_range range_product(ref_range a, ref_range b)
{
    if (a.nan == REF_NAN_ALWAYS || b.nan == REF_NAN_ALWAYS) return range_around(NAN, REF_NAN_ALWAYS);
    if (is_point(&a) && is_point(&b)) return range_around(a.low * b.low, a.nan > b.nan ? a.nan : b.nan);
    if ((may_be_zero(&a) && may_be_infinite(&b)) || (may_be_zero(&b) && may_be_infinite(&a))) return unbounded;
    ref_range range = range_around(a.low * b.low, a.nan > b.nan ? a.nan : b.nan);
    range_include(&range, a.low * b.high);
    range_include(&range, a.high * b.low);
    range_include(&range, a.high * b.high);
    return range;
}

/* By four units of fp32 rounding, which are absolute among its subnormals. */
static double rounding_slack(double value)
{
    double unit = 0x1p-24 * fabs(value);
    return isinf(value) ? 0 : 4 * (unit > 0x1p-150 ? unit : 0x1p-150);
}

ref_range ref_activation_range(const moe4_layer_config *config, int32_t l, ref_range gate, ref_range up)
{
    curve c = curve_of(config, l);
    ref_range range = range_product(gate_range(&c, range_in_f32(gate)), up_range(&c, range_in_f32(up)));
    return (ref_range){range.low - rounding_slack(range.low), range.high + rounding_slack(range.high), range.nan};
}
