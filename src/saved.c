/* Prepared layers in files: the config, then the arrays that the backend lists.
 *
 * Loading rebuilds a moe4_layer_config and takes the way of moe4_layer_create, checks and all; only the arrays are read
 * instead of packed. */
#include "saved.h"

#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "backend.h"
#include "base/checked.h"
#include "context.h"
#include "layer.h"
#include "moe4/io.h"
#include "supports.h"

#define FORMAT "moe4 prepared layer, version 2"

enum { MAX_SOURCE_BYTES = 255, MAX_TENSORS = MAX_PARTS + 9, PART_ALIGNMENT = 64, COPY_BYTES = 1 << 24 };

/* ---- What is written -------------------------------------------------------------------------------------------- */

/* Tensors of a file and where their bytes are. */
struct contents {
    moe4_tensor tensors[MAX_TENSORS];
    const void *data[MAX_TENSORS];
    int32_t n, n_parts; /* the layer's parts come first */
};

static void add(struct contents *contents, const char *name, const char *dtype, int32_t rank, const int64_t *shape,
                const void *data, int64_t n_bytes)
{
    moe4_tensor *tensor = &contents->tensors[contents->n];
    *tensor = (moe4_tensor){.name = name, .dtype = dtype, .rank = rank, .n_bytes = n_bytes};
    for (int32_t d = 0; d < rank; d++) tensor->shape[d] = shape[d];
    contents->data[contents->n++] = data;
}

static void add_vector(struct contents *contents, const char *name, const char *dtype, int64_t n, int64_t item_bytes,
                       const void *data)
{
    add(contents, name, dtype, 1, &n, data, n * item_bytes);
}

static void list_numbers(const struct moe4_layer *layer, int64_t numbers[N_SAVED_NUMBERS])
{
    const struct router *router = &layer->router;
    numbers[SAVED_HIDDEN_SIZE] = layer->H;
    numbers[SAVED_INTERMEDIATE_SIZE] = layer->I;
    numbers[SAVED_OUTPUT_SIZE] = layer->output_size;
    numbers[SAVED_STORED_INTERMEDIATE_SIZE] = layer->stored_intermediate_size;
    numbers[SAVED_N_EXPERTS] = layer->E;
    numbers[SAVED_FIRST_EXPERT] = layer->first_expert;
    numbers[SAVED_N_LOCAL_EXPERTS] = layer->L;
    numbers[SAVED_GATE_UP] = layer->gate_up;
    numbers[SAVED_ACTIVATION] = layer->activation;
    numbers[SAVED_HAS_ALPHA] = layer->alpha != MOE4_ABSENT;
    numbers[SAVED_HAS_BETA] = layer->beta != MOE4_ABSENT;
    numbers[SAVED_HAS_LIMIT] = layer->limit != MOE4_ABSENT;
    numbers[SAVED_METHOD] = layer->method;
    numbers[SAVED_TOP_K] = router->top_k;
    numbers[SAVED_N_GROUP] = router->n_group;
    numbers[SAVED_TOPK_GROUP] = router->topk_group;
    numbers[SAVED_RENORMALIZE] = router->renormalize;
    numbers[SAVED_HAS_CORRECTION_BIAS] = router->bias != NULL;
    numbers[SAVED_VOCAB_SIZE] = router->vocab_size;
    numbers[SAVED_ROUTER_SIZE] = layer->router_size;
    numbers[SAVED_COMPUTE] = layer->compute;
}

static moe4_status list_contents(moe4_context *context, const struct moe4_layer *layer, const int64_t *numbers,
                                 const float *scale, struct contents *contents)
{
    struct layer_part parts[MAX_PARTS];
    int32_t n_parts;
    moe4_status status = layer->backend->list_parts(context, layer, parts, &n_parts);
    if (status) return status;
    for (int32_t i = 0; i < n_parts; i++)
        add(contents, parts[i].name, parts[i].dtype, parts[i].rank, parts[i].shape, *parts[i].slot, parts[i].n_bytes);
    contents->n_parts = n_parts;
    add_vector(contents, "numbers", "I64", N_SAVED_NUMBERS, 8, numbers);
    add_vector(contents, "expert_map", "I32", layer->E, 4, layer->local_of);
    add(contents, "activation_params", "F32", 2, (int64_t[]){layer->L, 3}, layer->params, (int64_t)layer->L * 12);
    add_vector(contents, "routing.scale", "F32", 1, 4, scale);
    if (layer->router.bias) add_vector(contents, "routing.correction_bias", "F32", layer->E, 4, layer->router.bias);
    if (layer->router.table)
        add(contents, "routing.hash_table", "I32", 2, (int64_t[]){layer->router.vocab_size, layer->router.top_k},
            layer->router.table, layer->router.vocab_size * layer->router.top_k * 4);
    if (!layer->router_size) return MOE4_OK;
    add(contents, "router.weight", "F32", 2, (int64_t[]){layer->E, layer->router_size}, layer->router_weight,
        layer->E * layer->router_size * 4);
    add_vector(contents, "router.bias", "F32", layer->E, 4, layer->router_bias);
    return MOE4_OK;
}

