#include "gguf_output.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "command.h"
#include "dense.h"
#include "gguf_metadata.h"
#include "interrupt.h"
#include "memory.h"
#include "message.h"
#include "progress.h"
#include "rearrange.h"
#include "ref.h"

enum { LAYER_TENSORS = 10, GGUF_BLOCK_BYTES = 17, BLOCK = 32, MAX_FILES = 99999 };

struct path {
    char text[PATH_MAX];
};

/* Where the tensors of a layer begin, and their bytes. */
struct layer_extent {
    int32_t first_tensor;
    int64_t n_bytes;
};

/* What is being written. */
struct gguf_job {
    struct gguf_output *output;
    struct gguf_metadata metadata;
    moe4_tensor *tensors;
    char (*names)[64];
    int32_t n_tensors;
    struct layer_extent *extents;    /* one a layer, and one behind the last */
    const moe4_layer_config *config; /* of the layer that the feed is at */
    moe4_writer *writer;
    int32_t writer_first;         /* tensor of the file being written */
    char *rows, *scales, *blocks; /* of one tensor of one expert */
    int64_t rows_room, scales_room, blocks_room;
    struct progress bar;
    int64_t bytes_done;
};

/* ---- Tensors ----------------------------------------------------------------------------------------------------- */

/* The projections that one tensor holds. */
static const struct group {
    const char *word;
    enum projection_role first, last;
} groups[2][N_PROJECTIONS] = {
    [GGUF_SPLIT] = {{"ffn_gate_exps", ROLE_GATE, ROLE_GATE},
                    {"ffn_up_exps", ROLE_UP, ROLE_UP},
                    {"ffn_down_exps", ROLE_DOWN, ROLE_DOWN}},
    [GGUF_FUSED] = {{"ffn_gate_up_exps", ROLE_GATE, ROLE_UP}, {"ffn_down_exps", ROLE_DOWN, ROLE_DOWN}},
};

static const struct group *group_at(const struct gguf_job *job, int i)
{
    const struct group *group = &groups[job->output->gate_up][i];
    return i < N_PROJECTIONS && group->word ? group : NULL;
}

static int64_t role_K(const moe4_layer_config *config, enum projection_role role)
{
    return role == ROLE_DOWN ? config->intermediate_size : config->hidden_size;
}

static int64_t group_rows(const moe4_layer_config *config, const struct group *group)
{
    return (group->last - group->first + 1) * row_place(config, group->first).count;
}

static int64_t tensor_bytes(const moe4_tensor *tensor)
{
    int64_t n = 1;
    for (int32_t d = 0; d < tensor->rank; ++d) n *= tensor->shape[d];
    return strcmp(tensor->dtype, "MXFP4") ? 4 * n : n / BLOCK * GGUF_BLOCK_BYTES;
}

static void tensor_add(struct gguf_job *job, int32_t i, const char *name, const char *end, const char *dtype,
                       int32_t rank, const int64_t *shape)
{
    moe4_tensor *tensor = &job->tensors[job->n_tensors];
    snprintf(job->names[job->n_tensors], sizeof job->names[0], "blk.%d.%s%s", job->output->layers[i], name, end);
    *tensor = (moe4_tensor){.name = job->names[job->n_tensors++], .dtype = dtype, .rank = rank};
    memcpy(tensor->shape, shape, (size_t)rank * sizeof *shape);
    job->extents[i].n_bytes += tensor_bytes(tensor);
}

