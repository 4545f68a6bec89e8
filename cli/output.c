#include "output.h"

#include <dirent.h>
#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "command.h"
#include "interrupt.h"
#include "memory.h"
#include "message.h"
#include "report.h"

enum { COPY_BYTES = 4 << 20 };

struct path {
    char text[PATH_MAX];
};

static struct path path_in(const struct output *output, const char *name)
{
    struct path path;
    if (snprintf(path.text, sizeof path.text, "%s/%s", output->folder, name) >= (int)sizeof path.text)
        path.text[0] = '\0'; /* no such file: whoever opens it says so */
    return path;
}

/* ---- The plan ---------------------------------------------------------------------------------------------------- */

int output_check_apart(const char *source, const char *folder)
{
    struct stat from, to;
    if (stat(source, &from) || stat(folder, &to) || from.st_dev != to.st_dev || from.st_ino != to.st_ino)
        return EXIT_OK;
    return fail("%s: is %s itself; another folder is wanted", folder, source);
}

static long long time_of(const struct stat *about)
{
    return (long long)about->st_mtim.tv_sec * 1000000000 + about->st_mtim.tv_nsec;
}

int output_begin(struct output *output, const char *what, const char *path, const moe4_tensors *source)
{
    const char *last = NULL;
    char name[PATH_MAX];
    struct stat config;
    long long bytes = 0, newest = 0;
    for (int64_t i = 0; i < moe4_tensors_count(source); ++i) {
        const moe4_tensor *tensor = moe4_tensors_get(source, i);
        struct stat about;
        bytes += tensor->n_bytes;
        if (last && !strcmp(last, tensor->file)) continue;
        last = tensor->file;
        if (stat(last, &about)) return fail("%s: %s", last, strerror(errno));
        newest = time_of(&about) > newest ? time_of(&about) : newest;
    }
    int has_config = snprintf(name, sizeof name, "%s/config.json", path) < (int)sizeof name && !stat(name, &config);
    snprintf(output->job, sizeof output->job,
             "%s, shards of %lld bytes, of %.600s: %lld tensors, %lld bytes, %lld, config.json %lld bytes, %lld", what,
             (long long)output->shard_bytes, last ? last : "nothing", (long long)moe4_tensors_count(source), bytes,
             newest, has_config ? (long long)config.st_size : 0, has_config ? time_of(&config) : 0);
    output_note(output, "moe4.job", output->job);
    return EXIT_OK;
}

void output_note(struct output *output, const char *key, const char *value)
{
    int i = 0;
    while (output->metadata[i]) i += 2;
    output->metadata[i] = key;
    output->metadata[i + 1] = value;
}

/* Room for one more element. */
static int grow(void *array, int64_t count, int64_t *room, size_t element_bytes)
{
    if (count < *room) return EXIT_OK;
    void *old, *new;
    memcpy(&old, array, sizeof old);
    int64_t wanted = *room ? 2 * *room : 256;
    new = reallocarray(old, (size_t)wanted, element_bytes);
    if (!new) return fail("out of memory: a list of %lld tensors", (long long)wanted);
    memcpy(array, &new, sizeof new);
    *room = wanted;
    return EXIT_OK;
}

struct output_unit *output_add_unit(struct output *output, int32_t kind)
{
    if (grow(&output->units, output->n_units, &output->units_room, sizeof *output->units)) return NULL;
    struct output_unit *unit = &output->units[output->n_units++];
    *unit = (struct output_unit){.first = (int32_t)output->n_tensors, .kind = kind, .layer = -1, .expert = -1};
    return unit;
}

static int64_t dtype_size(const char *dtype)
{
    static const char *const two[] = {"BF16", "F16", "I16", "U16"}, *const four[] = {"F32", "I32", "U32"};
    static const char *const eight[] = {"F64", "I64", "U64", "C64"};
    for (size_t i = 0; i < 4; ++i) {
        if (!strcmp(dtype, two[i])) return 2;
        if (i < 3 && !strcmp(dtype, four[i])) return 4;
        if (!strcmp(dtype, eight[i])) return 8;
    }
    return 1;
}

