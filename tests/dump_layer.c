/* dump_layer PATH LAYER: one MoE layer of a checkpoint as numbers, for tests in other languages.
 *
 * Standard output: a line of JSON with sizes and words, then float32 values: each expert's gate/up matrix in the file's
 * row order, its bias (zeros without one), its down matrix, its bias; after all experts the router's weight, its bias
 * and the selection bias (zeros likewise).  Public headers only; decoding is this program's own. */
#include <moe4/io.h>

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const float magnitudes[] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};

static void put(float value)
{
    fwrite(&value, sizeof value, 1, stdout);
}

/* [rows, K], a row after the other. */
static void put_matrix(const moe4_matrix *matrix, int64_t rows, int64_t K)
{
    for (int64_t row = 0; row < rows; row++)
        for (int64_t k = 0; k < K; k++) {
            int code = matrix->codes[(row * K + k) / 2] >> (k % 2 * 4) & 15;
            int scale = matrix->scales[row * (K / 32) + k / 32];
            float magnitude = scale == 255 ? NAN : ldexpf(magnitudes[code & 7], scale - 127);
            put(code & 8 ? -magnitude : magnitude);
        }
}

static float half_value(uint16_t bits)
{
    int exponent = bits >> 10 & 31, mantissa = bits & 1023;
    float magnitude = exponent == 31 ? (mantissa ? NAN : INFINITY)
                      : exponent     ? ldexpf((float)(1024 + mantissa), exponent - 25)
                                     : ldexpf((float)mantissa, -24);
    return bits >> 15 ? -magnitude : magnitude;
}

static float value_at(const void *data, moe4_dtype dtype, int64_t i)
{
    float value;
    uint16_t half;
    if (dtype == MOE4_DTYPE_F32) {
        memcpy(&value, (const char *)data + i * (int64_t)sizeof value, sizeof value);
        return value;
    }
    memcpy(&half, (const char *)data + i * (int64_t)sizeof half, sizeof half);
    if (dtype == MOE4_DTYPE_F16) return half_value(half);
    uint32_t bits = (uint32_t)half << 16;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static void put_values(const void *data, moe4_dtype dtype, int64_t n)
{
    for (int64_t i = 0; i < n; i++) put(data ? value_at(data, dtype, i) : 0.0f);
}

static int dump(moe4_context *context, moe4_layer_reader *reader)
{
    const moe4_layer_config *config = moe4_layer_reader_config(reader);
    int64_t H = config->hidden_size, I = config->intermediate_size;
    int64_t width = config->router.hidden_size ? config->router.hidden_size : H;
    printf("{\"n_experts\": %" PRId32 ", \"hidden_size\": %" PRId64 ", \"intermediate_size\": %" PRId64
           ", \"router_size\": %" PRId64 ", \"gate_up\": %d, \"activation\": %d, \"routing\": %d, \"top_k\": %" PRId32
           ", \"limit\": %.9g, \"scaling_factor\": %.9g}\n",
           config->n_experts, H, I, width, (int)config->gate_up, (int)config->activation, (int)config->routing.method,
           config->routing.top_k, (double)config->limit.value, (double)config->routing.scaling_factor);
    for (int32_t e = 0; e < config->n_local_experts; e++) {
        moe4_expert expert;
        if (moe4_layer_reader_read(context, reader, e, &expert) != MOE4_OK) return 0;
        put_matrix(&expert.gate_up, 2 * I, H);
        put_values(expert.gate_up.bias, expert.gate_up.bias_dtype, 2 * I);
        put_matrix(&expert.down, H, I);
        put_values(expert.down.bias, expert.down.bias_dtype, H);
    }
    put_values(config->router.weight, config->router.weight_dtype, config->n_experts * width);
    put_values(config->router.bias, config->router.bias_dtype, config->n_experts);
    put_values(config->routing.correction_bias, config->routing.correction_bias_dtype, config->n_experts);
    return 1;
}

int main(int argc, char **argv)
{
    moe4_context_config threads = MOE4_CONTEXT_CONFIG_INIT;
    moe4_context *context = NULL;
    moe4_checkpoint *checkpoint = NULL;
    moe4_layer_reader *reader = NULL;
    if (argc != 3) return 2;
    threads.n_threads = 1;
    int good =
        moe4_context_create(&threads, &context) == MOE4_OK &&
        moe4_checkpoint_open(context, argv[1], &checkpoint) == MOE4_OK &&
        moe4_layer_reader_open(context, checkpoint, (int32_t)strtol(argv[2], NULL, 10), NULL, &reader) == MOE4_OK &&
        dump(context, reader);
    if (!good) fprintf(stderr, "dump_layer: %s\n", moe4_context_message(context));
    moe4_layer_reader_close(reader);
    moe4_checkpoint_close(checkpoint);
    moe4_context_destroy(context);
    return !good;
}