static int64_t least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* A part that is not host memory, a piece at a time. */
static moe4_status write_from_device(moe4_context *context, const struct moe4_layer *layer, moe4_writer *writer,
                                     int32_t index, const struct contents *contents)
{
    const char *part = contents->data[index];
    const int64_t n_bytes = contents->tensors[index].n_bytes;
    const size_t piece_bytes = (size_t)least(n_bytes, COPY_BYTES);
    void *piece = memory_allocate(&context->allocator, piece_bytes);
    moe4_status status = piece ? MOE4_OK : context_fail_memory(context, contents->tensors[index].name, piece_bytes);
    for (int64_t first = 0; !status && first < n_bytes; first += COPY_BYTES) {
        const int64_t n = least(n_bytes - first, COPY_BYTES);
        status = layer->backend->download_part(context, layer, piece, part + first, (size_t)n);
        if (!status) status = moe4_writer_write(context, writer, index, first, n, piece);
    }
    memory_release(&context->allocator, piece, piece_bytes);
    return status;
}

moe4_status moe4_layer_save(moe4_context *context, const moe4_layer *layer, const char *source, const char *path)
{
    _Static_assert(sizeof(struct activation_params) == 12, "activation_params are saved as three floats");
    if (!context) return MOE4_EINVAL;
    if (context->status) return context->status;
    if (!layer || !path) return context_fail(context, MOE4_EINVAL, "%s is NULL", layer ? "path" : "layer");
    if (source && strlen(source) > MAX_SOURCE_BYTES)
        return context_fail(context, MOE4_EINVAL, "source has %zu bytes, expected at most %d", strlen(source),
                            MAX_SOURCE_BYTES);
    if (layer->backend != context->backend)
        return context_fail(context, MOE4_EINVAL, "the layer was prepared for another device than %s",
                            context->device_name);
    int64_t numbers[N_SAVED_NUMBERS];
    float scale = (float)layer->router.scale;
    struct contents contents = {.n = 0};
    list_numbers(layer, numbers);
    moe4_status status = list_contents(context, layer, numbers, &scale, &contents);
    if (status) return status;

    const char *metadata[] = {"format",  FORMAT,         "layout", layer->backend->layout,
                              "library", moe4_version(), "source", source ? source : "",
                              NULL};
    moe4_writer *writer;
    status = moe4_writer_create(context, path, contents.tensors, contents.n, metadata, &writer);
    if (status) return status;
    for (int32_t i = 0; !status && i < contents.n; i++)
        status = i < contents.n_parts && layer->backend->download_part
                     ? write_from_device(context, layer, writer, i, &contents)
                     : moe4_writer_write(context, writer, i, 0, contents.tensors[i].n_bytes, contents.data[i]);
    if (!status) return moe4_writer_commit(context, writer);
    moe4_writer_discard(writer);
    return status;
}

/* ---- What is read ------------------------------------------------------------------------------------------------ */

struct loader {
    moe4_context *context;
    moe4_tensors *tensors;
    const char *path;
    int64_t numbers[N_SAVED_NUMBERS];
    void *arrays[10]; /* small ones, held until the layer has copies */
    size_t bytes[10];
    int32_t n_arrays;
    moe4_status status; /* the first failure */
};

static moe4_status check_key(struct loader *loader, const char *key, const char *expected)
{
    const char *value = moe4_tensors_metadata(loader->tensors, key);
    if (value && strcmp(value, expected) == 0) return MOE4_OK;
    return context_fail(loader->context, MOE4_EFORMAT, "%s: %s is \"%s\", expected \"%s\"", loader->path, key,
                        value ? value : "(absent)", expected);
}

