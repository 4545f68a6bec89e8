#include "encode.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "command.h"
#include "memory.h"
#include "message.h"
#include "parallel.h"
#include "ref.h"
#include "report.h"

enum { BLOCK = 32, CODES = 16, MOST_SHOWN = 20 };

/* ---- Loss -------------------------------------------------------------------------------------------------------- */

static void loss_add(struct encode_loss *sum, const struct encode_loss *loss)
{
    sum->squared += loss->squared;
    sum->squared_error += loss->squared_error;
    sum->n_elements += loss->n_elements;
    sum->n_saturated += loss->n_saturated;
    sum->n_blocks += loss->n_blocks;
    sum->n_zero += loss->n_zero;
    sum->n_nan += loss->n_nan;
}

/* 2^(scale-127), of bytes below 255. */
static double scale_value(uint8_t scale)
{
    uint64_t bits = (uint64_t)(scale - 127 + 1023) << 52;
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static int is_zero_block(const uint8_t *codes)
{
    uint8_t any = 0;
    for (int j = 0; j < CODES; ++j) any |= codes[j];
    return !(any & 0x77);
}

/* In units of the scale, of which `units` are the codes: finite whatever the scale is, and near enough in f32. */
static void block_measure(const float *x, const uint8_t *codes, uint8_t scale, const float *units,
                          struct encode_loss *loss)
{
    float errors[BLOCK], squares[BLOCK];
    int32_t saturated[BLOCK];
    ++loss->n_blocks;
    loss->n_elements += BLOCK;
    if (scale == 0xFF) {
        ++loss->n_nan;
        return;
    }
    const float inverse = (float)scale_value((uint8_t)(254 - scale));
    const double unit = scale_value(scale);
    for (int i = 0; i < BLOCK; ++i) {
        float value = x[i] * inverse, error = value - units[i];
        errors[i] = error * error;
        squares[i] = value * value;
        saturated[i] = fabsf(value) > 6;
    }
    for (int n = BLOCK / 2; n > 0; n /= 2)
        for (int i = 0; i < n; ++i) {
            errors[i] += errors[i + n];
            squares[i] += squares[i + n];
            saturated[i] += saturated[i + n];
        }
    loss->squared_error += unit * unit * (double)errors[0];
    loss->squared += unit * unit * (double)squares[0];
    loss->n_saturated += saturated[0];
    loss->n_zero += is_zero_block(codes);
}

static double relative_error(const struct encode_loss *loss)
{
    return loss->squared > 0 ? sqrt(loss->squared_error / loss->squared) : 0;
}

static double share(int64_t part, int64_t whole)
{
    return whole ? (double)part / (double)whole : 0;
}

/* ---- Rows -------------------------------------------------------------------------------------------------------- */

struct encode_task {
    struct encoder *encoder;
    const struct slab *slab;
    uint8_t *codes, *scales;
};

static const void *row_of(const struct encode_task *task, int64_t i)
{
    return (const char *)task->slab->data + i * task->slab->K * (task->slab->is_bf16 ? 2 : 4);
}

/* A block of a row as f32. */
static const float *block_widen(const struct encode_task *task, const void *row, int64_t block, float buffer[BLOCK])
{
    if (!task->slab->is_bf16) return (const float *)row + block * BLOCK;
    for (int i = 0; i < BLOCK; ++i) {
        uint32_t bits = (uint32_t)((const uint16_t *)row)[block * BLOCK + i] << 16;
        memcpy(&buffer[i], &bits, sizeof bits);
    }
    return buffer;
}

static void row_measure(const struct encode_task *task, const void *row, const uint8_t *codes, const uint8_t *scales,
                        struct encode_loss *loss)
{
    enum { AT_ONCE = 16 };
    int64_t n_blocks = task->slab->K / BLOCK;
    uint8_t ones[AT_ONCE];
    float units[AT_ONCE * BLOCK], buffer[BLOCK];
    memset(ones, 127, sizeof ones);
    *loss = (struct encode_loss){0};
    for (int64_t b = 0; b < n_blocks; ++b) {
        int64_t at = b % AT_ONCE, rest = n_blocks - b;
        if (!at) moe4_mxfp4_dequantize(codes + b * CODES, ones, rest < AT_ONCE ? rest : AT_ONCE, units);
        block_measure(block_widen(task, row, b, buffer), codes + b * CODES, scales[b], units + at * BLOCK, loss);
    }
}

static void task_run(void *user, int64_t first, int64_t end)
{
    const struct encode_task *task = user;
    struct encoder *self = task->encoder;
    int64_t n_blocks = task->slab->K / BLOCK;
    for (int64_t i = first; i < end; ++i) {
        const void *row = row_of(task, i);
        uint8_t *codes = task->codes + i * n_blocks * CODES, *scales = task->scales + i * n_blocks;
        if (task->slab->is_bf16)
            moe4_mxfp4_quantize_bf16(row, n_blocks, self->rule, codes, scales);
        else
            moe4_mxfp4_quantize(row, n_blocks, self->rule, codes, scales);
        row_measure(task, row, codes, scales, &self->losses[i]);
    }
}

/* ---- The oracle -------------------------------------------------------------------------------------------------- */

static double block_error(const double *x, const uint8_t *codes, uint8_t scale)
{
    moe4_matrix matrix = {.codes = codes, .scales = &scale};
    double sum = 0;
    for (int k = 0; k < BLOCK; ++k) {
        double error = x[k] - ref_weight(&matrix, BLOCK, 0, k);
        sum += error * error;
    }
    return sum;
}

/* Of two scales of equal error either is right. */
static int block_agrees(const struct encoder *self, const float *x, const uint8_t *codes, uint8_t scale)
{
    double exact[BLOCK];
    uint8_t wanted[CODES], wanted_scale;
    for (int i = 0; i < BLOCK; ++i) exact[i] = (double)x[i];
    ref_quantize_mxfp4(exact, BLOCK, self->rule, wanted, &wanted_scale);
    if (scale == wanted_scale) return !memcmp(codes, wanted, sizeof wanted);
    return self->rule == MOE4_SCALE_MSE && scale != 0xFF && wanted_scale != 0xFF &&
           block_error(exact, codes, scale) <= block_error(exact, wanted, wanted_scale) * (1 + 1e-5);
}

static int rows_check(struct encoder *self, const struct encode_task *task, const char *name)
{
    int64_t n_blocks = task->slab->K / BLOCK, n = task->slab->rows;
    int64_t n_checked = n < self->n_checked_rows ? n : self->n_checked_rows;
    for (int64_t c = 0; c < n_checked; ++c) {
        int64_t i = n_checked > 1 ? c * (n - 1) / (n_checked - 1) : 0;
        for (int64_t b = 0; b < n_blocks; ++b) {
            float buffer[BLOCK];
            int64_t at = i * n_blocks + b;
            if (!block_agrees(self, block_widen(task, row_of(task, i), b, buffer), task->codes + at * CODES,
                              task->scales[at]))
                return fail("%s: row %lld, block %lld is not what the oracle makes of it", name, (long long)i,
                            (long long)b);
        }
    }
    self->n_rows_checked += n_checked;
    return EXIT_OK;
}

/* ---- Entries ----------------------------------------------------------------------------------------------------- */

/* The entry of that name, which is one of the last few or new: stacked tensors of a layer come in turns. */
static struct encode_loss *entry_of(struct encoder *self, const char *name)
{
    enum { LAST_FEW = 4 };
    for (int64_t i = self->n_entries - 1; i >= 0 && i >= self->n_entries - LAST_FEW; --i)
        if (!strcmp(self->entries[i].name, name)) return &self->entries[i].loss;
    if (self->n_entries == self->entries_room) {
        int64_t room = self->entries_room ? 2 * self->entries_room : 64;
        struct encode_entry *entries = reallocarray(self->entries, (size_t)room, sizeof *entries);
        if (!entries) return NULL;
        self->entries = entries;
        self->entries_room = room;
    }
    struct encode_entry *entry = &self->entries[self->n_entries];
    *entry = (struct encode_entry){.name = strdup(name)};
    if (!entry->name) return NULL;
    ++self->n_entries;
    return &entry->loss;
}

int encode_slab(struct encoder *self, const struct slab *slab, const char *name, uint8_t *codes, uint8_t *scales)
{
    struct encode_task task = {self, slab, codes, scales};
    int code = buffer_reserve(&self->losses, &self->losses_room, slab->rows * (int64_t)sizeof *self->losses, "sums");
    struct encode_loss *loss = code ? NULL : entry_of(self, name);
    if (!loss) return code ? code : fail("out of memory: %s", name);
    parallel_for(self->n_threads, slab->rows, task_run, &task);
    for (int64_t i = 0; i < slab->rows; ++i) loss_add(loss, &self->losses[i]);
    return rows_check(self, &task, name);
}

/* ---- Reports ----------------------------------------------------------------------------------------------------- */

static int by_error(const void *a, const void *b)
{
    const struct encode_entry *const *first = a, *const *second = b;
    double difference = relative_error(&(*second)->loss) - relative_error(&(*first)->loss);
    return difference > 0 ? 1 : difference < 0 ? -1 : strcmp((*first)->name, (*second)->name);
}

static void print_loss(const char *name, const struct encode_loss *loss)
{
    printf("  %-56s %9.5f %10.5f%% %12lld\n", name, relative_error(loss),
           100 * share(loss->n_saturated, loss->n_elements), (long long)loss->n_zero);
    if (loss->n_nan) printf("    %s with NaN or infinity\n", human_plural(loss->n_nan, "block").text);
}

void encoder_report(const struct encoder *self)
{
    struct encode_loss total = {0};
    const struct encode_entry **sorted = malloc((size_t)(self->n_entries + 1) * sizeof *sorted);
    for (int64_t i = 0; i < self->n_entries; ++i) {
        loss_add(&total, &self->entries[i].loss);
        if (sorted) sorted[i] = &self->entries[i];
    }
    if (sorted) qsort(sorted, (size_t)self->n_entries, sizeof *sorted, by_error);
    printf("\n  %-56s %9s %11s %12s\n", self->n_entries > MOST_SHOWN ? "tensors of largest error" : "tensor", "error",
           "saturated", "zero blocks");
    for (int64_t i = 0; sorted && i < self->n_entries && i < MOST_SHOWN; ++i)
        print_loss(sorted[i]->name, &sorted[i]->loss);
    print_loss("all", &total);
    if (self->n_rows_checked)
        report_field("check", "%lld rows are the oracle's to the bit", (long long)self->n_rows_checked);
    free(sorted);
}

static json_t *loss_json(const struct encode_loss *loss)
{
    json_t *object = json_object();
    json_put_real(object, "relative_error", relative_error(loss));
    json_put_real(object, "saturated_share", share(loss->n_saturated, loss->n_elements));
    json_put_integer(object, "blocks", loss->n_blocks);
    json_put_integer(object, "zero_blocks", loss->n_zero);
    json_put_integer(object, "nan_blocks", loss->n_nan);
    return object;
}

void encoder_json(const struct encoder *self, json_t *object)
{
    struct encode_loss total = {0};
    json_t *list = json_array();
    for (int64_t i = 0; i < self->n_entries; ++i) {
        json_t *entry = loss_json(&self->entries[i].loss);
        json_put_text(entry, "name", self->entries[i].name);
        json_array_append_new(list, entry);
        loss_add(&total, &self->entries[i].loss);
    }
    json_object_set_new(object, "total", loss_json(&total));
    json_object_set_new(object, "tensors", list);
    json_put_integer(object, "rows_checked", self->n_rows_checked);
}

void encoder_release(struct encoder *self)
{
    for (int64_t i = 0; i < self->n_entries; ++i) free(self->entries[i].name);
    free(self->entries);
    free(self->losses);
}