/* The order in which layer_write goes through them. */
static void layer_describe(struct gguf_job *job, int32_t i, const moe4_expert *sample)
{
    const moe4_layer_config *config = job->config;
    const moe4_routing *routing = &config->routing;
    int64_t E = config->n_experts;
    int64_t width = config->router.hidden_size ? config->router.hidden_size : config->hidden_size;
    const struct group *group;
    job->extents[i] = (struct layer_extent){job->n_tensors, 0};
    for (int g = 0; (group = group_at(job, g)); ++g) {
        int64_t rows = group_rows(config, group);
        tensor_add(job, i, group->word, ".weight", "MXFP4", 3, (int64_t[]){E, rows, role_K(config, group->first)});
        if (projection_matrix(sample, group->first)->bias)
            tensor_add(job, i, group->word, ".bias", "F32", 2, (int64_t[]){E, rows});
    }
    if (config->router.weight) tensor_add(job, i, "ffn_gate_inp", ".weight", "F32", 2, (int64_t[]){E, width});
    if (config->router.bias) tensor_add(job, i, "ffn_gate_inp", ".bias", "F32", 1, &E);
    if (routing->correction_bias) tensor_add(job, i, "exp_probs_b", ".bias", "F32", 1, &E);
    if (routing->hash_table)
        tensor_add(job, i, "ffn_gate_tid2eid", ".weight", "I32", 2, (int64_t[]){routing->vocab_size, routing->top_k});
}

/* ---- Bytes ------------------------------------------------------------------------------------------------------- */

static int job_put(struct gguf_job *job, int32_t tensor, int64_t first, int64_t n_bytes, const void *data)
{
    if (moe4_writer_write(job->output->context, job->writer, tensor - job->writer_first, first, n_bytes, data) !=
        MOE4_OK)
        return fail_library(job->output->context);
    job->bytes_done += n_bytes;
    progress_update(&job->bar, job->bytes_done, job->output->bytes_total);
    return interrupt_check();
}

/* A block's scale, then its codes with element j beside element j + 16. */
static void block_weave(const uint8_t *codes, uint8_t scale, uint8_t *block)
{
    uint8_t elements[BLOCK];
    for (int j = 0; j < BLOCK / 2; ++j) {
        elements[2 * j] = codes[j] & 15;
        elements[2 * j + 1] = codes[j] >> 4;
    }
    *block++ = scale;
    for (int j = 0; j < BLOCK / 2; ++j) block[j] = (uint8_t)(elements[j] | elements[j + 16] << 4);
}

static int write_weights(struct gguf_job *job, int32_t tensor, const moe4_expert *expert, const struct group *group,
                         int32_t e)
{
    const moe4_matrix *matrix = projection_matrix(expert, group->first);
    int64_t K = role_K(job->config, group->first), n_blocks = group_rows(job->config, group) * (K / BLOCK);
    int64_t n_bytes = n_blocks * GGUF_BLOCK_BYTES;
    int code = buffer_reserve(&job->rows, &job->rows_room, n_blocks * 16, "rows of an expert");
    if (!code) code = buffer_reserve(&job->scales, &job->scales_room, n_blocks, "scales of an expert");
    if (!code) code = buffer_reserve(&job->blocks, &job->blocks_room, n_bytes, "blocks of an expert");
    if (code) return code;
    for (int role = (int)group->first; role <= (int)group->last; ++role) {
        struct row_place from = row_place(job->config, (enum projection_role)role);
        int64_t to = (role - (int)group->first) * from.count;
        rows_gather(matrix, PART_CODES, K, from, to, 1, job->rows);
        rows_gather(matrix, PART_SCALES, K, from, to, 1, job->scales);
    }
    for (int64_t b = 0; b < n_blocks; ++b)
        block_weave((const uint8_t *)job->rows + b * 16, (uint8_t)job->scales[b],
                    (uint8_t *)job->blocks + b * GGUF_BLOCK_BYTES);
    return job_put(job, tensor, e * n_bytes, n_bytes, job->blocks);
}

/* Values first, first + step, ... as f32 or i32, at element `at` of the tensor. */
static int write_values(struct gguf_job *job, int32_t tensor, int64_t at, const void *values, moe4_dtype dtype,
                        struct row_place from)
{
    int is_integer = dtype == MOE4_DTYPE_I32 || dtype == MOE4_DTYPE_I64;
    int code = buffer_reserve(&job->blocks, &job->blocks_room, from.count * 4, "values");
    for (int64_t i = 0; !code && i < from.count; ++i) {
        double value = ref_load(values, dtype, from.first + i * from.step);
        float real = (float)value;
        int32_t integer = is_integer ? (int32_t)value : 0;
        memcpy(job->blocks + 4 * i, is_integer ? (const void *)&integer : (const void *)&real, 4);
    }
    return code ? code : job_put(job, tensor, at * 4, from.count * 4, job->blocks);
}