int output_add(struct output *output, const char *name, const char *dtype, int32_t rank, const int64_t *shape)
{
    int code = output->n_tensors < INT32_MAX ? EXIT_OK : fail("more tensors than %d", INT32_MAX);
    if (!code) code = grow(&output->tensors, output->n_tensors, &output->tensors_room, sizeof *output->tensors);
    if (code) return code;
    struct output_unit *unit = &output->units[output->n_units - 1];
    moe4_tensor *tensor = &output->tensors[output->n_tensors];
    *tensor = (moe4_tensor){.name = strdup(name), .dtype = dtype, .rank = rank, .n_bytes = dtype_size(dtype)};
    if (!tensor->name) return fail("out of memory: tensor names");
    for (int32_t d = 0; d < rank; ++d) {
        tensor->shape[d] = shape[d];
        if (__builtin_mul_overflow(tensor->n_bytes, shape[d], &tensor->n_bytes))
            return fail("%s: more bytes than 63 bits count", name);
    }
    if (!strcmp(dtype, "F4")) tensor->n_bytes /= 2;
    ++output->n_tensors;
    ++unit->n_tensors;
    unit->n_bytes += tensor->n_bytes;
    output->bytes_total += tensor->n_bytes;
    return EXIT_OK;
}

/* Where the shard that begins with unit `first` ends. */
static int64_t shard_end(const struct output *output, int64_t first)
{
    int64_t bytes = 0, end = first;
    while (end < output->n_units && (end == first || bytes + output->units[end].n_bytes <= output->shard_bytes))
        bytes += output->units[end++].n_bytes;
    return end;
}

struct shard_name {
    char text[64];
};

static struct shard_name shard_name(const struct output *output, int32_t shard)
{
    struct shard_name name = {"model.safetensors"};
    if (output->n_shards > 1)
        snprintf(name.text, sizeof name.text, "model-%05d-of-%05d.safetensors", shard + 1, output->n_shards);
    return name;
}

/* ---- Shards ------------------------------------------------------------------------------------------------------ */

/* What a shard's file holds already. */
typedef enum shard_state { SHARD_ABSENT, SHARD_OURS, SHARD_OTHER } shard_state;

static int64_t unit_tensor(const struct output *output, int64_t unit)
{
    return unit < output->n_units ? output->units[unit].first : output->n_tensors;
}

/* A shard of the same job has all its tensors, and the reader has checked that the file is as long as they say. */
static shard_state shard_look(const struct output *output, int32_t shard, int64_t first, int64_t end)
{
    struct path path = path_in(output, shard_name(output, shard).text);
    moe4_tensors *tensors = NULL;
    if (access(path.text, F_OK)) return SHARD_ABSENT;
    if (moe4_tensors_open(output->context, path.text, &tensors) != MOE4_OK) return SHARD_OTHER;
    const char *job = moe4_tensors_metadata(tensors, "moe4.job");
    int64_t n = unit_tensor(output, end) - unit_tensor(output, first);
    int same = job && !strcmp(job, output->job) && moe4_tensors_count(tensors) == n;
    for (int64_t i = unit_tensor(output, first); same && i < unit_tensor(output, end); ++i) {
        const moe4_tensor *found = moe4_tensors_find(tensors, output->tensors[i].name);
        same = found && found->n_bytes == output->tensors[i].n_bytes;
    }
    moe4_tensors_close(tensors);
    return same ? SHARD_OURS : SHARD_OTHER;
}

