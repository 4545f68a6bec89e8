#include "cuda/upload.h"

#include <string.h>

#include "cpu/pool.h"

enum {
    MAX_COPY_THREADS = 16, /* memory and the link are busy before that */
    LEAST_SHARED_BYTES = 1 << 16
};

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

/* Bytes first .. first+n-1 of a run on their way to a slot. */
struct piece {
    char *slot;
    const struct upload_run *run;
    size_t first, n;
    int32_t n_workers;
    _Atomic int32_t status; /* of the run's source */
};

static void gather_rows(const struct upload_span *span, size_t at, size_t end, char *to)
{
    while (at < end) {
        const size_t row = at / span->width, column = at % span->width;
        const size_t left = span->width - column, n = left < end - at ? left : end - at;
        memcpy(to, span->from + row * span->pitch + column, n);
        at += n;
        to += n;
    }
}

/* Bytes at .. end-1 of a span. */
static moe4_status copy_span(const struct upload_run *run, const struct upload_span *span, size_t at, size_t end,
                             char *to)
{
    const moe4_expert_source *source = run->source;
    if (!span->from) return source->copy(source->user, run->l, span->part, (int64_t)at, (int64_t)(end - at), to);
    gather_rows(span, at, end, to);
    return MOE4_OK;
}

/* Dealt out, not claimed: a thread that writes to the same part of a slot each time finds it in its own cache. */
static void copy_share(void *argument, int32_t worker)
{
    struct piece *piece = argument;
    const size_t share = (piece->n / (size_t)piece->n_workers + 64) / 64 * 64;
    const size_t begin = piece->first + (size_t)worker * share, last = piece->first + piece->n;
    const size_t end = begin + share < last ? begin + share : last;
    size_t span_begin = 0;
    for (int32_t i = 0; i < piece->run->n_spans; i++) {
        const struct upload_span *span = &piece->run->spans[i];
        const size_t span_end = span_begin + span->n_bytes;
        const size_t from = begin > span_begin ? begin : span_begin, to = end < span_end ? end : span_end;
        if (from < to) {
            char *place = piece->slot + (from - piece->first);
            moe4_status status = copy_span(piece->run, span, from - span_begin, to - span_begin, place);
            if (status) piece->status = status;
        }
        span_begin = span_end;
    }
}

static moe4_status upload_piece(struct upload *upload, struct piece *piece)
{
    struct moe4_context *context = upload->context;
    const int64_t slot = upload->n_pieces % UPLOAD_SLOTS;
    moe4_status status = MOE4_OK;
    if (upload->n_pieces >= UPLOAD_SLOTS) status = device_event_wait(context, upload->taken[slot]);
    if (status) return status;
    piece->slot = upload->ring + slot * UPLOAD_SLOT_BYTES;
    piece->n_workers = piece->n < LEAST_SHARED_BYTES ? 1 : pool_width(upload->pool);
    if (piece->n_workers == 1)
        copy_share(piece, 0);
    else
        pool_run(upload->pool, copy_share, piece);
    if (piece->status) return layer_source_failed(context, piece->run->l, (moe4_status)piece->status);
    status = device_upload(context, (char *)piece->run->to + piece->first, piece->slot, piece->n, upload->stream);
    if (!status) status = device_event_record(context, upload->taken[slot], upload->stream);
    upload->n_pieces++;
    return status;
}

/* Spans that the copy engine reads by itself. */
static moe4_status upload_directly(struct upload *upload, const struct upload_run *run)
{
    char *to = run->to;
    moe4_status status = MOE4_OK;
    upload->has_direct = 1;
    for (int32_t i = 0; !status && i < run->n_spans; i++) {
        const struct upload_span *span = &run->spans[i];
        status = device_upload_rows(upload->context, to, span->from, span->pitch, span->width,
                                    span->n_bytes / span->width, upload->stream);
        to += span->n_bytes;
    }
    return status;
}

moe4_status upload_run(struct upload *upload, const struct upload_run *run)
{
    size_t total = 0;
    int is_direct = 1;
    for (int32_t i = 0; i < run->n_spans; i++) {
        total += run->spans[i].n_bytes;
        is_direct &= run->spans[i].from && device_reads(run->spans[i].from);
    }
    if (is_direct) return upload_directly(upload, run);
    struct piece piece = {.run = run};
    const size_t n_pieces = (total + UPLOAD_SLOT_BYTES - 1) / UPLOAD_SLOT_BYTES; /* of about the same size */
    const size_t most = n_pieces ? (total + n_pieces - 1) / n_pieces : 0;
    moe4_status status = MOE4_OK;
    for (; !status && piece.first < total; piece.first += piece.n) {
        piece.n = total - piece.first < most ? total - piece.first : most;
        status = upload_piece(upload, &piece);
    }
    return status;
}

moe4_status upload_settle(struct upload *upload)
{
    if (!upload->has_direct) return MOE4_OK;
    upload->has_direct = 0;
    return device_stream_wait(upload->context, upload->stream);
}