static int write_router(struct gguf_job *job, int32_t *next)
{
    const moe4_router *router = &job->config->router;
    const moe4_routing *routing = &job->config->routing;
    int64_t E = job->config->n_experts, width = router->hidden_size ? router->hidden_size : job->config->hidden_size;
    const struct {
        const void *values;
        moe4_dtype dtype;
        int64_t count;
    } parts[] = {{router->weight, router->weight_dtype, E * width},
                 {router->bias, router->bias_dtype, E},
                 {routing->correction_bias, routing->correction_bias_dtype, E},
                 {routing->hash_table, routing->hash_table_dtype, routing->vocab_size * routing->top_k}};
    int code = EXIT_OK;
    for (size_t i = 0; !code && i < sizeof parts / sizeof *parts; ++i)
        if (parts[i].values)
            code = write_values(job, (*next)++, 0, parts[i].values, parts[i].dtype,
                                (struct row_place){0, 1, parts[i].count});
    return code;
}

static int write_expert(struct gguf_job *job, int32_t *next, const moe4_expert *expert, int32_t e)
{
    const struct group *group;
    int code = EXIT_OK;
    for (int g = 0; !code && (group = group_at(job, g)); ++g) {
        const moe4_matrix *matrix = projection_matrix(expert, group->first);
        int64_t at = e * group_rows(job->config, group);
        code = write_weights(job, (*next)++, expert, group, e);
        if (code || !matrix->bias) continue;
        for (int role = (int)group->first; !code && role <= (int)group->last; ++role) {
            struct row_place from = row_place(job->config, (enum projection_role)role);
            code = write_values(job, *next, at, matrix->bias, matrix->bias_dtype, from);
            at += from.count;
        }
        ++*next;
    }
    return code;
}

/* ---- Layers ------------------------------------------------------------------------------------------------------ */

static int layer_open(struct gguf_job *job, int32_t i)
{
    return job->output->feed.open(job->output->feed.user, job->output->layers[i], &job->config);
}

static int layer_plan(struct gguf_job *job, int32_t i)
{
    int32_t layer = job->output->layers[i];
    moe4_expert sample;
    int code = layer_open(job, i);
    if (!code && job->config->gate_up == MOE4_GATE_UP_NONE)
        code = fail("layer %d: experts without a gate: no layout that can be written has them", layer);
    if (!code && !i) code = gguf_metadata_begin(&job->metadata, job->output->info, job->config);
    if (!code) code = gguf_metadata_layer(&job->metadata, job->config, layer);
    if (!code) code = job->output->feed.sample(job->output->feed.user, &sample);
    if (!code) layer_describe(job, i, &sample);
    return code;
}

static int layer_write(struct gguf_job *job, int32_t i)
{
    int32_t next = job->extents[i].first_tensor;
    int code = layer_open(job, i);
    for (int32_t e = 0; !code && e < job->config->n_experts; ++e) {
        moe4_expert expert;
        next = job->extents[i].first_tensor;
        code = job->output->feed.read(job->output->feed.user, e, &expert);
        if (!code) code = write_expert(job, &next, &expert, e);
    }
    return code ? code : write_router(job, &next);
}

/* ---- Comparing --------------------------------------------------------------------------------------------------- */

static int param_is_same(const moe4_param *a, const moe4_param *b)
{
    return a->presence == b->presence && (a->presence == MOE4_ABSENT || a->value == b->value);
}

/* No factor is a factor of one. */
static float scaling_of(const moe4_routing *routing)
{
    return routing->scaling_factor != 0 ? routing->scaling_factor : 1;
}

const char *layer_config_difference(const moe4_layer_config *a, const moe4_layer_config *b)
{
    if (a->activation != b->activation) return "its activation";
    if (!param_is_same(&a->alpha, &b->alpha)) return "the activation's alpha";
    if (!param_is_same(&a->beta, &b->beta)) return "the activation's beta";
    if (!param_is_same(&a->limit, &b->limit)) return "the activation's limit";
    if (a->routing.method != b->routing.method) return "its routing method";
    if (a->routing.top_k != b->routing.top_k) return "its top_k";
    if (a->routing.n_group != b->routing.n_group || a->routing.topk_group != b->routing.topk_group)
        return "its expert groups";
    if (scaling_of(&a->routing) != scaling_of(&b->routing)) return "its scaling factor";
    if (a->hidden_size != b->hidden_size || a->intermediate_size != b->intermediate_size) return "its sizes";
    if (a->n_experts != b->n_experts) return "its number of experts";
    return NULL;
}

