/* Fast message queue: a lock-free circular FIFO in shared memory.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * W and R count BYTES since the beginning and only grow; ring offset = counter mod ring size. Empty: W equals R.
 * Full: W is one ring size ahead of R. The size is a multiple of the quantum, so elements never straddle the end.
 *
 * Grantors (offset + extent in a file) describe all places, so any layout can be attached. New queues have this one:
 *
 *    offset   bytes        what                                              written by
 *         0   8            R, read counter   (unsynchronized: unused)        reader
 *       128   8            W, write counter                                  writer
 *       136   8            write intent      (unsynchronized only)           writer
 *       136   48           stamp             (NNB_LAYOUT_STAMPED; watch.c)   writer
 *       256   4            event word                                        both
 *       384   n * quantum  ring                                              writer
 *
 * R, W and the event word have 128 bytes each: with the 16-byte header of libfmq (NNB_LAYOUT_COMPAT), the reader's
 * store to R would take the cache line from the writer that is about to store W.
 *
 * Trust: the peer may write anything at any time. Each operation loads every shared counter at most once, checks the
 * value and uses no other. An exclusive handle remembers its own counter. A queue is corrupt if a counter is not as its
 * mover left it (only a burst channel does not check its W, see nnb_mq_put). A synchronized queue is corrupt for good
 * if a counter is impossible. On an unsynchronized queue W may be more than a ring ahead.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "nnb_internal.h"

#define MAX_FDS 16u
#define LINE 64u /* bytes; NNB_CACHE_LINE is two, which processors fetch in pairs */

/* ---- layout ---------------------------------------------------------------------------------------------------- */

static uint64_t align_up(uint64_t v, uint64_t to) { return (v + to - 1) & ~(to - 1); }

int nnb_mq_layout(uint64_t count, uint32_t quantum, uint32_t flavour, uint32_t layout, int with_event, nnb_grantor *out,
                  uint64_t *region_size)
{
    if (!count || !quantum || !out || !region_size || layout > NNB_LAYOUT_STAMPED ||
        (flavour != NNB_SYNCHRONIZED && flavour != NNB_UNSYNCHRONIZED))
        return -EINVAL;
    if (!with_event && layout != NNB_LAYOUT_COMPAT)
        return -EINVAL;
    /* In the format, offsets have 32 bits; one dialect has signed offsets. */
    if (count > (uint64_t)INT32_MAX / quantum)
        return -EOVERFLOW;
    int is_compat = layout == NNB_LAYOUT_COMPAT, is_stamped = layout == NNB_LAYOUT_STAMPED;
    uint32_t first = is_compat ? 16 : 3 * NNB_CACHE_LINE;
    uint64_t end = first + count * quantum, event = is_compat ? align_up(end, 8) : 2 * NNB_CACHE_LINE;
    out[NNB_GRANTOR_READ] = (nnb_grantor){.extent = 8};
    out[NNB_GRANTOR_WRITE] = (nnb_grantor){.offset = is_compat ? 8 : NNB_CACHE_LINE, .extent = 8};
    out[NNB_GRANTOR_DATA] = (nnb_grantor){.offset = first, .extent = count * quantum};
    out[NNB_GRANTOR_EVENT] = (nnb_grantor){.offset = (uint32_t)event, .extent = 4};
    out[4] = (nnb_grantor){.offset = NNB_CACHE_LINE + 8, .extent = flavour == NNB_UNSYNCHRONIZED ? 8 : NNB_STAMP_BYTES};
    int n = is_compat ? 3 + with_event : 4 + (flavour == NNB_UNSYNCHRONIZED || is_stamped);
    if (is_compat)
        end = event + (with_event ? 4 : 0);
    *region_size = align_up(end, (uint64_t)sysconf(_SC_PAGESIZE));
    return end > INT32_MAX ? -EOVERFLOW : n;
}

/* ---- open / close --------------------------------------------------------------------------------------------- */

static int overlap(const nnb_grantor *a, const nnb_grantor *b)
{
    return a->fd_index == b->fd_index && a->offset < b->offset + b->extent && b->offset < a->offset + a->extent;
}

static int check_grantors(const nnb_grantor *g, uint32_t n, uint32_t n_fds, uint32_t quantum)
{
    static const uint64_t least[] = {8, 8, 1, 4, 8};
    if (n < 3 || !quantum)
        return -EINVAL;
    for (uint32_t i = 0; i < n; i++) {
        uint32_t align = i == NNB_GRANTOR_EVENT ? 4 : 8;
        if (g[i].fd_index >= n_fds || g[i].offset % align || g[i].extent < least[i] || g[i].extent > (1ull << 40))
            return -EINVAL;
        for (uint32_t j = 0; j < i; j++)
            if (overlap(&g[i], &g[j]))
                return -EINVAL;
    }
    /* A remainder would let elements overlap after the wrap. */
    return g[NNB_GRANTOR_DATA].extent % quantum ? -EINVAL : 0;
}