static int shard_write(struct output *output, int32_t shard, int64_t first, int64_t end, output_producer produce,
                       void *user)
{
    struct path path = path_in(output, shard_name(output, shard).text);
    int code = EXIT_OK;
    output->shard_first = unit_tensor(output, first);
    int32_t n_tensors = (int32_t)(unit_tensor(output, end) - output->shard_first);
    if (moe4_writer_create(output->context, path.text, output->tensors + output->shard_first, n_tensors,
                           output->metadata, &output->writer) != MOE4_OK)
        return fail_library(output->context);
    for (int64_t u = first; !code && u < end; ++u) code = produce(user, output, &output->units[u]);
    if (code)
        moe4_writer_discard(output->writer);
    else if (moe4_writer_commit(output->context, output->writer) != MOE4_OK)
        code = fail_library(output->context);
    output->writer = NULL;
    return code;
}

int output_put(struct output *output, const struct output_unit *unit, int32_t index, int64_t first, int64_t n_bytes,
               const void *data)
{
    int32_t target = (int32_t)(unit->first - output->shard_first) + index;
    if (moe4_writer_write(output->context, output->writer, target, first, n_bytes, data) != MOE4_OK)
        return fail_library(output->context);
    output->bytes_done += n_bytes;
    progress_update(&output->bar, output->bytes_done, output->bytes_total);
    return interrupt_check();
}

int output_copy(struct output *output, const moe4_tensors *tensors, const struct output_unit *unit)
{
    const moe4_tensor *source = unit->source[0];
    char *buffer;
    int code = allocate(&buffer, COPY_BYTES, 1, "a copy");
    for (int64_t first = 0; !code && first < source->n_bytes; first += COPY_BYTES) {
        int64_t rest = source->n_bytes - first, n = rest < COPY_BYTES ? rest : COPY_BYTES;
        if (moe4_tensors_read(output->context, tensors, source, first, n, buffer) != MOE4_OK)
            code = fail_library(output->context);
        else
            code = output_put(output, unit, 0, first, n, buffer);
    }
    free(buffer);
    return code;
}

/* ---- The folder -------------------------------------------------------------------------------------------------- */

/* Writes beside the place first, then renames: a full disk leaves nothing half-written. */
static int save_json(const struct output *output, const char *name, const json_t *value)
{
    struct path path = path_in(output, name), temporary = path_in(output, "moe4.json.tmp");
    FILE *file = fopen(temporary.text, "w");
    int failed = !file || json_dumpf(value, file, JSON_INDENT(2)) || fputc('\n', file) == EOF || fflush(file) ||
                 fsync(fileno(file));
    if (file && fclose(file)) failed = 1;
    failed = failed || rename(temporary.text, path.text);
    int code = failed ? fail("%s: %s", path.text, strerror(errno)) : EXIT_OK;
    if (failed) unlink(temporary.text);
    return code;
}

static int save_index(const struct output *output)
{
    json_t *map = json_object();
    for (int64_t first = 0, shard = 0; first < output->n_units; ++shard) {
        int64_t end = shard_end(output, first);
        for (int64_t i = unit_tensor(output, first); i < unit_tensor(output, end); ++i)
            json_object_set_new(map, output->tensors[i].name, json_string(shard_name(output, (int32_t)shard).text));
        first = end;
    }
    json_t *index =
        json_pack("{s:{s:I}, s:o}", "metadata", "total_size", (json_int_t)output->bytes_total, "weight_map", map);
    int code = index ? save_json(output, "model.safetensors.index.json", index) : fail("out of memory: an index");
    json_decref(index);
    return code;
}

/* Whether a name is one that some checkpoint's shards have. */
static int is_shard_name(const char *name)
{
    int32_t number, count;
    struct shard_name same;
    if (!strcmp(name, "model.safetensors")) return 1;
    if (sscanf(name, "model-%5" SCNd32 "-of-%5" SCNd32, &number, &count) != 2) return 0;
    snprintf(same.text, sizeof same.text, "model-%05" PRId32 "-of-%05" PRId32 ".safetensors", number, count);
    return !strcmp(name, same.text);
}

static int is_planned(const struct output *output, const char *name)
{
    for (int32_t shard = 0; shard < output->n_shards; ++shard)
        if (!strcmp(name, shard_name(output, shard).text)) return 1;
    return 0;
}