static int layer_verify(struct gguf_job *job, const moe4_checkpoint *written, int32_t i)
{
    moe4_layer_reader *reader = NULL;
    moe4_reader_options options = MOE4_READER_OPTIONS_INIT;
    int32_t layer = job->output->layers[i];
    int code = layer_open(job, i);
    options.router = MOE4_ROUTER_SKIP;
    if (!code && moe4_layer_reader_open(job->output->context, written, layer, &options, &reader) != MOE4_OK)
        code = fail_library(job->output->context);
    const char *what = code ? NULL : layer_config_difference(job->config, moe4_layer_reader_config(reader));
    if (what)
        code = fail("layer %d: %s would be lost: GGUF's %s implies another", layer, what, job->metadata.architecture);
    moe4_layer_reader_close(reader);
    return code;
}

static int job_verify(struct gguf_job *job, const char *path)
{
    moe4_checkpoint *written = NULL;
    int code = EXIT_OK;
    if (moe4_checkpoint_open(job->output->context, path, &written) != MOE4_OK)
        return fail_library(job->output->context);
    for (int32_t i = 0; !code && i < job->output->n_layers; ++i) code = layer_verify(job, written, i);
    moe4_checkpoint_close(written);
    return code;
}

/* ---- Files ------------------------------------------------------------------------------------------------------- */

/* Path of a file of several, with `mark` behind its name. */
static struct path file_path(const struct gguf_output *output, const char *mark, int32_t file)
{
    struct path path;
    int stem = (int)(strlen(output->path) - strlen(".gguf")), length;
    if (output->n_files > 1)
        length = snprintf(path.text, sizeof path.text, "%.*s%s-%05d-of-%05d.gguf", stem, output->path, mark, file + 1,
                          output->n_files);
    else
        length = snprintf(path.text, sizeof path.text, "%.*s%s.gguf", stem, output->path, mark);
    if (length >= (int)sizeof path.text) path.text[0] = '\0'; /* no such file: whoever opens it says so */
    return path;
}

/* The layer behind the last of the file that begins with layer `first`. */
static int32_t file_end(const struct gguf_job *job, int32_t first)
{
    int32_t end = first;
    int64_t bytes = 0;
    while (end < job->output->n_layers &&
           (end == first || bytes + job->extents[end].n_bytes <= job->output->file_bytes))
        bytes += job->extents[end++].n_bytes;
    return end;
}

/* What every file of several says of itself; the model's metadata is in the first. */
static int32_t file_values(const struct gguf_job *job, int32_t file, moe4_gguf_value *values)
{
    int32_t n = file ? 0 : job->metadata.n_values, n_files = job->output->n_files;
    memcpy(values, job->metadata.values, (size_t)n * sizeof *values);
    if (n_files == 1) return n;
    values[n++] = (moe4_gguf_value){.key = "split.no", .type = MOE4_GGUF_U16, .u32 = (uint32_t)file};
    values[n++] = (moe4_gguf_value){.key = "split.count", .type = MOE4_GGUF_U16, .u32 = (uint32_t)n_files};
    values[n++] =
        (moe4_gguf_value){.key = "split.tensors.count", .type = MOE4_GGUF_I32, .u32 = (uint32_t)job->n_tensors};
    return n;
}

static int file_write(struct gguf_job *job, const char *path, int32_t file, int32_t first, int32_t end)
{
    moe4_context *context = job->output->context;
    moe4_gguf_value values[GGUF_MAX_VALUES + 3];
    int32_t n_values = file_values(job, file, values), n_tensors = job->extents[end].first_tensor;
    int code = EXIT_OK;
    job->writer_first = job->extents[first].first_tensor;
    if (moe4_gguf_writer_create(context, path, job->tensors + job->writer_first, n_tensors - job->writer_first, values,
                                n_values, &job->writer) != MOE4_OK)
        return fail_library(context);
    for (int32_t i = first; !code && i < end; ++i) code = layer_write(job, i);
    if (code)
        moe4_writer_discard(job->writer);
    else if (moe4_writer_commit(context, job->writer) != MOE4_OK)
        code = fail_library(context);
    return code;
}

