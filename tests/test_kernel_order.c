/* The accumulation orders that kernels name, written out in scalar C: a kernel's sums are the same bits, subnormal sums
 * included.  So two CPUs whose levels name the same order agree bit for bit. */
#include <setjmp.h>
#include <stdarg.h> /* for cmocka.h, as the next two */
#include <limits.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "panel.h"
#include "ref.h"

static float flush(float value)
{
    return fpclassify(value) == FP_SUBNORMAL ? copysignf(0, value) : value;
}

/* Of a block, 32 k: x times unscaled weights. */
typedef float block_sum(const float *x, const float *w);

static float block_fma(const float *x, const float *w)
{
    float sum = 0;
    for (int k = 0; k < BLOCK_SIZE; k++) sum = fmaf(x[k], w[k], sum);
    return sum;
}

/* Of a pair the odd k first. */
static float block_vdpbf16ps(const float *x, const float *w)
{
    float sum = 0;
    for (int k = 0; k < BLOCK_SIZE; k += 2) {
        sum = flush(fmaf(flush(x[k + 1]), w[k + 1], sum));
        sum = flush(fmaf(flush(x[k]), w[k], sum));
    }
    return sum;
}

/* Even and odd k in a chain each. */
static float add_tdpbf16ps(float sum, const float *x, const float *w, float scale)
{
    float chains[2] = {0, 0};
    for (int k = 0; k < BLOCK_SIZE; k++) chains[k % 2] = flush(fmaf(flush(x[k]), w[k] * scale, chains[k % 2]));
    return flush(sum + flush(chains[0] + chains[1]));
}

/* a + b, and where that is between two floats, the one whose last bit is 1. */
static float add_odd(float a, float b)
{
    float sum = a + b, b_part = sum - a, error = (a - (sum - b_part)) + (b - b_part);
    uint32_t bits;
    memcpy(&bits, &sum, sizeof bits);
    return flush(error != 0 && !(bits & 1) ? nextafterf(sum, error > 0 ? INFINITY : -INFINITY) : sum);
}

static float block_bfmmla(const float *x, const float *w)
{
    float sum = 0;
    for (int k = 0; k < BLOCK_SIZE; k += 2)
        sum = add_odd(sum, add_odd(flush(flush(x[k]) * w[k]), flush(flush(x[k + 1]) * w[k + 1])));
    return sum;
}

static float add_by_fma(float sum, float block, float scale)
{
    return fmaf(block, scale, sum);
}

static float add_scaled(float sum, float block, float scale)
{
    return sum + block * scale;
}

/* Integers below 255 * 2^(top-7) over one unit, 2^-top of a power of two that is at most the largest element. */
static int is_integer(float x, int exponent, int top)
{
    const double y = ldexp((double)x, top - exponent);
    return exponent < 40 - 127 ? x == 0 : fabs(y) < 255 << (top - 7) && y == rint(y);
}

/* Of what is no integer over `exponent`, or of all: how many there are, and the largest one's exponent. */
static int leftovers(const float *x, int exponent, int top, int *largest)
{
    int n = 0;
    *largest = -127;
    for (int k = 0; k < BLOCK_SIZE; k++) {
        if (exponent != INT_MAX && is_integer(x[k], exponent, top)) continue;
        n++;
        if (fabsf(x[k]) >= 0x1p-126f && ilogbf(x[k]) > *largest) *largest = ilogbf(x[k]);
    }
    return n;
}

/* Then the leftovers, those of even k first.  Beside more than one, the unit is that of the largest of them, if that
 * leaves fewer. */
static float add_integers(float sum, const float *x, const float *w, float scale, int top)
{
    int exponent, next, unused;
    double block = 0;
    leftovers(x, INT_MAX, top, &exponent);
    const int n = leftovers(x, exponent, top, &next);
    if (n > 1 && leftovers(x, next, top, &unused) < n) exponent = next;
    for (int k = 0; k < BLOCK_SIZE; k++)
        if (is_integer(x[k], exponent, top)) block += (double)x[k] * (double)w[k];
    sum = fmaf((float)block, scale, sum);
    for (int i = 0; i < BLOCK_SIZE; i++) {
        const int k = 2 * i % BLOCK_SIZE + 2 * i / BLOCK_SIZE;
        if (!is_integer(x[k], exponent, top)) sum = fmaf(x[k] * w[k], scale, sum);
    }
    return sum;
}

static float add_short_integers(float sum, const float *x, const float *w, float scale)
{
    return add_integers(sum, x, w, scale, 14);
}

static float add_long_integers(float sum, const float *x, const float *w, float scale)
{
    return add_integers(sum, x, w, scale, 21);
}

static const struct order {
    const char *name;
    block_sum *block; /* NULL = see add_block, or one chain over all k of products with scaled weights */
    float (*add)(float sum, float block, float scale);
    float (*add_block)(float sum, const float *x, const float *w, float scale);
} orders[] = {
    {"f32 chain over k: multiply, add", NULL, NULL, NULL},
    {"blocks of fma over k, scaled by fma", block_fma, add_by_fma, NULL},
    {"x: exact blocks of integers, then what is none; intermediate: blocks of fma over k; scaled by fma", NULL, NULL,
     add_short_integers},
    {"exact blocks of integers, of x 15 bits, of the intermediate 22, then what is none; scaled by fma", NULL, NULL,
     add_short_integers},
    {"exact blocks of integers of 22 bits, then what is none; scaled by fma", NULL, NULL, add_long_integers},
    {"blocks of vdpbf16ps, scaled, added", block_vdpbf16ps, add_scaled, NULL},
    {"blocks of tdpbf16ps with scaled weights, added", NULL, NULL, add_tdpbf16ps},
    {"blocks of bfmmla, scaled by fma", block_bfmmla, add_by_fma, NULL},
};

