/* moe4 input and output: tensor files, and the MoE layers of a checkpoint.
 *
 *   moe4_tensors     the tensors of one file, or of a folder of shards: names, types, shapes, bytes
 *   moe4_writer      writes one safetensors file; it appears under its name only when complete
 *   moe4_checkpoint  a model: its MoE layers and what config.json says of them
 *   moe4_layer_reader  one layer of a checkpoint: its config and its experts, one at a time
 *
 * Files are read with pread into bounded buffers, never mapped.  Every refusal names file, tensor and both values, in
 * moe4_context_message.  Objects keep no pointer to the context they were made with; use each from one thread at a time,
 * except that several may call moe4_tensors_read, each with a context of its own. */
#ifndef MOE4_IO_H
#define MOE4_IO_H

#include "moe4/moe4.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Tensor files --------------------------------------------------------------------------------------------- */

#define MOE4_TENSOR_MAX_RANK 8

typedef struct moe4_tensor {
    const char *name;
    const char *dtype; /* the file's own word: "BF16", "U8", "F8_E8M0", ...; GGUF's: "F32", "MXFP4", "Q8_0", ... */
    int32_t rank;
    int64_t shape[MOE4_TENSOR_MAX_RANK]; /* logical, outermost first */
    int64_t n_bytes;
    const char *file;  /* path of the file that holds it; NULL when describing one to write */
    int64_t offset;    /* of its first byte in that file: any alignment */
} moe4_tensor;

typedef struct moe4_tensors moe4_tensors;

/* Opens a .safetensors or .gguf file, or a folder: the shards of model.safetensors.index.json, without it
 * model.safetensors alone, without that every *.safetensors in it, without any the one GGUF model.  A GGUF file that is one
 * of several (NAME-00001-of-00003.gguf) brings the others.  Reads headers only; keeps the files open.
 * MOE4_EIO: the system refused; MOE4_EFORMAT: a header breaks the format, a shard is missing or names clash. */
MOE4_API moe4_status moe4_tensors_open(moe4_context *context, const char *path, moe4_tensors **tensors);
MOE4_API void moe4_tensors_close(moe4_tensors *tensors);

/* Tensors in file order.  Descriptions live as long as the object. */
MOE4_API int64_t moe4_tensors_count(const moe4_tensors *tensors);
MOE4_API const moe4_tensor *moe4_tensors_get(const moe4_tensors *tensors, int64_t index);
/* NULL if there is none of that name.  Constant time. */
MOE4_API const moe4_tensor *moe4_tensors_find(const moe4_tensors *tensors, const char *name);

/* Reads bytes first .. first+n_bytes-1 of a tensor into buffer.  MOE4_EIO when the file has shrunk. */
MOE4_API moe4_status moe4_tensors_read(moe4_context *context, const moe4_tensors *tensors, const moe4_tensor *tensor,
                                       int64_t first, int64_t n_bytes, void *buffer);

/* A string from the header's __metadata__, or the text of a GGUF value that is no array (of the first file that has the
 * key); NULL if absent. */
MOE4_API const char *moe4_tensors_metadata(const moe4_tensors *tensors, const char *key);

typedef struct moe4_writer moe4_writer;

/* Starts a safetensors file at path with these tensors (file, offset and n_bytes are ignored) and string metadata
 * pairs key, value, ..., NULL (NULL = none).  Data is written to a temporary file beside path. */
MOE4_API moe4_status moe4_writer_create(moe4_context *context, const char *path, const moe4_tensor *tensors,
                                        int32_t n_tensors, const char *const *metadata, moe4_writer **writer);
/* A value of a GGUF file's metadata. */
typedef enum moe4_gguf_type {
    MOE4_GGUF_U32 = 0,
    MOE4_GGUF_F32,
    MOE4_GGUF_BOOL,
    MOE4_GGUF_STRING,
    MOE4_GGUF_F32_ARRAY,
    MOE4_GGUF_U16,
    MOE4_GGUF_I32
} moe4_gguf_type;
typedef struct moe4_gguf_value {
    const char *key;
    moe4_gguf_type type;
    uint32_t u32;      /* U32, BOOL (0 or 1), U16, I32 (as unsigned) */
    float f32;
    const char *text;  /* STRING */
    const float *array; /* F32_ARRAY: n_elements */
    int64_t n_elements;
} moe4_gguf_value;
/* The same for a GGUF file (version 3): at most four dimensions, names of at most 63 bytes, types F32, F16, BF16, I32, I64
 * and MXFP4, whose innermost dimension is a multiple of 32 and takes 17 bytes for each 32: the scale, then 16 bytes whose
 * byte j has element j in the low nibble and element j + 16 in the high one.  shape is outermost first, as ever. */