/* Writes the files that are not there yet, each complete or not at all. */
static int files_write(struct gguf_job *job, const char *mark)
{
    struct gguf_output *output = job->output;
    int code = EXIT_OK;
    job->bar = progress_begin("writing");
    interrupt_hold();
    for (int32_t file = 0, first = 0; !code && file < output->n_files; ++file) {
        const struct path path = file_path(output, mark, file);
        int32_t end = file_end(job, first);
        if (access(path.text, F_OK)) {
            code = file_write(job, path.text, file, first, end);
        } else {
            ++output->n_kept;
            for (int32_t i = first; i < end; ++i) job->bytes_done += job->extents[i].n_bytes;
        }
        first = end;
    }
    progress_end(&job->bar);
    interrupt_release();
    return code;
}

/* Writes all files under names that only this job gives, reads them again, and renames them. */
static int job_write(struct gguf_job *job)
{
    struct gguf_output *output = job->output;
    char mark[40];
    snprintf(mark, sizeof mark, ".unfinished-%016llx",
             (unsigned long long)XXH3_64bits(output->job, strlen(output->job)));
    int code = files_write(job, mark);
    if (code) return code;
    code = job_verify(job, file_path(output, mark, 0).text);
    for (int32_t file = 0; code && file < output->n_files; ++file) unlink(file_path(output, mark, file).text);
    for (int32_t file = 0; !code && file < output->n_files; ++file) {
        struct path to = file_path(output, "", file);
        if (rename(file_path(output, mark, file).text, to.text)) code = fail("%s: %s", to.text, strerror(errno));
    }
    return code;
}

/* Only --force lets go of what is there. */
static int check_places(const struct gguf_output *output)
{
    if (output->n_files > MAX_FILES) return fail("%d files: more than %d", output->n_files, MAX_FILES);
    for (int32_t file = 0; !output->force && file < output->n_files; ++file) {
        struct path path = file_path(output, "", file);
        if (!access(path.text, F_OK)) return fail("%s: is there; --force replaces it", path.text);
    }
    return EXIT_OK;
}

static int job_plan(struct gguf_job *job)
{
    struct gguf_output *output = job->output;
    int64_t room = (int64_t)output->n_layers * LAYER_TENSORS;
    int code = allocate(&job->tensors, room, sizeof *job->tensors, "tensors");
    if (!code) code = allocate(&job->names, room, sizeof *job->names, "tensor names");
    if (!code) code = allocate(&job->extents, output->n_layers + 1, sizeof *job->extents, "layers");
    for (int32_t i = 0; !code && i < output->n_layers; ++i) code = layer_plan(job, i);
    if (code) return code;
    gguf_metadata_end(&job->metadata);
    for (const char *const *note = output->notes; note && *note; note += 2)
        gguf_metadata_text(&job->metadata, note[0], note[1]);
    job->extents[output->n_layers].first_tensor = job->n_tensors;
    for (int32_t i = 0; i < output->n_layers; ++i) output->bytes_total += job->extents[i].n_bytes;
    for (int32_t first = 0; first < output->n_layers; ++output->n_files) first = file_end(job, first);
    return check_places(output);
}

int gguf_output_write(struct gguf_output *output)
{
    struct gguf_job job = {.output = output};
    const char *end = strrchr(output->path, '.');
    if (!end || strcmp(end, ".gguf")) return fail("%s: a file whose name ends in .gguf is wanted", output->path);
    output->bytes_total = output->n_files = output->n_kept = 0;
    int code = job_plan(&job);
    if (!code) code = job_write(&job);
    gguf_metadata_release(&job.metadata);
    free(job.tensors);
    free(job.names);
    free(job.extents);
    free(job.rows);
    free(job.scales);
    free(job.blocks);
    return code;
}