/* Returns 1 for six words just after W, on the cache line of W. Another grantor here belongs to an unknown program. */
static int is_stamp(const nnb_grantor *stamp, const nnb_grantor *w)
{
    return stamp->fd_index == w->fd_index && stamp->offset == w->offset + 8 && stamp->extent == NNB_STAMP_BYTES &&
           w->extent == 8;
}

/* Maps one range of each fd, which contains all its grantors. */
static int map_fds(nnb_mq *q, const nnb_grantor *g, uint32_t n, const int *fds, uint32_t n_fds, int prot)
{
    for (uint32_t f = 0; f < n_fds; f++) {
        uint64_t low = UINT64_MAX, high = 0;
        for (uint32_t i = 0; i < n; i++) {
            if (g[i].fd_index != f)
                continue;
            if (g[i].offset < low)
                low = g[i].offset;
            if (g[i].offset + g[i].extent > high)
                high = g[i].offset + g[i].extent;
        }
        if (low == UINT64_MAX)
            continue;
        if (q->options & NNB_MQ_SEALED && !(nnb_seals(fds[f]) & F_SEAL_SHRINK))
            return -EPERM;
        int rc = nnb_map(&q->maps[f], fds[f], low, high - low, prot, 1);
        if (rc < 0)
            return rc;
        q->is_guarded |= q->maps[f].guard >= 0;
        q->maps[f].addr -= low; /* so that `addr` + a file offset is an address */
    }
    return 0;
}

/* Returns 0, or -EBADMSG for good if the guard has replaced a page: copied bytes then do not come from the peer, or do
 * not reach it. Called before an operation takes effect. */
static int pages_are_there(nnb_mq *q)
{
    for (uint32_t f = 0; q->is_guarded && f < q->n_maps; f++)
        if (nnb_map_faults(&q->maps[f])) {
            q->corrupt = 1;
            return -EBADMSG;
        }
    return 0;
}

static void unmap_fds(nnb_mq *q)
{
    for (uint32_t f = 0; f < q->n_maps; f++)
        nnb_unmap(&q->maps[f]);
}

/* Start with the counter in shared memory. The peer's counter is unknown, so each side loads it before it touches the
 * bytes that it grants. A handle may write in one thread and read in another, so the two functions share no field. */
static void adopt_w(nnb_mq *q)
{
    q->own_w = nnb_load_relaxed(q->w);
    q->w_off = q->own_w % q->size;
    q->seen_r = q->own_w - q->size;
}

static void adopt_r(nnb_mq *q)
{
    q->own_r = nnb_load_relaxed(q->r);
    q->r_off = q->own_r % q->size;
    q->seen_w = q->own_r;
}

/* Take the role at an exclusive handle's first write or read: another handle may have had the role before. */
static void become_writer(nnb_mq *q)
{
    if (q->is_writer || !(q->options & NNB_MQ_EXCLUSIVE))
        return;
    q->is_writer = 1;
    adopt_w(q);
}

static void become_reader(nnb_mq *q)
{
    if (q->is_reader || !(q->options & NNB_MQ_EXCLUSIVE))
        return;
    q->is_reader = 1;
    adopt_r(q);
}

