#include "expert_output.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "command.h"
#include "dense.h"
#include "memory.h"
#include "message.h"
#include "rearrange.h"
#include "tensor.h"

enum { MAX_NAME = 640, BLOCK = 32, BLOCK_BYTES = 16 };

struct expert_output expert_output_begin(struct output *output, const struct storage *storage, struct feed feed)
{
    return (struct expert_output){.output = output, .storage = storage, .feed = feed, .layer = -1};
}

static int open_layer(struct expert_output *self, int32_t layer)
{
    if (self->layer == layer) return EXIT_OK;
    self->layer = -1;
    int code = self->feed.open(self->feed.user, layer, &self->config);
    if (!code) self->layer = layer;
    return code;
}

/* ---- Tensors ----------------------------------------------------------------------------------------------------- */

/* The projections that one tensor holds. */
struct group {
    const char *word; /* in its name */
    enum projection_role first, last;
};

static int32_t groups_list(const struct storage *storage, const char *base, struct group groups[N_PROJECTIONS])
{
    if (storage->arrangement == ARRANGED_FUSED) {
        groups[0] = (struct group){storage->words[0], ROLE_GATE, ROLE_UP};
        groups[1] = (struct group){storage->words[1], ROLE_DOWN, ROLE_DOWN};
        return 2;
    }
    for (int role = 0; role < N_PROJECTIONS; ++role) {
        enum projection_role one = (enum projection_role)role;
        groups[role] = (struct group){storage->words ? storage->words[role] : projection_word(base, one), one, one};
    }
    return N_PROJECTIONS;
}

static int64_t role_K(const moe4_layer_config *config, enum projection_role role)
{
    return role == ROLE_DOWN ? config->intermediate_size : config->hidden_size;
}

static int64_t group_rows(const moe4_layer_config *config, const struct group *group)
{
    return (group->last - group->first + 1) * row_place(config, group->first).count;
}

/* Type and shape behind the number of experts. */
static const char *part_shape(const struct expert_output *self, const struct group *group, enum matrix_part part,
                              const moe4_matrix *matrix, int64_t *shape, int32_t *rank)
{
    const struct storage *storage = self->storage;
    int64_t K = role_K(self->config, group->first);
    shape[0] = group_rows(self->config, group);
    *rank = 1;
    if (part == PART_BIAS) return dtype_word(matrix->bias_dtype);
    if (part == PART_SCALES || !storage->code_elements)
        shape[(*rank)++] = K / BLOCK;
    else
        shape[(*rank)++] = K / storage->code_elements;
    if (part == PART_CODES && !storage->code_elements) shape[(*rank)++] = BLOCK_BYTES;
    return storage->dtypes[part];
}

/* The tensors of a unit: of expert e, or with e = -1 of all.  produce goes through them in the same order. */
static int plan_unit(struct expert_output *self, const char *base, int32_t e, const moe4_expert *sample)
{
    struct group groups[N_PROJECTIONS];
    int32_t n_groups = groups_list(self->storage, base, groups);
    struct output_unit *unit = output_add_unit(self->output, UNIT_EXPERTS);
    int code = unit ? EXIT_OK : EXIT_FAILED;
    if (unit) {
        unit->layer = self->layer;
        unit->expert = e;
    }
    for (int32_t g = 0; !code && g < n_groups; ++g)
        for (int part = PART_CODES; !code && part < N_PARTS; ++part) {
            const moe4_matrix *matrix = projection_matrix(sample, groups[g].first);
            int64_t shape[4] = {self->config->n_experts};
            int32_t rank, leading = e < 0;
            char name[MAX_NAME], number[16] = "";
            if (part == PART_BIAS && !matrix->bias) continue;
            const char *dtype = part_shape(self, &groups[g], (enum matrix_part)part, matrix, shape + leading, &rank);
            if (e >= 0) snprintf(number, sizeof number, "%d.", e);
            snprintf(name, sizeof name, "%s%s%s%s", base, number, groups[g].word, self->storage->ends[part]);
            code = output_add(self->output, name, dtype, rank + leading, shape);
        }
    return code;
}

int expert_output_plan(struct expert_output *self, int32_t layer, const char *base)
{
    moe4_expert sample;
    int code = open_layer(self, layer);
    if (!code) code = self->feed.sample(self->feed.user, &sample);
    if (code) return code;
    const char *model = self->storage->model_type;
    if (self->config->gate_up == MOE4_GATE_UP_NONE)
        return fail("layer %d: experts without a gate: no layout that can be written has them", layer);
    if (model && !strcmp(model, "deepseek_v4") && (sample.gate_up.bias || sample.down.bias))
        return fail("layer %d: the biases of its experts would be lost: the layout deepseek-v4 has none", layer);
    if (self->storage->arrangement != ARRANGED_APART) return plan_unit(self, base, -1, &sample);
    for (int32_t e = 0; !code && e < self->config->n_experts; ++e) code = plan_unit(self, base, e, &sample);
    return code;
}

/* ---- Bytes ------------------------------------------------------------------------------------------------------- */

/* The rows of a tensor that are one expert's: where they are, or in the buffer. */
static int gather(struct expert_output *self, const moe4_expert *expert, const struct group *group,
                  enum matrix_part part, const char **rows)
{
    const moe4_matrix *matrix = projection_matrix(expert, group->first);
    int64_t K = role_K(self->config, group->first), step = group->last - group->first + 1;
    int64_t n_bytes = group_rows(self->config, group) * row_bytes(matrix, part, K);
    *rows = rows_in_place(matrix, part, K, row_place(self->config, group->first), step);
    if (*rows) return EXIT_OK;
    int code = buffer_reserve(&self->buffer, &self->buffer_room, n_bytes, "rows of an expert");
    for (int role = (int)group->first; !code && role <= (int)group->last; ++role)
        rows_gather(matrix, part, K, row_place(self->config, (enum projection_role)role), role - (int)group->first,
                    step, self->buffer);
    *rows = self->buffer;
    return code;
}

/* One expert of the unit's tensors, which hold n_experts. */
static int produce_expert(struct expert_output *self, const struct output_unit *unit, int32_t e, int32_t at,
                          int32_t n_experts)
{
    struct group groups[N_PROJECTIONS];
    moe4_expert expert;
    int32_t index = 0, n_groups = groups_list(self->storage, "", groups);
    int code = self->feed.read(self->feed.user, e, &expert);
    for (int32_t g = 0; !code && g < n_groups; ++g)
        for (int part = PART_CODES; !code && part < N_PARTS; ++part) {
            if (part == PART_BIAS && !projection_matrix(&expert, groups[g].first)->bias) continue;
            int64_t n_bytes = self->output->tensors[unit->first + index].n_bytes / n_experts;
            const char *rows;
            code = gather(self, &expert, &groups[g], (enum matrix_part)part, &rows);
            if (!code) code = output_put(self->output, unit, index++, at * n_bytes, n_bytes, rows);
        }
    return code;
}

int expert_output_produce(struct expert_output *self, const struct output_unit *unit)
{
    int code = open_layer(self, unit->layer);
    if (code) return code;
    if (unit->expert >= 0) return produce_expert(self, unit, unit->expert, 0, 1);
    int32_t E = self->config->n_experts;
    for (int32_t e = 0; !code && e < E; ++e) code = produce_expert(self, unit, e, e, E);
    return code;
}

void expert_output_release(struct expert_output *self)
{
    free(self->buffer);
    self->buffer = NULL;
}
