/* What the files of the oracle share. */
#ifndef MOE4_REF_INTERNAL_H
#define MOE4_REF_INTERNAL_H

#include "ref.h"

/* Zeroed memory; ends the process when there is none.  Released with free. */
void *ref_allocate(int64_t count, size_t element_bytes);

/* What one sum of products and its error bound are made of. */
typedef struct ref_sum {
    double value;     /* sum x w + b */
    double magnitude; /* sum |x w| + |b| */
    double x, w;      /* sum |x|, sum |w|, for hardware that flushes subnormals */
} ref_sum;

ref_sum ref_dot(const double *x, const double *w, int64_t K, double bias);

/* E of a sum over K products. */
double ref_sum_bound(const ref_sum *sum, int64_t K, const ref_arithmetic *arithmetic);

/* Weights [K] of one row of an MXFP4 matrix or of the router, and its bias (0 without one). */
void ref_matrix_row(const moe4_matrix *matrix, int64_t K, int64_t row, double *w, double *bias);
void ref_router_row(const moe4_router *router, int64_t K, int64_t row, double *w, double *bias);

/* The gate/up GEMM of one expert on n rows x [n, H], an intermediate column at a time, so that each weight row is
 * decoded once for all of them. */
typedef struct ref_columns {
    const moe4_layer_config *config;
    const moe4_expert *expert;
    const double *x;
    int64_t n;
    ref_sum *gate, *up; /* [n] of the column last computed; gate stays zero without a gate */
    double *w;
} ref_columns;

ref_columns ref_columns_create(const moe4_layer_config *config, const moe4_expert *expert, const double *x, int64_t n);
void ref_columns_compute(ref_columns *columns, int64_t i);
void ref_columns_destroy(ref_columns *columns);

/* Sizes with their defaults filled in. */
int64_t ref_output_size(const moe4_layer_config *config);
int64_t ref_router_size(const moe4_layer_config *config);

/* Quantises x [n] with the mode's rule for intermediates and puts the values that gemm2 sees in its place. */
void ref_requantize(ref_mode mode, double *x, int64_t n);

enum {
    REF_MX_BLOCK = 32,  /* elements that share an E8M0 scale, or int8's f32 one */
    REF_FP8_GROUP = 128 /* intermediate columns that share an f32 scale */
};

/* E8M0 byte that the MXFP8 rule gives a block of this largest magnitude; f32 scales of the fp8 and int8 rules. */
unsigned ref_mxfp8_scale(double amax);
float ref_fp8_scale(double amax);
float ref_int8_scale(double amax);
/* Code of x under a finite scale. */
unsigned ref_mxfp8_code(double x, unsigned scale);
unsigned ref_fp8_code(double x, float scale);
int ref_int8_code(double x, float scale);

#endif
