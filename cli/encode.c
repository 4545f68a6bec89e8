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

static void loss_add(moe4_mxfp4_loss *sum, const moe4_mxfp4_loss *loss)
{
    sum->squared += loss->squared;
    sum->squared_error += loss->squared_error;
    sum->n_blocks += loss->n_blocks;
    sum->n_saturated += loss->n_saturated;
    sum->n_zero += loss->n_zero;
    sum->n_nan += loss->n_nan;
}

static double relative_error(const moe4_mxfp4_loss *loss)
{
    return loss->squared > 0 ? sqrt(loss->squared_error / loss->squared) : 0;
}

static double saturated_share(const moe4_mxfp4_loss *loss)
{
    return loss->n_blocks ? (double)loss->n_saturated / (double)(loss->n_blocks * BLOCK) : 0;
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

/* ---- Rows -------------------------------------------------------------------------------------------------------- */

struct encode_task {
    struct encoder *encoder;
    const struct dense_matrix *matrix;
    const struct slab *whole; /* the matrix in memory; NULL = read by pieces */
    uint8_t *codes, *scales;
};

/* What one thread works with. */
struct encode_lane {
    moe4_context *context;
    struct slab slab; /* a piece of the matrix */
    int code;
    int64_t n_checked, wrong_row, wrong_block; /* against the oracle; -1 = none */
};

static const void *row_of(const struct slab *slab, int64_t i)
{
    return (const char *)slab->data + i * slab->K * (slab->is_bf16 ? 2 : 4);
}

/* A block of a row as f32. */
static void block_widen(const struct slab *slab, const void *row, int64_t block, float x[BLOCK])
{
    for (int64_t i = block * BLOCK, end = i + BLOCK; i < end; ++i)
        *x++ = (float)ref_load(row, slab->is_bf16 ? MOE4_DTYPE_BF16 : MOE4_DTYPE_F32, i);
}

static void row_check(const struct encode_task *task, struct encode_lane *lane, const struct slab *slab,
                      const void *row, int64_t i)
{
    int64_t n_blocks = slab->K / BLOCK;
    float x[BLOCK];
    ++lane->n_checked;
    for (int64_t b = 0, at = i * n_blocks; b < n_blocks; ++b, ++at) {
        block_widen(slab, row, b, x);
        if (block_agrees(task->encoder, x, task->codes + at * CODES, task->scales[at])) continue;
        lane->wrong_row = i;
        lane->wrong_block = b;
        return;
    }
}

/* Whether row i is one of those that the oracle sees: so many, evenly spaced from the first to the last. */
static int is_checked(const struct encode_task *task, int64_t i)
{
    int64_t last = task->matrix->rows - 1, n = task->encoder->n_checked_rows;
    if (n > last) return 1;
    if (n < 2) return n && !i;
    int64_t c = (i * (n - 1) + last - 1) / last; /* the first of them from row i on is row c * last / (n - 1) */
    return c * last / (n - 1) == i;
}

/* Rows that the slab holds from its row `at` on, which are the matrix's from `first`. */
static void rows_encode(const struct encode_task *task, struct encode_lane *lane, const struct slab *slab, int64_t at,
                        int64_t first, int64_t end)
{
    const struct encoder *self = task->encoder;
    int64_t n_blocks = slab->K / BLOCK;
    for (int64_t i = first; i < end; ++i, ++at) {
        const void *row = row_of(slab, at);
        uint8_t *codes = task->codes + i * n_blocks * CODES, *scales = task->scales + i * n_blocks;
        moe4_mxfp4_loss *loss = &self->losses[i];
        *loss = (moe4_mxfp4_loss){0};
        if (slab->is_bf16)
            moe4_mxfp4_quantize_bf16_measured(row, n_blocks, self->rule, codes, scales, loss);
        else
            moe4_mxfp4_quantize_measured(row, n_blocks, self->rule, codes, scales, loss);
        if (is_checked(task, i)) row_check(task, lane, slab, row, i);
    }
}

/* The part of the rows that is one lane's, in pieces that stay in a core's cache between being read and encoded. */
static void lane_run(void *user, int64_t index, int64_t index_end)
{
    enum { PIECE_BYTES = 256 << 10 };
    const struct encode_task *task = user;
    const struct dense_matrix *matrix = task->matrix;
    const int64_t n_lanes = task->encoder->n_lanes, at_once = PIECE_BYTES / (2 * matrix->K) + 1;
    for (; index < index_end; ++index) {
        struct encode_lane *lane = &task->encoder->lanes[index];
        int64_t first = matrix->rows * index / n_lanes, end = matrix->rows * (index + 1) / n_lanes;
        if (task->whole) {
            rows_encode(task, lane, task->whole, first, first, end);
            continue;
        }
        for (int64_t next; !lane->code && first < end; first = next) {
            next = end - first < at_once ? end : first + at_once;
            lane->code = slab_read(lane->context, matrix, first, next - first, &lane->slab);
            if (!lane->code) rows_encode(task, lane, &lane->slab, 0, first, next);
        }
    }
}

static int lanes_prepare(struct encoder *self)
{
    int code = EXIT_OK;
    if (!self->lanes) {
        code = allocate(&self->lanes, self->n_threads, sizeof *self->lanes, "threads");
        if (code) return code;
        memset(self->lanes, 0, (size_t)self->n_threads * sizeof *self->lanes);
    }
    for (; !code && self->n_lanes < self->n_threads; self->n_lanes += !code) {
        moe4_context_info info = MOE4_CONTEXT_INFO_INIT;
        code = context_open_simple(1, &self->lanes[self->n_lanes].context, &info);
    }
    for (int32_t i = 0; i < self->n_lanes; ++i) {
        self->lanes[i].code = EXIT_OK;
        self->lanes[i].n_checked = 0;
        self->lanes[i].wrong_row = -1;
    }
    return code;
}

static int lanes_close(struct encoder *self, const char *name)
{
    for (int32_t i = 0; i < self->n_lanes; ++i) {
        const struct encode_lane *lane = &self->lanes[i];
        if (lane->code) return lane->code;
        if (lane->wrong_row >= 0)
            return fail("%s: row %lld, block %lld is not what the oracle makes of it", name, (long long)lane->wrong_row,
                        (long long)lane->wrong_block);
        self->n_rows_checked += lane->n_checked;
    }
    return EXIT_OK;
}

/* ---- Entries ----------------------------------------------------------------------------------------------------- */

/* The entry of that name, which is one of the last few or new: stacked tensors of a layer come in turns. */
static moe4_mxfp4_loss *entry_of(struct encoder *self, const char *name)
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

int encode_matrix(struct encoder *self, const struct dense_matrix *matrix, uint8_t *codes, uint8_t *scales)
{
    const char *name = matrix->tensor->name;
    struct encode_task task = {self, matrix, matrix->is_transposed ? &self->whole : NULL, codes, scales};
    int code = buffer_reserve(&self->losses, &self->losses_room, matrix->rows * (int64_t)sizeof *self->losses, "sums");
    if (!code) code = lanes_prepare(self);
    if (!code && task.whole) code = slab_read(self->lanes[0].context, matrix, 0, matrix->rows, &self->whole);
    moe4_mxfp4_loss *loss = code ? NULL : entry_of(self, name);
    if (!loss) return code ? code : fail("out of memory: %s", name);
    parallel_for(self->n_lanes, self->n_lanes, lane_run, &task);
    for (int64_t i = 0; i < matrix->rows; ++i) loss_add(loss, &self->losses[i]);
    return lanes_close(self, name);
}

/* ---- Reports ----------------------------------------------------------------------------------------------------- */

static int by_error(const void *a, const void *b)
{
    const struct encode_entry *const *first = a, *const *second = b;
    double difference = relative_error(&(*second)->loss) - relative_error(&(*first)->loss);
    return difference > 0 ? 1 : difference < 0 ? -1 : strcmp((*first)->name, (*second)->name);
}

static void print_loss(const char *name, const moe4_mxfp4_loss *loss)
{
    printf("  %-56s %9.5f %10.5f%% %12lld\n", name, relative_error(loss), 100 * saturated_share(loss),
           (long long)loss->n_zero);
    if (loss->n_nan) printf("    %s with NaN or infinity\n", human_plural(loss->n_nan, "block").text);
}

void encoder_report(const struct encoder *self)
{
    moe4_mxfp4_loss total = {0};
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

static json_t *loss_json(const moe4_mxfp4_loss *loss)
{
    json_t *object = json_object();
    json_put_real(object, "relative_error", relative_error(loss));
    json_put_real(object, "saturated_share", saturated_share(loss));
    json_put_integer(object, "blocks", loss->n_blocks);
    json_put_integer(object, "zero_blocks", loss->n_zero);
    json_put_integer(object, "nan_blocks", loss->n_nan);
    return object;
}

void encoder_json(const struct encoder *self, json_t *object)
{
    moe4_mxfp4_loss total = {0};
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
    for (int32_t i = 0; i < self->n_lanes; ++i) {
        slab_release(&self->lanes[i].slab);
        moe4_context_destroy(self->lanes[i].context);
    }
    free(self->lanes);
    slab_release(&self->whole);
    free(self->entries);
    free(self->losses);
}
