#include "dense.h"

#include <stdlib.h>
#include <string.h>

#include "command.h"
#include "memory.h"
#include "message.h"
#include "tensor.h"

/* ---- Names ------------------------------------------------------------------------------------------------------- */

/* A number of a layer or expert; -1 for one that is too large to be that, or none. */
static int32_t parse_number(const char *text, char **end)
{
    enum { LARGEST = 99999 };
    long value = strtol(text, end, 10);
    return *end == text || value < 0 || value > LARGEST ? -1 : (int32_t)value;
}

/* "layers.7." or, of multi-token prediction, "mtp.0.". */
static void parse_layer(const char *name, struct dense_name *result)
{
    static const char *const stems[] = {"layers.", "mtp."};
    for (int i = 0; i < 2; ++i) {
        const char *found = strstr(name, stems[i]);
        char *end;
        if (!found) continue;
        result->layer = parse_number(found + strlen(stems[i]), &end);
        result->is_extra = i;
        return;
    }
}

static struct dense_name parse_expert(struct dense_name result, const char *rest)
{
    static const char *const words[][2] = {
        [ROLE_GATE] = {"gate_proj", "w1"}, [ROLE_UP] = {"up_proj", "w3"}, [ROLE_DOWN] = {"down_proj", "w2"}};
    char *end;
    result.expert = parse_number(rest, &end);
    if (*end++ != '.') return result;
    for (int role = 0; role < N_PROJECTIONS; ++role)
        for (int i = 0; i < 2; ++i) {
            size_t length = strlen(words[role][i]);
            if (strncmp(end, words[role][i], length)) continue;
            if (!strcmp(end + length, ".weight")) result.kind = DENSE_EXPERT;
            if (!strcmp(end + length, ".bias")) result.kind = DENSE_EXPERT_BIAS;
            result.role = (enum projection_role)role;
        }
    return result;
}

struct dense_name dense_parse(const char *name)
{
    static const struct {
        const char *word;
        enum dense_kind kind;
    } stacked[] = {{"gate_up_proj", DENSE_GATE_UP},
                   {"down_proj", DENSE_DOWN},
                   {"gate_up_proj_bias", DENSE_GATE_UP_BIAS},
                   {"down_proj_bias", DENSE_DOWN_BIAS}};
    static const char mark[] = ".experts.";
    struct dense_name result = {.layer = -1, .expert = -1};
    const char *found = strstr(name, mark);
    if (!found || strstr(name, "mtp.layers.")) return result; /* a model beside the model: stays as it is */
    parse_layer(name, &result);
    const char *rest = found + sizeof mark - 1;
    result.base_length = (int)(rest - name);
    if (*rest >= '0' && *rest <= '9') return parse_expert(result, rest);
    for (size_t i = 0; i < sizeof stacked / sizeof *stacked; ++i)
        if (!strcmp(rest, stacked[i].word)) result.kind = stacked[i].kind;
    return result;
}

/* ---- The model --------------------------------------------------------------------------------------------------- */

static int64_t first_integer(const json_t *config, const char *const *keys)
{
    for (; *keys; ++keys) {
        const json_t *found = config_member(config, *keys);
        if (json_is_integer(found)) return json_integer_value(found);
    }
    return 0;
}

int dense_model_read(const json_t *config, const moe4_tensor *gate_up, struct dense_model *model)
{
    static const char *const hidden[] = {"routed_expert_hidden_size", "moe_latent_size", "hidden_size", NULL};
    static const char *const intermediate[] = {"moe_intermediate_size", "intermediate_size", NULL};
    static const char *const experts[] = {"n_routed_experts", "num_local_experts", "num_experts", NULL};
    const char *model_type = json_string_value(config_member(config, "model_type"));
    *model = (struct dense_model){.H = first_integer(config, hidden),
                                  .I = first_integer(config, intermediate),
                                  .n_experts = first_integer(config, experts)};
    if (!gate_up) return EXIT_OK;
    const int64_t *shape = gate_up->shape;
    int is_gpt_oss = model_type && !strcmp(model_type, "gpt_oss");
    model->is_interleaved = is_gpt_oss;
    model->E = shape[0];
    int plain = gate_up->rank == 3 && shape[1] == 2 * model->I && shape[2] == model->H;
    model->is_transposed = gate_up->rank == 3 && shape[1] == model->H && shape[2] == 2 * model->I;
    if (plain && model->is_transposed) plain = !is_gpt_oss; /* H = 2I: as the model's own code has it */
    if (plain) model->is_transposed = 0;
    if (plain || model->is_transposed) return EXIT_OK;
    return fail("%s: shape %s, but config.json says hidden size %lld and intermediate size %lld", gate_up->name,
                shape_show(gate_up->rank, shape).text, (long long)model->H, (long long)model->I);
}