/* The tensor of that name, type and shape; NULL with a message if it is not there. */
static const moe4_tensor *find(struct loader *loader, const char *name, const char *dtype, int32_t rank,
                               const int64_t *shape)
{
    const moe4_tensor *tensor = moe4_tensors_find(loader->tensors, name);
    if (!tensor) {
        loader->status = context_fail(loader->context, MOE4_EFORMAT, "%s: no tensor \"%s\"", loader->path, name);
        return NULL;
    }
    int same = strcmp(tensor->dtype, dtype) == 0 && tensor->rank == rank;
    for (int32_t d = 0; same && d < rank; d++) {
        if (tensor->shape[d] == shape[d]) continue;
        loader->status =
            context_fail(loader->context, MOE4_EFORMAT, "%s: tensor \"%s\": dimension %d is %lld, expected %lld",
                         loader->path, name, d, (long long)tensor->shape[d], (long long)shape[d]);
        return NULL;
    }
    if (same) return tensor;
    loader->status =
        context_fail(loader->context, MOE4_EFORMAT, "%s: tensor \"%s\" is %s of rank %d, expected %s of rank %d",
                     loader->path, name, tensor->dtype, tensor->rank, dtype, rank);
    return NULL;
}

/* A small array that lives as long as the loader; NULL after any failure. */
static void *read_array(struct loader *loader, const char *name, const char *dtype, int32_t rank, const int64_t *shape)
{
    if (loader->status) return NULL;
    const moe4_tensor *tensor = find(loader, name, dtype, rank, shape);
    if (!tensor) return NULL;
    size_t n_bytes = (size_t)tensor->n_bytes;
    void *array = memory_allocate(&loader->context->allocator, n_bytes);
    if (!array) {
        loader->status = context_fail_memory(loader->context, name, n_bytes);
        return NULL;
    }
    loader->arrays[loader->n_arrays] = array;
    loader->bytes[loader->n_arrays++] = n_bytes;
    loader->status = moe4_tensors_read(loader->context, loader->tensors, tensor, 0, tensor->n_bytes, array);
    return loader->status ? NULL : array;
}

/* A number that must fit an int32; anything else is refused here, the rest by the config's own validation. */
static int32_t word(struct loader *loader, enum saved_number which)
{
    int64_t value = loader->numbers[which];
    if (value < INT32_MIN || value > INT32_MAX) {
        if (!loader->status)
            loader->status = context_fail(loader->context, MOE4_EFORMAT, "%s: number %d is %lld, expected 32 bits",
                                          loader->path, which, (long long)value);
        return 0;
    }
    return (int32_t)value;
}

static void read_params(struct loader *loader, moe4_layer_config *config)
{
    int64_t L = config->n_local_experts;
    const float *params = read_array(loader, "activation_params", "F32", 2, (int64_t[]){L, 3});
    float *columns = loader->status ? NULL : memory_allocate(&loader->context->allocator, (size_t)L * 12);
    if (!loader->status && !columns)
        loader->status = context_fail_memory(loader->context, "parameters", (size_t)L * 12);
    if (loader->status) return;
    loader->arrays[loader->n_arrays] = columns;
    loader->bytes[loader->n_arrays++] = (size_t)L * 12;
    moe4_param *const given[] = {&config->alpha, &config->beta, &config->limit};
    for (int p = 0; p < 3; p++) {
        for (int64_t l = 0; l < L; l++) columns[p * L + l] = params[l * 3 + p];
        if (loader->numbers[SAVED_HAS_ALPHA + p])
            *given[p] = (moe4_param){.presence = MOE4_PER_EXPERT, .values = columns + p * L};
    }
}

