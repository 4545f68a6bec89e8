#include "cuda/upload.h"

#include <string.h>

#include "cpu/pool.h"

enum { MAX_COPY_THREADS = 16 }; /* memory and the link are busy before that */

static moe4_status upload_open(struct moe4_context *context, struct upload *upload)
{
    static const struct topology one_node = {.n_nodes = 1}; /* threads go where the source's memory is */
    upload->context = context;
    const int32_t available = pool_available_cpus();
    const size_t ring_bytes = (size_t)UPLOAD_SLOTS * UPLOAD_SLOT_BYTES;
    moe4_status status = device_stream_create(context, &upload->stream);
    for (int i = 0; !status && i < UPLOAD_SLOTS; i++) status = device_event_create(context, &upload->taken[i]);
    if (status) return status;
    upload->ring = device_allocate_pinned(ring_bytes);
    if (!upload->ring) return context_fail_memory(context, "copies to the device", ring_bytes);
    const int32_t n_threads = available < MAX_COPY_THREADS ? available : MAX_COPY_THREADS;
    upload->pool = pool_create(&context->allocator, n_threads, &one_node);
    return upload->pool ? MOE4_OK : context_fail(context, MOE4_ENOMEM, "out of memory or threads: a pool for copies");
}

moe4_status upload_of(struct moe4_context *context, struct upload **result)
{
    struct upload *upload = context->cuda->upload;
    if (!upload) {
        upload = memory_allocate_zeroed(&context->allocator, sizeof *upload);
        if (!upload) return context_fail_memory(context, "copies to the device", sizeof *upload);
        moe4_status status = upload_open(context, upload);
        if (status) {
            upload_close(upload);
            return status;
        }
        context->cuda->upload = upload;
    }
    *result = upload;
    return MOE4_OK;
}

void upload_close(struct upload *upload)
{
    if (!upload) return;
    pool_destroy(upload->pool);
    device_release_pinned(upload->ring);
    for (int i = 0; i < UPLOAD_SLOTS; i++) device_event_destroy(upload->taken[i]);
    device_stream_destroy(upload->stream);
    memory_release(&upload->context->allocator, upload, sizeof *upload);
}

/* Bytes first .. first+n-1 of the rows, gaps left out, on their way to a slot. */
struct piece {
    char *slot;
    const char *from;
    size_t pitch, width;
    size_t first, n;
    int32_t n_workers;
};

static void copy_share(void *argument, int32_t worker)
{
    const struct piece *piece = argument;
    const size_t share = (piece->n / (size_t)piece->n_workers + 64) / 64 * 64;
    size_t at = (size_t)worker * share, end = at + share < piece->n ? at + share : piece->n;
    while (at < end) {
        const size_t row = (piece->first + at) / piece->width, column = (piece->first + at) % piece->width;
        const size_t left = piece->width - column, n = left < end - at ? left : end - at;
        memcpy(piece->slot + at, piece->from + row * piece->pitch + column, n);
        at += n;
    }
}

static moe4_status upload_piece(struct upload *upload, char *to, const struct piece *given)
{
    struct moe4_context *context = upload->context;
    struct piece piece = *given;
    const int64_t slot = upload->n_pieces % UPLOAD_SLOTS;
    moe4_status status = MOE4_OK;
    if (upload->n_pieces >= UPLOAD_SLOTS) status = device_event_wait(context, upload->taken[slot]);
    if (status) return status;
    piece.slot = upload->ring + slot * UPLOAD_SLOT_BYTES;
    piece.n_workers = pool_width(upload->pool);
    pool_run(upload->pool, copy_share, &piece);
    status = device_upload(context, to, piece.slot, piece.n, upload->stream);
    if (!status) status = device_event_record(context, upload->taken[slot], upload->stream);
    upload->n_pieces++;
    return status;
}

moe4_status upload_rows(struct upload *upload, void *to, const void *from, size_t pitch, size_t width, size_t rows)
{
    if (device_reads(from)) {
        upload->has_direct = 1;
        return device_upload_rows(upload->context, to, from, pitch, width, rows, upload->stream);
    }
    const size_t total = width * rows;
    struct piece piece = {.from = from, .pitch = pitch, .width = pitch == width ? total : width};
    moe4_status status = MOE4_OK;
    for (; !status && piece.first < total; piece.first += piece.n) {
        const size_t left = total - piece.first;
        piece.n = left < UPLOAD_SLOT_BYTES ? left : UPLOAD_SLOT_BYTES;
        status = upload_piece(upload, (char *)to + piece.first, &piece);
    }
    return status;
}

moe4_status upload_settle(struct upload *upload)
{
    if (!upload->has_direct) return MOE4_OK;
    upload->has_direct = 0;
    return device_stream_wait(upload->context, upload->stream);
}