int nnb_mq_open(nnb_mq **out, const nnb_grantor *grantors, uint32_t n_grantors, const int *fds, uint32_t n_fds,
                uint32_t quantum, uint32_t flavour, uint32_t options)
{
    if (!out || !grantors || !fds || !n_fds || n_fds > MAX_FDS)
        return -EINVAL;
    *out = NULL;
    if (flavour != NNB_SYNCHRONIZED && flavour != NNB_UNSYNCHRONIZED)
        return -EINVAL;
    uint32_t n = n_grantors > 5 ? 5 : n_grantors; /* further grantors are ignored */
    if (flavour == NNB_SYNCHRONIZED && n > 4 && !is_stamp(&grantors[NNB_GRANTOR_STAMP], &grantors[NNB_GRANTOR_WRITE]))
        n = 4;
    int rc = check_grantors(grantors, n, n_fds, quantum);
    if (rc < 0)
        return rc;

    nnb_mq *q = calloc(1, sizeof(*q));
    if (!q)
        return -ENOMEM;
    q->maps = calloc(n_fds, sizeof(*q->maps));
    q->n_maps = n_fds;
    q->quantum = quantum;
    q->flavour = flavour;
    q->options = options;
    q->size = grantors[NNB_GRANTOR_DATA].extent;
    q->capacity = q->size / quantum;
    rc = q->maps ? map_fds(q, grantors, n, fds, n_fds, PROT_READ | PROT_WRITE) : -ENOMEM;
    if ((rc == -EPERM || rc == -EACCES) && flavour == NNB_UNSYNCHRONIZED && !(options & NNB_MQ_SEALED)) {
        unmap_fds(q);
        q->read_only = 1;
        rc = options & NNB_MQ_RESET ? -EROFS : map_fds(q, grantors, n, fds, n_fds, PROT_READ);
    }
    if (rc < 0) {
        nnb_mq_close(q);
        return rc;
    }
#define AT(i) (q->maps[grantors[i].fd_index].addr + grantors[i].offset)
    q->ring = AT(NNB_GRANTOR_DATA);
    q->w = (nnb_a64 *)(void *)AT(NNB_GRANTOR_WRITE);
    q->r = flavour == NNB_SYNCHRONIZED ? (nnb_a64 *)(void *)AT(NNB_GRANTOR_READ) : &q->private_r;
    if (n > NNB_GRANTOR_EVENT)
        q->event = (uint32_t *)(void *)AT(NNB_GRANTOR_EVENT);
    if (n > NNB_GRANTOR_STAMP && flavour == NNB_SYNCHRONIZED)
        q->stamp = (nnb_a64 *)(void *)AT(NNB_GRANTOR_STAMP);
    else if (n > NNB_GRANTOR_INTENT)
        q->intent = (nnb_a64 *)(void *)AT(NNB_GRANTOR_INTENT);
#undef AT
    if (options & NNB_MQ_RESET) {
        if (q->intent)
            nnb_store_relaxed(q->intent, 0);
        nnb_store_relaxed(q->r, 0);
        nnb_store_relaxed(q->w, 0);
    }
    adopt_w(q);
    adopt_r(q);
    *out = q;
    return 0;
}

void nnb_mq_close(nnb_mq *q)
{
    if (!q)
        return;
    if (q->maps)
        unmap_fds(q);
    free(q->maps);
    free(q);
}

void nnb_mq_inherit(nnb_mq *q) { q->is_writer = q->is_reader = 0; }

uint64_t nnb_mq_capacity(const nnb_mq *q) { return q->capacity; }
uint32_t nnb_mq_quantum(const nnb_mq *q) { return q->quantum; }
int nnb_mq_is_read_only(const nnb_mq *q) { return q->read_only; }
uint32_t *nnb_mq_event_word(const nnb_mq *q) { return q->event; }
uint64_t *nnb_mq_write_counter(const nnb_mq *q) { return (uint64_t *)(void *)q->w; }
uint64_t *nnb_mq_read_counter(const nnb_mq *q) { return (uint64_t *)(void *)q->r; }

/* ---- counters ------------------------------------------------------------------------------------------------- */

typedef struct view {
    uint64_t w, r, w_off, r_off;
} view;

/* Loads both counters once. own_is_w: 1 if this operation moves W, 0 if it moves R. */
static view look(nnb_mq *q, int own_is_w)
{
    view v;
    if (own_is_w ? q->is_writer : q->is_reader) {
        /* SYNC POINTS: commit_write <-> available_to_read, commit_read <-> available_to_write */
        v.w = own_is_w ? q->own_w : nnb_load_acquire(q->w);
        v.r = own_is_w ? nnb_load_acquire(q->r) : q->own_r;
        v.w_off = own_is_w ? q->w_off : 0;
        v.r_off = own_is_w ? 0 : q->r_off;
    } else {
        v.w = nnb_load_acquire(q->w);
        v.r = nnb_load_acquire(q->r);
        v.w_off = v.w % q->size;
        v.r_off = v.r % q->size;
    }
    return v;
}

/* Returns the bytes in a synchronized ring, or -EBADMSG for good. */
static int64_t used_bytes(nnb_mq *q, const view *v)
{
    uint64_t used = v->w - v->r;
    return nnb_mq_may_hold(q, used) && nnb_mq_may_hold(q, v->w_off) ? (int64_t)used : -EBADMSG;
}

/* Moves a lapped reader to half a ring behind the writer. */
static int fix_overflow(nnb_mq *q, uint64_t w)
{
    q->own_r = w - (q->capacity / 2) * q->quantum;
    nnb_store_relaxed(q->r, q->own_r);
    return -EOVERFLOW;
}