/* ---- Rows -------------------------------------------------------------------------------------------------------- */

int buffer_reserve(void *buffer, int64_t *room, int64_t bytes, const char *what)
{
    void *block;
    if (bytes <= *room) return EXIT_OK;
    memcpy(&block, buffer, sizeof block);
    free(block);
    int code = allocate(buffer, bytes, 1, what);
    *room = code ? 0 : bytes;
    return code;
}

/* [K, rows] to [rows, K], in tiles that stay in the cache. */
static void transpose(const char *from, char *to, int64_t rows, int64_t K, size_t element)
{
    enum { TILE = 32 };
    for (int64_t r0 = 0; r0 < rows; r0 += TILE)
        for (int64_t k0 = 0; k0 < K; k0 += TILE)
            for (int64_t r = r0; r < r0 + TILE && r < rows; ++r)
                for (int64_t k = k0; k < k0 + TILE && k < K; ++k)
                    memcpy(to + (size_t)(r * K + k) * element, from + (size_t)(k * rows + r) * element, element);
}

/* f16 to f32, exactly.  Plain arithmetic on bits, that the compiler vectorises. */
static void widen_f16(const uint16_t *from, float *to, int64_t count)
{
    for (int64_t i = 0; i < count; ++i) {
        uint32_t sign = (uint32_t)(from[i] & 0x8000) << 16, bits = (uint32_t)(from[i] & 0x7FFF) << 13;
        float magnitude;
        memcpy(&magnitude, &bits, sizeof bits);
        magnitude *= 0x1p112f; /* from the bias of f32 to that of f16: subnormals, too */
        memcpy(&bits, &magnitude, sizeof bits);
        bits |= sign | ((from[i] & 0x7C00) == 0x7C00 ? 0x7F800000 : 0);
        memcpy(&to[i], &bits, sizeof bits);
    }
}

int slab_read(moe4_context *context, const struct dense_matrix *matrix, int64_t first_row, int64_t rows,
              struct slab *slab)
{
    moe4_dtype dtype = dtype_named(matrix->tensor->dtype);
    int is_f16 = dtype == MOE4_DTYPE_F16, is_transposed = matrix->is_transposed;
    int64_t count = rows * matrix->K, element = dtype == MOE4_DTYPE_BF16 ? 2 : 4, stored = (int64_t)dtype_bytes(dtype);
    int64_t first = matrix->first_element + first_row * matrix->K;
    int code = buffer_reserve(&slab->data, &slab->data_room, count * element, "a matrix");
    if (!code && (is_f16 || is_transposed))
        code = buffer_reserve(&slab->raw, &slab->raw_room, count * element, "a matrix");
    if (code) return code;
    slab->rows = rows;
    slab->K = matrix->K;
    slab->is_bf16 = dtype == MOE4_DTYPE_BF16;
    void *place = is_transposed == is_f16 ? slab->data : slab->raw;
    if (moe4_tensors_read(context, matrix->tensors, matrix->tensor, first * stored, count * stored, place) != MOE4_OK)
        return fail_library(context);
    if (is_f16) widen_f16(place, is_transposed ? slab->raw : slab->data, count);
    if (is_transposed) transpose(slab->raw, slab->data, slab->rows, slab->K, (size_t)element);
    return EXIT_OK;
}

void slab_release(struct slab *slab)
{
    free(slab->data);
    free(slab->raw);
    *slab = (struct slab){0};
}