static void read_routing(struct loader *loader, moe4_layer_config *config)
{
    int64_t E = config->n_experts, router_size = loader->numbers[SAVED_ROUTER_SIZE];
    moe4_routing *routing = &config->routing;
    routing->method = (moe4_routing_method)word(loader, SAVED_METHOD);
    if (routing->method == MOE4_ROUTING_NONE) return;
    routing->top_k = word(loader, SAVED_TOP_K);
    routing->renormalize = (moe4_renormalize)word(loader, SAVED_RENORMALIZE);
    routing->n_group = word(loader, SAVED_N_GROUP);
    if (routing->n_group > 1) routing->topk_group = word(loader, SAVED_TOPK_GROUP);
    const float *scale = read_array(loader, "routing.scale", "F32", 1, (int64_t[]){1});
    if (scale) routing->scaling_factor = *scale;
    if (loader->numbers[SAVED_HAS_CORRECTION_BIAS]) {
        routing->correction_bias = read_array(loader, "routing.correction_bias", "F32", 1, &E);
        routing->correction_bias_dtype = MOE4_DTYPE_F32;
    }
    if (routing->method == MOE4_ROUTING_HASH) {
        routing->vocab_size = loader->numbers[SAVED_VOCAB_SIZE];
        routing->hash_table_dtype = MOE4_DTYPE_I32;
        routing->hash_table =
            read_array(loader, "routing.hash_table", "I32", 2, (int64_t[]){routing->vocab_size, routing->top_k});
    }
    if (!router_size) return;
    config->router = (moe4_router){.weight = read_array(loader, "router.weight", "F32", 2, (int64_t[]){E, router_size}),
                                   .weight_dtype = MOE4_DTYPE_F32,
                                   .bias = read_array(loader, "router.bias", "F32", 1, &E),
                                   .bias_dtype = MOE4_DTYPE_F32,
                                   .hidden_size = router_size};
}

static moe4_status read_config(struct loader *loader, moe4_layer_config *config)
{
    const int64_t *numbers = read_array(loader, "numbers", "I64", 1, (int64_t[]){N_SAVED_NUMBERS});
    if (!numbers) return loader->status;
    memcpy(loader->numbers, numbers, sizeof loader->numbers);
    *config = (moe4_layer_config)MOE4_LAYER_CONFIG_INIT;
    config->hidden_size = numbers[SAVED_HIDDEN_SIZE];
    config->intermediate_size = numbers[SAVED_INTERMEDIATE_SIZE];
    config->output_size = numbers[SAVED_OUTPUT_SIZE];
    config->stored_intermediate_size = numbers[SAVED_STORED_INTERMEDIATE_SIZE];
    config->n_experts = word(loader, SAVED_N_EXPERTS);
    config->n_local_experts = word(loader, SAVED_N_LOCAL_EXPERTS);
    config->gate_up = (moe4_gate_up)word(loader, SAVED_GATE_UP);
    config->activation = (moe4_activation)word(loader, SAVED_ACTIVATION);
    config->compute = (moe4_compute)word(loader, SAVED_COMPUTE);
    config->expert_map = read_array(loader, "expert_map", "I32", 1, (int64_t[]){config->n_experts});
    read_params(loader, config);
    read_routing(loader, config);
    return loader->status;
}

/* ---- The arrays ----------------------------------------------------------------------------------------------------
 */

static moe4_status map_file(moe4_context *context, const char *path, struct moe4_layer *layer)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    struct stat facts;
    if (fd < 0 || fstat(fd, &facts) != 0) {
        if (fd >= 0) close(fd);
        return context_fail(context, MOE4_EIO, "%s: cannot be opened to be mapped", path);
    }
    void *mapping = mmap(NULL, (size_t)facts.st_size, PROT_READ, MAP_SHARED, fd, 0);
    close(fd);
    if (mapping == MAP_FAILED) return context_fail(context, MOE4_EIO, "%s: cannot be mapped", path);
    layer->mapping = mapping;
    layer->mapping_bytes = (size_t)facts.st_size;
    return MOE4_OK;
}

/* Fills a part that is not host memory, a piece at a time. */
static moe4_status read_to_device(struct loader *loader, const struct moe4_layer *layer, const moe4_tensor *tensor,
                                  char *part)
{
    moe4_context *context = loader->context;
    const size_t piece_bytes = (size_t)least(tensor->n_bytes, COPY_BYTES);
    void *piece = memory_allocate(&context->allocator, piece_bytes);
    moe4_status status = piece ? MOE4_OK : context_fail_memory(context, tensor->name, piece_bytes);
    for (int64_t first = 0; !status && first < tensor->n_bytes; first += COPY_BYTES) {
        const int64_t n = least(tensor->n_bytes - first, COPY_BYTES);
        status = moe4_tensors_read(context, loader->tensors, tensor, first, n, piece);
        if (!status) status = layer->backend->upload_part(context, layer, part + first, piece, (size_t)n);
    }
    memory_release(&context->allocator, piece, piece_bytes);
    return status;
}