int64_t nnb_mq_available_to_read(nnb_mq *q)
{
    view v = look(q, 0);
    if (q->flavour == NNB_UNSYNCHRONIZED)
        /* An overtaken reader finds more than the capacity, but never more than 2^63 bytes. */
        return v.w < v.r || v.w - v.r > INT64_MAX ? -EBADMSG : (int64_t)((v.w - v.r) / q->quantum);
    int64_t used = used_bytes(q, &v);
    return used < 0 ? used : used / (int64_t)q->quantum;
}

int64_t nnb_mq_available_to_write(nnb_mq *q)
{
    view v = look(q, 1);
    if (q->flavour == NNB_UNSYNCHRONIZED) {
        uint64_t used = v.w - v.r;
        return used > q->size ? 0 : (int64_t)((q->size - used) / q->quantum);
    }
    int64_t used = used_bytes(q, &v);
    return used < 0 ? used : ((int64_t)q->size - used) / (int64_t)q->quantum;
}

/* ---- transactions --------------------------------------------------------------------------------------------- */

static void regions(const nnb_mq *q, uint64_t offset, uint64_t count, nnb_mq_region *tx)
{
    uint64_t to_end = (q->size - offset) / q->quantum;
    tx->first = q->ring + offset;
    tx->first_count = count < to_end ? count : to_end;
    tx->second = q->ring;
    tx->second_count = count - tx->first_count;
}

int nnb_mq_begin_write(nnb_mq *q, uint64_t count, nnb_mq_region *tx)
{
    memset(tx, 0, sizeof(*tx));
    q->tx_write = 0;
    if (q->read_only)
        return -EROFS;
    if (count > q->capacity)
        return -EMSGSIZE;
    become_writer(q);
    view v = look(q, 1);
    if (q->flavour == NNB_SYNCHRONIZED) {
        int64_t used = used_bytes(q, &v);
        if (used < 0)
            return (int)used;
        if ((uint64_t)used + count * q->quantum > q->size)
            return -EAGAIN;
    } else {
        if (q->corrupt || v.w_off % q->quantum)
            return -EBADMSG;
        if (q->intent) {
            nnb_store_relaxed(q->intent, v.w + count * q->quantum);
            nnb_fence_release(); /* SYNC POINT: write_intent <-> overtaken */
        }
    }
    q->own_w = v.w;
    q->w_off = v.w_off;
    q->tx_write = count;
    regions(q, v.w_off, count, tx);
    return 0;
}

int nnb_mq_commit_write(nnb_mq *q, uint64_t count)
{
    if (count > q->tx_write)
        return -EINVAL;
    q->tx_write = 0;
    int rc = pages_are_there(q);
    return rc < 0 ? rc : nnb_mq_publish(q, count * q->quantum);
}

int nnb_mq_begin_read(nnb_mq *q, uint64_t count, nnb_mq_region *tx)
{
    memset(tx, 0, sizeof(*tx));
    q->tx_read = 0;
    if (count > q->capacity)
        return -EMSGSIZE;
    become_reader(q);
    view v = look(q, 0);
    if (q->flavour == NNB_SYNCHRONIZED) {
        int64_t used = used_bytes(q, &v);
        if (used < 0)
            return (int)used;
        if ((uint64_t)used < count * q->quantum)
            return -EAGAIN;
    } else {
        if (v.w % q->size % q->quantum)
            return -EBADMSG;
        if (v.w - v.r > q->size)
            return fix_overflow(q, v.w);
        if (v.w - v.r < count * q->quantum)
            return -EAGAIN;
        v.r_off = v.r % q->size;
    }
    q->own_r = v.r;
    q->r_off = v.r_off;
    q->seen_w = v.w; /* never behind own_r, which read_exclusive subtracts */
    q->tx_read = count;
    regions(q, v.r_off, count, tx);
    return 0;
}

int nnb_mq_commit_read(nnb_mq *q, uint64_t count)
{
    if (count > q->tx_read)
        return -EINVAL;
    q->tx_read = 0;
    if (pages_are_there(q) < 0)
        return -EBADMSG;
    if (q->flavour == NNB_UNSYNCHRONIZED) {
        nnb_fence_acquire(); /* SYNC POINT: write_intent <-> overtaken */
        uint64_t w = nnb_load_relaxed(q->w);
        uint64_t limit = q->intent ? nnb_load_relaxed(q->intent) : w;
        if (w - q->own_r > q->size || (limit > w && limit - q->own_r > q->size))
            return fix_overflow(q, w);
    }
    return nnb_mq_consume(q, count * q->quantum);
}

/* ---- copying -------------------------------------------------------------------------------------------------- */

