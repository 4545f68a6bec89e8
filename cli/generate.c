#include "generate.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "moe4/quant.h"
#include "parallel.h"

enum { BLOCK = 32, OUTLIER_PERIOD = 100, OUTLIER_PHASE = 37 };
static const float outlier_factor = 20.0f, weight_sd = 0.02f, bias_sd = 0.1f;
static const double row_spread_sigma = 0.5;

/* A bijection of 64-bit numbers whose every output bit depends on every input bit (the finaliser of splitmix64). */
static uint64_t mix(uint64_t x)
{
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    return x ^ x >> 31;
}

uint64_t generate_key(uint64_t seed, generate_tensor tensor, int64_t layer)
{
    return mix(mix(mix(seed + 1) + (uint64_t)tensor) + (uint64_t)layer);
}

uint64_t generate_bits(uint64_t key, uint64_t index)
{
    return mix(key + index * 0x9E3779B97F4A7C15u);
}

double generate_uniform(uint64_t key, uint64_t index)
{
    return ((double)(generate_bits(key, index) >> 12) + 0.5) * 0x1p-52;
}

/* Sum of the eight bytes. */
static int byte_sum(uint64_t bits)
{
    uint64_t pairs = (bits & 0x00FF00FF00FF00FFu) + (bits >> 8 & 0x00FF00FF00FF00FFu);
    return (int)(pairs * 0x0001000100010001u >> 48);
}

/* Sixteen uniform bytes: mean 2040, sd sqrt(16 * 65535 / 12), within 0.2 % of the normal distribution. */
float generate_normal(uint64_t key, uint64_t index)
{
    int sum = byte_sum(generate_bits(key, 2 * index)) + byte_sum(generate_bits(key, 2 * index + 1));
    return (float)(sum - 2040) * (1.0f / 295.60108f);
}

static uint16_t to_bf16(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return (uint16_t)((bits + 0x7FFFu + (bits >> 16 & 1)) >> 16);
}