MOE4_API moe4_status moe4_gguf_writer_create(moe4_context *context, const char *path, const moe4_tensor *tensors,
                                             int32_t n_tensors, const moe4_gguf_value *values, int32_t n_values,
                                             moe4_writer **writer);
/* Writes bytes first .. first+n_bytes-1 of tensor `index`; any order, each byte once: commit counts them. */
MOE4_API moe4_status moe4_writer_write(moe4_context *context, moe4_writer *writer, int32_t index, int64_t first,
                                       int64_t n_bytes, const void *data);
/* Checks that all is written, flushes and renames over path, and frees the writer, also on failure. */
MOE4_API moe4_status moe4_writer_commit(moe4_context *context, moe4_writer *writer);
/* Gives up: removes the temporary file and frees the writer.  NULL is fine. */
MOE4_API void moe4_writer_discard(moe4_writer *writer);

/* ---- Checkpoints ---------------------------------------------------------------------------------------------- */

typedef struct moe4_checkpoint moe4_checkpoint;

/* Opens a checkpoint: a folder with config.json and *.safetensors, a .gguf file, or a folder of one.  Recognises model and
 * layout and lists the MoE layers whose routed experts are MXFP4; reads headers and config only.  What surrounds the
 * routed experts (shared experts, latent projections, attention) is not run, only told apart.
 * A layer none of whose expert tensors is here is not listed: a folder may hold a part of a model.  One that lacks some of
 * its tensors is listed, and refused when it is opened.  Where config.json speaks of no quantisation, experts in bf16, f16 or
 * f32 are layers in another precision.  MOE4_EUNSUPPORTED, naming it, for whatever cannot be read
 * right. */
MOE4_API moe4_status moe4_checkpoint_open(moe4_context *context, const char *path, moe4_checkpoint **checkpoint);
MOE4_API void moe4_checkpoint_close(moe4_checkpoint *checkpoint);

typedef struct moe4_checkpoint_info {
    size_t size;
    const char *family;        /* the model: "gpt-oss", "Kimi-K3", ... */
    const char *layout;        /* how it is stored: "gpt-oss released", "GGUF", ... */
    int32_t n_model_layers;    /* as the config says */
    int32_t n_moe_layers;      /* that are here and can be read, extra ones included */
    int32_t n_extra_layers;    /* for multi-token prediction, numbered from n_model_layers */
    int32_t n_other_layers;    /* MoE layers that are here, but not in MXFP4 */
    int32_t n_shared_experts;  /* beside the routed ones of a layer, as the config says */
    int64_t model_hidden_size; /* what the router sees; larger than the layers' hidden_size in latent models */
} moe4_checkpoint_info;
#define MOE4_CHECKPOINT_INFO_INIT {sizeof(moe4_checkpoint_info), 0, 0, 0, 0, 0, 0, 0, 0}
MOE4_API moe4_status moe4_checkpoint_describe(const moe4_checkpoint *checkpoint, moe4_checkpoint_info *info);

/* Model layer number of the index-th MoE layer, ascending; -1 past the end. */
MOE4_API int32_t moe4_checkpoint_layer_number(const moe4_checkpoint *checkpoint, int32_t index);

/* All tensors of the checkpoint. */
MOE4_API const moe4_tensors *moe4_checkpoint_tensors(const moe4_checkpoint *checkpoint);

/* What a tensor is to the MoE layers. */
typedef enum moe4_tensor_role {
    MOE4_ROLE_OTHER = 0,     /* attention, norms, dense layers, ... */
    MOE4_ROLE_EXPERT,        /* of routed experts, in any precision */
    MOE4_ROLE_ROUTER,        /* weight, biases, hash table */
    MOE4_ROLE_SHARED_EXPERT, /* experts that every token takes */
    MOE4_ROLE_LATENT,        /* between the model's width and that of its experts */
    MOE4_ROLE_UNUSED         /* of routed experts, but nothing that a layer here computes with: scales of activations */
} moe4_tensor_role;
/* By its name; *layer_number (may be NULL) is the model layer in whose MoE block it lies, -1 for none. */
MOE4_API moe4_tensor_role moe4_checkpoint_role(const moe4_checkpoint *checkpoint, const moe4_tensor *tensor,
                                               int32_t *layer_number);