/* Returns 1 if the handle knows its own counter and offset, without a load or a division. */
static int is_exclusive(const nnb_mq *q) { return q->flavour == NNB_SYNCHRONIZED && q->options & NNB_MQ_EXCLUSIVE; }

static int read_exclusive(nnb_mq *q, uint8_t *to, uint64_t count)
{
    uint64_t bytes = count * q->quantum;
    if (count > q->capacity)
        return -EMSGSIZE;
    become_reader(q);
    if (q->seen_w - q->own_r < bytes || q->corrupt) {
        int64_t there = nnb_mq_poll(q);
        if (there < 0 || q->corrupt)
            return -EBADMSG;
        if ((uint64_t)there < bytes) {
            /* Fetch the data's line with W's. A writer of more than a line would lose its first line. */
            if (bytes <= LINE)
                __builtin_prefetch(q->ring + q->r_off);
            return -EAGAIN;
        }
    }
    nnb_mq_peek(q, 0, to, bytes);
    if (pages_are_there(q) < 0)
        return -EBADMSG;
    return nnb_mq_consume(q, bytes);
}

/* Copies between a region and the caller's memory. */
static void copy(const nnb_mq *q, const nnb_mq_region *tx, uint8_t *data, int reads)
{
    uint8_t *parts[] = {tx->first, tx->second};
    uint64_t sizes[] = {tx->first_count * q->quantum, tx->second_count * q->quantum};
    for (int i = 0; i < 2; data += sizes[i++]) {
        uint8_t *to = reads ? data : parts[i], *from = reads ? parts[i] : data;
        if (q->flavour == NNB_SYNCHRONIZED)
            memcpy(to, from, sizes[i]);
        else
            nnb_copy_racy(to, from, sizes[i], reads);
    }
}

int nnb_mq_write(nnb_mq *q, const void *data, uint64_t count)
{
    nnb_mq_region tx;
    if (!data)
        return -EINVAL;
    if (is_exclusive(q)) {
        if (count > q->capacity)
            return -EMSGSIZE;
        become_writer(q);
        int rc = nnb_mq_fill(q, data, count * q->quantum);
        if (rc == 0)
            rc = pages_are_there(q);
        return rc < 0 ? rc : nnb_mq_publish(q, count * q->quantum);
    }
    int rc = nnb_mq_begin_write(q, count, &tx);
    if (rc < 0)
        return rc;
    copy(q, &tx, (uint8_t *)(uintptr_t)data, 0);
    return nnb_mq_commit_write(q, count);
}

int nnb_mq_read(nnb_mq *q, void *data, uint64_t count)
{
    nnb_mq_region tx;
    if (!data)
        return -EINVAL;
    if (is_exclusive(q))
        return read_exclusive(q, data, count);
    int rc = nnb_mq_begin_read(q, count, &tx);
    if (rc < 0)
        return rc;
    copy(q, &tx, data, 1);
    return nnb_mq_commit_read(q, count);
}

/* ---- blocking ------------------------------------------------------------------------------------------------- */

static int blocking(nnb_mq *q, int reads, void *data, uint64_t count, uint32_t wait_for, uint32_t wake,
                    uint64_t deadline_ns, uint32_t *word)
{
    if (!word)
        word = q->event;
    if (!word || !wait_for || q->flavour != NNB_SYNCHRONIZED || !data)
        return -EINVAL;
    for (int waited = 0;;) {
        int rc = reads ? nnb_mq_read(q, data, count) : nnb_mq_write(q, data, count);
        if (rc == 0) {
            rc = wake ? nnb_event_wake(word, wake) : 0;
            return rc < 0 ? rc : 0;
        }
        if (rc != -EAGAIN || waited < 0)
            return rc == -EAGAIN ? waited : rc;
        uint32_t state;
        waited = nnb_event_wait_retry(word, wait_for, &state, deadline_ns);
        if (waited < 0 && waited != -ETIMEDOUT) /* on -ETIMEDOUT, try once more */
            return waited;
    }
}

int nnb_mq_read_blocking(nnb_mq *q, void *data, uint64_t count, uint32_t read_notification, uint32_t write_notification,
                         uint64_t deadline_ns, uint32_t *word)
{
    return blocking(q, 1, data, count, write_notification, read_notification, deadline_ns, word);
}

int nnb_mq_write_blocking(nnb_mq *q, const void *data, uint64_t count, uint32_t read_notification,
                          uint32_t write_notification, uint64_t deadline_ns, uint32_t *word)
{
    return blocking(q, 0, (void *)(uintptr_t)data, count, read_notification, write_notification, deadline_ns, word);
}