/* Shards of another number of them: programs that load whatever is there, or prefer a single file, would take them. */
static int other_shards_remove(const struct output *output)
{
    DIR *folder = opendir(output->folder);
    int code = folder ? EXIT_OK : fail("%s: %s", output->folder, strerror(errno));
    for (const struct dirent *entry; !code && (entry = readdir(folder));) {
        if (!is_shard_name(entry->d_name) || is_planned(output, entry->d_name)) continue;
        if (!output->force)
            code = fail("%s/%s: is there, but not of this job; --force replaces it", output->folder, entry->d_name);
        else if (unlink(path_in(output, entry->d_name).text))
            code = fail("%s/%s: %s", output->folder, entry->d_name, strerror(errno));
    }
    if (folder) closedir(folder);
    return code;
}

/* Only --force lets a folder go that holds a checkpoint or part of another. */
static int folder_prepare(struct output *output)
{
    static const char *const marks[] = {"config.json", "model.safetensors.index.json"};
    if (mkdir(output->folder, 0777) && errno != EEXIST) return fail("%s: %s", output->folder, strerror(errno));
    if (!output->force && !access(path_in(output, marks[0]).text, F_OK))
        return fail("%s: holds a checkpoint; --force replaces it", output->folder);
    output->n_shards = 0;
    for (int64_t first = 0; first < output->n_units; ++output->n_shards) first = shard_end(output, first);
    for (int64_t first = 0, shard = 0; !output->force && first < output->n_units; ++shard) {
        int64_t end = shard_end(output, first);
        if (shard_look(output, (int32_t)shard, first, end) == SHARD_OTHER)
            return fail("%s/%s: is there, but not of this job; --force replaces it", output->folder,
                        shard_name(output, (int32_t)shard).text);
        first = end;
    }
    int code = other_shards_remove(output);
    for (size_t i = 0; !code && i < sizeof marks / sizeof *marks; ++i)
        if (unlink(path_in(output, marks[i]).text) && errno != ENOENT)
            return fail("%s/%s: %s", output->folder, marks[i], strerror(errno));
    return code;
}

int output_write(struct output *output, const json_t *config, output_producer produce, void *user)
{
    int code = folder_prepare(output);
    output->bar = progress_begin("writing");
    interrupt_hold();
    for (int64_t first = 0, shard = 0; !code && first < output->n_units; ++shard) {
        int64_t end = shard_end(output, first);
        if (shard_look(output, (int32_t)shard, first, end) == SHARD_OURS) {
            ++output->n_kept;
            for (int64_t u = first; u < end; ++u) output->bytes_done += output->units[u].n_bytes;
        } else {
            code = shard_write(output, (int32_t)shard, first, end, produce, user);
        }
        first = end;
    }
    progress_end(&output->bar);
    interrupt_release();
    if (!code && output->n_shards > 1) code = save_index(output);
    if (!code) code = save_json(output, "config.json", config);
    return code;
}

/* ---- The report -------------------------------------------------------------------------------------------------- */

void output_report(const struct output *output, double seconds)
{
    report_field("files", "%s, %s", human_plural(output->n_shards, "shard").text,
                 human_bytes((double)output->bytes_total).text);
    if (output->n_kept) report_field("kept", "%s that were there", human_plural(output->n_kept, "shard").text);
    report_field("time", "%s", human_milliseconds(1000 * seconds).text);
}

void output_json(const struct output *output, double seconds, json_t *object)
{
    json_put_integer(object, "bytes", output->bytes_total);
    json_put_integer(object, "shards", output->n_shards);
    json_put_integer(object, "shards_kept", output->n_kept);
    json_put_real(object, "seconds", seconds);
}

void output_release(struct output *output)
{
    for (int64_t i = 0; i < output->n_tensors; ++i) free((char *)output->tensors[i].name);
    free(output->tensors);
    free(output->units);
    *output = (struct output){0};
}