/* Arrays that lie well in a mapping are used where they are; the others get memory of their own. */
static moe4_status read_parts(struct loader *loader, struct moe4_layer *layer)
{
    struct layer_part parts[MAX_PARTS];
    const moe4_tensor *tensors[MAX_PARTS];
    int32_t n_parts;
    moe4_status status = layer->backend->list_parts(loader->context, layer, parts, &n_parts);
    if (status) return status;
    for (int32_t i = 0; i < n_parts; i++) {
        tensors[i] = find(loader, parts[i].name, parts[i].dtype, parts[i].rank, parts[i].shape);
        if (!tensors[i]) return loader->status;
        size_t end = (size_t)tensors[i]->offset + (size_t)parts[i].n_bytes;
        if (layer->mapping && tensors[i]->offset % PART_ALIGNMENT == 0 && end <= layer->mapping_bytes)
            *parts[i].slot = (char *)layer->mapping + tensors[i]->offset;
    }
    int is_mapped[MAX_PARTS];
    for (int32_t i = 0; i < n_parts; i++) is_mapped[i] = *parts[i].slot != NULL;
    status = layer_allocate_parts(loader->context, layer);
    for (int32_t i = 0; !status && i < n_parts; i++)
        if (!is_mapped[i])
            status = layer->backend->upload_part ? read_to_device(loader, layer, tensors[i], *parts[i].slot)
                                                 : moe4_tensors_read(loader->context, loader->tensors, tensors[i], 0,
                                                                     parts[i].n_bytes, *parts[i].slot);
    return status;
}

static moe4_status load(struct loader *loader, moe4_mapping mapping, moe4_layer **result)
{
    moe4_context *context = loader->context;
    moe4_layer_config config;
    moe4_query query = MOE4_QUERY_INIT;
    moe4_layer *layer = NULL;
    moe4_status status = read_config(loader, &config);
    query.config = &config;
    query.compute = config.compute;
    if (!status) status = supports_query(context, &query);
    if (!status) status = layer_create(context, &config, &layer);
    if (status) return status;
    layer->first_expert = word(loader, SAVED_FIRST_EXPERT);
    status = context->backend->plan(context, layer);
    if (!status && mapping == MOE4_MAPPING_SHARED) status = map_file(context, loader->path, layer);
    if (!status) status = read_parts(loader, layer);
    if (!status) status = context->backend->check_parts(context, layer);
    if (status)
        layer_destroy(layer);
    else
        *result = layer;
    return status;
}

moe4_status moe4_layer_load(moe4_context *context, const char *path, const char *source, moe4_mapping mapping,
                            moe4_layer **layer)
{
    if (layer) *layer = NULL;
    if (!context) return MOE4_EINVAL;
    if (context->status) return context->status;
    if (!path || !layer) return context_fail(context, MOE4_EINVAL, "%s is NULL", path ? "layer" : "path");
    if (mapping != MOE4_MAPPING_NONE && mapping != MOE4_MAPPING_SHARED)
        return context_fail(context, MOE4_EINVAL, "mapping is %d, expected none or shared", mapping);
    if (mapping == MOE4_MAPPING_SHARED && context->backend->upload_part)
        return context_fail(context, MOE4_EUNSUPPORTED,
                            "mapping is shared, but the weights of a layer of %s lie on the device, expected none",
                            context->device_name);
    struct loader loader = {.context = context, .path = path};
    moe4_status status = moe4_tensors_open(context, path, &loader.tensors);
    if (status) return status;
    status = check_key(&loader, "format", FORMAT);
    if (!status) status = check_key(&loader, "layout", context->backend->layout);
    if (!status) status = check_key(&loader, "library", moe4_version());
    if (!status && source) status = check_key(&loader, "source", source);
    if (!status) status = load(&loader, mapping, layer);
    for (int32_t i = 0; i < loader.n_arrays; i++)
        memory_release(&context->allocator, loader.arrays[i], loader.bytes[i]);
    moe4_tensors_close(loader.tensors);
    return status;
}