static float from_bf16(uint16_t x)
{
    uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* About e^x for |x| < 8, from multiplications alone so that every machine gets the same bits: (1 + x/1024)^1024. */
static double exponential(double x)
{
    double power = 1 + x / 1024;
    for (int i = 0; i < 10; ++i) power *= power;
    return power;
}

void generate_weights(uint64_t key, int64_t first, int64_t end, int64_t K, uint8_t *codes, uint8_t *scales)
{
    uint64_t spread_key = mix(key);
    for (int64_t row = first; row < end; ++row) {
        float spread = (float)exponential(row_spread_sigma * (double)generate_normal(spread_key, (uint64_t)row));
        float sd = weight_sd * spread;
        for (int64_t block = 0; block < K / BLOCK; ++block) {
            float x[BLOCK];
            uint64_t index = (uint64_t)(row * K + block * BLOCK);
            for (int i = 0; i < BLOCK; ++i) x[i] = sd * generate_normal(key, index + (uint64_t)i);
            moe4_mxfp4_quantize(x, 1, MOE4_SCALE_EVEN, codes, scales);
            codes += BLOCK / 2;
            scales += 1;
        }
    }
}

void generate_weights_fast(uint64_t key, int64_t first, int64_t end, int64_t K, uint8_t *codes, uint8_t *scales)
{
    int64_t first_block = first * (K / BLOCK), n_blocks = (end - first) * (K / BLOCK);
    for (int64_t block = 0; block < n_blocks; ++block) {
        uint64_t index = 2 * (uint64_t)(first_block + block);
        uint64_t bits[2] = {generate_bits(key, index), generate_bits(key, index + 1)};
        memcpy(codes + block * (BLOCK / 2), bits, sizeof bits);
        scales[block] = (uint8_t)(118 + mix(bits[0]) % 4);
    }
}

struct matrix_task {
    generate_rows *rows;
    uint64_t key;
    int64_t first_row, K;
    uint8_t *codes, *scales;
};

static void matrix_run(void *user, int64_t first, int64_t end)
{
    const struct matrix_task *task = user;
    task->rows(task->key, task->first_row + first, task->first_row + end, task->K, task->codes + first * (task->K / 2),
               task->scales + first * (task->K / 32));
}

void generate_matrix(generate_rows *rows, int32_t n_threads, uint64_t key, int64_t first_row, int64_t n_rows, int64_t K,
                     uint8_t *codes, uint8_t *scales)
{
    struct matrix_task task = {rows, key, first_row, K, codes, scales};
    parallel_for(n_threads, n_rows, matrix_run, &task);
}

void generate_biases(uint64_t key, int64_t first, int64_t n, uint16_t *bias)
{
    for (int64_t i = 0; i < n; ++i) bias[i] = to_bf16(bias_sd * generate_normal(key, (uint64_t)(first + i)));
}

static float channel_scale(int64_t channel)
{
    return channel % OUTLIER_PERIOD == OUTLIER_PHASE ? outlier_factor : 1.0f;
}

void generate_inputs(uint64_t key, int64_t first, int64_t end, int64_t H, uint16_t *x)
{
    for (int64_t t = first; t < end; ++t)
        for (int64_t h = 0; h < H; ++h) *x++ = to_bf16(channel_scale(h) * generate_normal(key, (uint64_t)(t * H + h)));
}

void generate_order(uint64_t key, int32_t n, int32_t *order)
{
    for (int32_t i = 0; i < n; ++i) { /* insert i at a random place among those before it */
        int32_t place = (int32_t)(generate_bits(key, (uint64_t)i) % (uint64_t)(i + 1));
        order[i] = order[place];
        order[place] = i;
    }
}

/* ---- Router ------------------------------------------------------------------------------------------------------ */

enum { CALIBRATION_TOKENS = 1024, CALIBRATION_ROUNDS = 60 };

struct calibration {
    int64_t H;
    int32_t n_experts, top_k;
    uint64_t token_key;
    const uint16_t *weight;
    uint16_t *x;    /* [CALIBRATION_TOKENS, H] */
    float *logits;  /* [CALIBRATION_TOKENS, E], without the bias; then scores */
    double *bias;   /* [E] */
    double *target; /* [E], the share of tokens that should choose an expert */
    int32_t *load;  /* [E], the number that do */
};

/* Weight rows scaled so that a logit has sd 1 on generated inputs. */
static void router_weights(uint64_t key, int32_t n_experts, int64_t H, uint16_t *weight)
{
    for (int64_t e = 0; e < n_experts; ++e, weight += H) {
        double variance = 0;
        for (int64_t h = 0; h < H; ++h) {
            double term = (double)(channel_scale(h) * generate_normal(key, (uint64_t)(e * H + h)));
            variance += term * term;
        }
        float scale = (float)(1 / sqrt(variance));
        for (int64_t h = 0; h < H; ++h) weight[h] = to_bf16(scale * generate_normal(key, (uint64_t)(e * H + h)));
    }
}

/* x^0.7 for x >= 1, from square roots alone: 0.7 is 0.101100110011... in binary. */
static double power_seven_tenths(double x)
{
    double product = 1;
    for (unsigned bits = 0xB33; bits; bits = bits << 1 & 0xFFF) {
        x = sqrt(x);
        if (bits & 0x800) product *= x;
    }
    return product;
}

/* Shares proportional to 1/rank^0.7 that sum to top_k; none above a cap just under 1, the others have the excess. */
static void router_targets(const int32_t *order, int32_t n_experts, int32_t top_k, double *target)
{
    double cap = 0.9 + 0.1 * top_k / n_experts, factor = 1;
    for (int round = 0; round < 100; ++round) {
        double sum = 0;
        for (int32_t e = 0; e < n_experts; ++e) {
            double share = factor / power_seven_tenths(1 + order[e]);
            target[e] = share < cap ? share : cap;
            sum += target[e];
        }
        factor *= top_k / sum;
    }
}

/* Logits of calibration tokens first..end-1. */
static void calibration_logits(void *user, int64_t first, int64_t end)
{
    struct calibration *self = user;
    for (int64_t t = first; t < end; ++t) {
        uint16_t *x = self->x + t * self->H;
        generate_inputs(self->token_key, t, t + 1, self->H, x);
        for (int64_t e = 0; e < self->n_experts; ++e) {
            const uint16_t *row = self->weight + e * self->H;
            float sums[8] = {0};
            for (int64_t h = 0; h < self->H; ++h) sums[h % 8] += from_bf16(x[h]) * from_bf16(row[h]);
            float sum = 0;
            for (int i = 0; i < 8; ++i) sum += sums[i];
            self->logits[t * self->n_experts + e] = sum;
        }
    }
}

/* Adds the top_k experts of one token to the load. */
static void calibration_choose(struct calibration *self, const float *logits)
{
    double previous = INFINITY;
    for (int32_t a = 0; a < self->top_k; ++a) {
        double best = -INFINITY;
        int32_t chosen = 0;
        for (int32_t e = 0; e < self->n_experts; ++e) {
            double key = logits[e] + self->bias[e];
            if (key > best && key < previous) {
                best = key;
                chosen = e;
            }
        }
        ++self->load[chosen];
        previous = best;
    }
}

/* The score of a logit, to within a few percent and by exact operations only: tanh and softplus as quotients and roots.
 */
static float score_value(enum generate_score score, float logit)
{
    float y = 0.5f * logit;
    if (score == GENERATE_SCORE_SIGMOID) {
        float bounded = y > 3 ? 3 : y < -3 ? -3 : y, square = bounded * bounded;
        return 0.5f + 0.5f * bounded * (27 + square) / (27 + 9 * square);
    }
    if (score == GENERATE_SCORE_SQRT_SOFTPLUS) return sqrtf(y + sqrtf(y * y + 0.48f));
    return logit;
}

/* Moves the bias of every expert towards its target share, in ever smaller steps; scores spread less than logits. */
static void calibration_run(struct calibration *self, enum generate_score score)
{
    double step = score == GENERATE_SCORE_LOGIT ? 0.5 : 0.125;
    for (int64_t i = 0; i < (int64_t)CALIBRATION_TOKENS * self->n_experts; ++i)
        self->logits[i] = score_value(score, self->logits[i]);
    for (int round = 0; round < CALIBRATION_ROUNDS; ++round) {
        memset(self->load, 0, (size_t)self->n_experts * sizeof *self->load);
        for (int64_t t = 0; t < CALIBRATION_TOKENS; ++t) calibration_choose(self, self->logits + t * self->n_experts);
        double mean = 0;
        for (int32_t e = 0; e < self->n_experts; ++e) {
            double share = (double)self->load[e] / CALIBRATION_TOKENS;
            self->bias[e] += step * (self->target[e] - share) / (self->target[e] + share) / (1 + round / 10);
            mean += self->bias[e] / self->n_experts;
        }
        for (int32_t e = 0; e < self->n_experts; ++e) self->bias[e] -= mean;
    }
}

int generate_router(uint64_t seed, int64_t layer, int32_t n_experts, int32_t top_k, int64_t H,
                    enum generate_score score, int32_t n_threads, uint16_t *weight, uint16_t *bias)
{
    size_t E = (size_t)n_experts;
    struct calibration self = {.H = H, .n_experts = n_experts, .top_k = top_k, .weight = weight};
    int32_t *order = malloc(E * sizeof *order);
    self.token_key = generate_key(seed, GENERATE_ROUTER_TOKENS, layer);
    self.x = calloc((size_t)H * CALIBRATION_TOKENS, sizeof *self.x);
    self.logits = calloc(E * CALIBRATION_TOKENS, sizeof *self.logits);
    self.bias = calloc(E, sizeof *self.bias);
    self.target = calloc(E, sizeof *self.target);
    self.load = calloc(E, sizeof *self.load);
    int is_complete = order && self.x && self.logits && self.bias && self.target && self.load;
    if (is_complete) {
        router_weights(generate_key(seed, GENERATE_ROUTER, layer), n_experts, H, weight);
        generate_order(generate_key(seed, GENERATE_ROUTER_ORDER, layer), n_experts, order);
        router_targets(order, n_experts, top_k, self.target);
        parallel_for(n_threads, CALIBRATION_TOKENS, calibration_logits, &self);
        calibration_run(&self, score);
        for (size_t e = 0; e < E; ++e) bias[e] = to_bf16((float)self.bias[e]);
    }
    free(order);
    free(self.x);
    free(self.logits);
    free(self.bias);
    free(self.target);
    free(self.load);
    return is_complete;
}