typedef struct moe4_layer_reader moe4_layer_reader;

/* Whether a reader reads the router at once. */
typedef enum moe4_router_use {
    MOE4_ROUTER_READ = 0,
    MOE4_ROUTER_SKIP /* check it only: the config has the types of its tensors, but no pointers */
} moe4_router_use;

/* Whether a reader reads experts at all. */
typedef enum moe4_expert_use {
    MOE4_EXPERTS_READ = 0,
    MOE4_EXPERTS_SKIP /* config and router only, of a layer in any precision; the order of gate and up is not known */
} moe4_expert_use;

typedef struct moe4_reader_options {
    size_t size;
    int32_t first_expert; /* the local range; */
    int32_t n_experts;    /* 0 = all from first_expert */
    /* Called after each expert; returning non-zero cancels with MOE4_EIO.  NULL = not wanted. */
    int (*progress)(void *user, int64_t bytes_done, int64_t bytes_total);
    void *user;
    moe4_router_use router;
    moe4_expert_use experts;
} moe4_reader_options;
#define MOE4_READER_OPTIONS_INIT {sizeof(moe4_reader_options), 0, 0, 0, 0, MOE4_ROUTER_READ, MOE4_EXPERTS_READ}

/* Prepares to read model layer `layer_number`: checks every tensor of its local experts against the config and reads the
 * router.
 * Holds buffers for one expert.  options may be NULL.  The checkpoint must outlive the reader. */
MOE4_API moe4_status moe4_layer_reader_open(moe4_context *context, const moe4_checkpoint *checkpoint,
                                            int32_t layer_number, const moe4_reader_options *options,
                                            moe4_layer_reader **reader);
MOE4_API void moe4_layer_reader_close(moe4_layer_reader *reader);

/* The layer's config; its pointers live as long as the reader. */
MOE4_API const moe4_layer_config *moe4_layer_reader_config(const moe4_layer_reader *reader);

/* Reads one local expert (not with MOE4_EXPERTS_SKIP), in any order and any number of times; the pointers are valid until the next read. */
MOE4_API moe4_status moe4_layer_reader_read(moe4_context *context, moe4_layer_reader *reader, int32_t local_expert,
                                            moe4_expert *expert);

/* The reader as a source of moe4_layer_create_from, all NULL if one of the two is; both must outlive its use.  A GPU's
 * copies are fed from the files by several threads, except from GGUF. */
MOE4_API moe4_expert_source moe4_layer_reader_source(moe4_context *context, moe4_layer_reader *reader);

/* All of the above at once: reads model layer `layer_number` and prepares it.  Extra memory: one expert. */
MOE4_API moe4_status moe4_checkpoint_load(moe4_context *context, const moe4_checkpoint *checkpoint,
                                          int32_t layer_number, const moe4_reader_options *options, moe4_layer **layer);

/* ---- Prepared layers ------------------------------------------------------------------------------------------ */

/* Saves a prepared layer, so that a later start need not read and repack the checkpoint.  The file is safetensors: it
 * appears at path only when complete, and fits any CPU of this architecture, or, from a CUDA context, any GPU.
 * source names what the layer was made from (a hash, say) for moe4_layer_load to compare; at most 255 bytes. */
MOE4_API moe4_status moe4_layer_save(moe4_context *context, const moe4_layer *layer, const char *source,
                                     const char *path);

/* How moe4_layer_load gets at the weights. */
typedef enum moe4_mapping {
    MOE4_MAPPING_NONE = 0, /* read into memory */
    MOE4_MAPPING_SHARED    /* map the file: processes share one copy and pages come when touched, but a file that shrinks
                              under the mapping kills the process (SIGBUS).  CPU only */
} moe4_mapping;

/* Loads what moe4_layer_save wrote.  Every size and id in it is checked; weights are taken as they are.
 * MOE4_EFORMAT, naming both values, for a file of another layout version or library, or when source is not NULL and
 * differs from the file's. */
MOE4_API moe4_status moe4_layer_load(moe4_context *context, const char *path, const char *source, moe4_mapping mapping,
                                     moe4_layer **layer);

/* A key of what a reader reads: files, sizes, modification times and tensor places of the layer, as 32 hexadecimal
 * digits.  Any change of the checkpoint changes it, without its bytes being read. */
MOE4_API moe4_status moe4_layer_reader_key(const moe4_layer_reader *reader, char key[33]);

#ifdef __cplusplus
}
#endif
#endif