static float sum_in_order(const struct order *order, const float *x, const float *w, const float *scales, int64_t K)
{
    float sum = 0;
    for (int64_t k = 0; order->add_block && k < K; k += BLOCK_SIZE)
        sum = order->add_block(sum, x + k, w + k, scales[k / BLOCK_SIZE]);
    if (order->add_block) return sum;
    for (int64_t k = 0; order->block && k < K; k += BLOCK_SIZE)
        sum = order->add(sum, order->block(x + k, w + k), scales[k / BLOCK_SIZE]);
    for (int64_t k = 0; !order->block && k < K; k++) sum += x[k] * (w[k] * scales[k / BLOCK_SIZE]);
    return sum;
}

static const struct order *order_of(const struct kernel *kernel)
{
    size_t i = 0;
    while (i < sizeof orders / sizeof *orders && strcmp(orders[i].name, kernel->order) != 0) i++;
    if (i == sizeof orders / sizeof *orders)
        fail_msg("%s: nothing is known of its order, \"%s\"", kernel->name, kernel->order);
    return &orders[i];
}

/* A row's weights without scales, [K], then its scales, [K/32]. */
static float *row_of(const struct problem *p, int32_t row)
{
    const int64_t K = p->K;
    float *values = calloc((size_t)(K + K / BLOCK_SIZE), sizeof *values);
    for (int64_t k = 0; k < K; k++)
        values[k] = (float)ref_e2m1(p->matrix.codes[row * K / 2 + k / 2] >> (k % 2 * 4) & 15u);
    for (int64_t b = 0; b < K / BLOCK_SIZE; b++)
        values[K + b] = (float)ref_e8m0(p->matrix.scales[row * K / BLOCK_SIZE + b]);
    return values;
}

static void check_order(const struct kernel *kernel, struct problem *p)
{
    const float *sums = problem_run(kernel, p, 0, p->n_tokens);
    const struct order *order = order_of(kernel);
    float *x = calloc((size_t)p->K, sizeof *x);
    for (int32_t row = 0; row < PANEL_ROWS; row++) {
        float *w = row_of(p, row);
        for (int32_t t = 0; t < p->n_tokens; t++) {
            for (int64_t k = 0; k < p->K; k++) x[k] = (float)ref_bf16(p->x[t * p->K + k]);
            float expected = sum_in_order(order, x, w, w + p->K, p->K), got = sums[t * PANEL_ROWS + row];
            if (memcmp(&expected, &got, sizeof got) != 0)
                fail_msg("%s, K %lld: sum (%d, %d) is %a, but %a in the order \"%s\"", kernel->name, (long long)p->K, t,
                         row, (double)got, (double)expected, kernel->order);
        }
        free(w);
    }
    free(x);
}

static void check_kernels(int64_t K, int32_t n_tokens, double factor)
{
    const struct kernel *kernels[MAX_KERNELS];
    const int32_t n_kernels = runnable_kernels(kernels);
    struct problem p = problem_create(WEIGHTS_ORDINARY, K, n_tokens);
    for (int64_t i = 0; i < n_tokens * K; i++) p.x[i] = ref_to_bf16(ref_bf16(p.x[i]) * factor);
    for (int32_t i = 0; i < n_kernels; i++) check_order(kernels[i], &p);
    problem_release(&p);
}

static void test_ordinary_sums(void **state)
{
    (void)state;
    static const int64_t lengths[] = {32, 96, 544, 2880};
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++)
        for (int32_t n = 1; n <= TILE_TOKENS; n += 3) check_kernels(lengths[i], n, 1);
}

/* Some of x far smaller than the rest, or far larger, or beyond a power of two: leftovers of every kind. */
static void test_uneven_x(void **state)
{
    (void)state;
    const struct kernel *kernels[MAX_KERNELS];
    const int32_t n_kernels = runnable_kernels(kernels);
    for (int spread = 4; spread <= 220; spread += spread / 2)
        for (int32_t n = 1; n <= TILE_TOKENS; n++) {
            struct problem p = problem_create(WEIGHTS_ORDINARY, 544, n);
            struct random random = {(uint64_t)(spread * 100 + n)};
            for (int64_t i = 0; i < n * p.K; i++)
                p.x[i] =
                    ref_to_bf16(ldexp(ref_bf16(p.x[i]), (int)random_below(&random, (uint32_t)spread) - spread / 2));
            for (int32_t i = 0; i < n_kernels; i++) check_order(kernels[i], &p);
            problem_release(&p);
        }
}

/* Products, sums and activations near the smallest normal number: kept, or flushed, as the order says. */
static void test_tiny_sums(void **state)
{
    (void)state;
    for (int exponent = -118; exponent >= -128; exponent--) check_kernels(96, 3, ldexp(1, exponent));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_ordinary_sums),
        cmocka_unit_test(test_uneven_x),
        cmocka_unit_test(test_tiny_sums),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
