/* Declarations that only C files of the core share: queues as a burst sees them, threads, words.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef NNB_INTERNAL_H
#define NNB_INTERNAL_H

#include <errno.h>
#include <pthread.h>
#include <string.h>

#include "nnb_atomic.h"
#include "nnburst.h"

#define NNB_SLICE_NS 100000000u /* about the longest wait inside one call */
#define NNB_SPINS 128u          /* looks at a queue before one at the clock */

enum { /* statuses of NNAPI */
       NNB_GENERAL_FAILURE = 2,
       NNB_OUTPUT_INSUFFICIENT_SIZE = 3,
       NNB_MISSED_DEADLINE = 5,
       NNB_RESOURCE_EXHAUSTED = 7,
       NNB_LAST_STATUS = 8,
};

/* descriptor.c: starts a thread without signals, on a small stack, to be joined; NULL: a detached one. */
int nnb_start_thread(pthread_t *joined, void *(*run)(void *), void *argument);

/* Adds to a counter that other processes only read. One thread at a time writes the counter. */
static inline void nnb_count(uint64_t *counters, uint32_t which, uint64_t n)
{
    nnb_a64 *word = (nnb_a64 *)&counters[which];
    nnb_store_relaxed(word, nnb_load_relaxed(word) + n);
}
/* event_flag.c: the first half of a wait in an event loop. Sets the mark, and takes the pending bits. Either a later
 * look finds a packet, or the packet's sender finds the mark and the cleared bits. */
void nnb_event_expect(uint32_t *word, uint32_t mask, uint32_t mark);
void nnb_event_mark(uint32_t *word, uint32_t mark, int on); /* on: 1 or 0 */
#define NNB_MARKED 2
/* Like nnb_event_wake, but if the mark is set, this wakes no waiter and returns NNB_MARKED. */
int nnb_event_wake_unless(uint32_t *word, uint32_t mask, uint32_t mark);

/* bell.c: makes a socket readable. Never waits, whatever the other end does. */
void nnb_bell_ring(int fd);
int nnb_bell_copy(int *copy, int fd); /* fd -1: no bell */

struct nnb_mq {
    uint8_t *ring;
    uint64_t size; /* bytes, a multiple of quantum */
    uint64_t capacity;
    uint32_t quantum;
    uint32_t flavour;
    uint32_t options;
    int is_writer, is_reader; /* exclusive handles: the roles that this one has taken */
    int corrupt;              /* sticky */
    int read_only;
    int is_guarded;  /* a page of the memory may vanish: see pages_are_there */
    nnb_a64 *w, *r;  /* shared; for an unsynchronized queue r points at own_r */
    nnb_a64 *intent; /* NULL when the layout has none */
    uint32_t *event;
    nnb_a64 *stamp; /* six words beside W, or NULL; see watch.c */
    /* Private counters. Exclusive handles trust only these for their own role; w_off, r_off = counter mod size. */
    uint64_t own_w, w_off, own_r, r_off;
    uint64_t seen_w, seen_r; /* last validated value of the peer's counter (exclusive handles) */
    nnb_a64 private_r;
    uint64_t tx_write, tx_read; /* elements begun and not yet committed */
    nnb_mapping *maps;          /* one per fd */
    uint32_t n_maps;
};

/* Returns 1 if `used` bytes can be in the ring. Otherwise a counter is forged, and the queue is corrupt for good. */
static inline int nnb_mq_may_hold(struct nnb_mq *q, uint64_t used)
{
    if (used > q->size || used % q->quantum)
        q->corrupt = 1;
    return !q->corrupt;
}

/* Returns the bytes that an exclusive synchronized handle can read, or -EBADMSG. Hot: called in the polling loop. */
static inline int64_t nnb_mq_poll(struct nnb_mq *q)
{
    uint64_t w = nnb_load_acquire(q->w); /* SYNC POINT: commit_write <-> available_to_read */
    uint64_t used = w - q->own_r;
    if (__builtin_expect(used == 0, 1))
        return q->corrupt ? -EBADMSG : 0;
    if (!nnb_mq_may_hold(q, used))
        return -EBADMSG;
    q->seen_w = w;
    return (int64_t)used;
}

/* Returns 1 if R is as this handle left it. Otherwise the peer or another handle has moved R, and the ring's content
 * is lost. */
static inline int nnb_mq_owns_r(struct nnb_mq *q)
{
    if (__builtin_expect(nnb_load_relaxed(q->r) != q->own_r, 0))
        q->corrupt = 1;
    return !q->corrupt;
}

static inline void nnb_mq_has_written(struct nnb_mq *q, uint64_t bytes)
{
    q->own_w += bytes;
    q->w_off += bytes;
    if (q->w_off >= q->size)
        q->w_off -= q->size;
}

/* Publishes bytes that are in the ring. -EBADMSG: W is not as this handle left it. One step compares and
 * moves W: the polling reader has the cache line, and a load before would fetch it twice (a sixth of a round trip). */
static inline int nnb_mq_publish(struct nnb_mq *q, uint64_t bytes)
{
    /* SYNC POINT: commit_write <-> available_to_read */
    if (__builtin_expect(q->corrupt || !nnb_cas_release(q->w, q->own_w, q->own_w + bytes), 0)) {
        q->corrupt = 1;
        return -EBADMSG;
    }
    nnb_mq_has_written(q, bytes);
    return 0;
}

/* Copies bytes (a multiple of the quantum, at most the ring) into the ring of an exclusive synchronized handle, to be
 * published. -EAGAIN: not enough room; -EBADMSG. The peer's counter is looked at only when the ring seems full. */
static inline int nnb_mq_fill(struct nnb_mq *q, const uint8_t *from, uint64_t bytes)
{
    if (__builtin_expect(q->own_w - q->seen_r + bytes > q->size, 0)) {
        uint64_t r = nnb_load_acquire(q->r); /* SYNC POINT: commit_read <-> available_to_write */
        uint64_t used = q->own_w - r;
        if (!nnb_mq_may_hold(q, used))
            return -EBADMSG;
        q->seen_r = r;
        if (used + bytes > q->size)
            return -EAGAIN;
    }
    if (q->corrupt)
        return -EBADMSG;
    uint64_t to_end = q->size - q->w_off;
    if (__builtin_expect(bytes <= to_end, 1)) {
        memcpy(q->ring + q->w_off, from, bytes);
    } else {
        memcpy(q->ring + q->w_off, from, to_end);
        memcpy(q->ring, from + to_end, bytes - to_end);
    }
    return 0;
}

/* Like nnb_mq_fill, and publishes. Only this handle moves a channel's W, so a forged W is overwritten. A fence follows
 * (SYNC POINT: publish <-> sleep), and before a fence a store costs less than a compare-and-swap. */
static inline int nnb_mq_put(struct nnb_mq *q, const uint8_t *from, uint64_t bytes)
{
    int rc = nnb_mq_fill(q, from, bytes);
    if (rc < 0)
        return rc;
    nnb_mq_has_written(q, bytes);
    nnb_store_release(q->w, q->own_w); /* SYNC POINT: commit_write <-> available_to_read */
    return 0;
}

/* Copies out `bytes` that begin `skip` bytes after R. The ring must have them. */
static inline void nnb_mq_peek(const struct nnb_mq *q, uint64_t skip, uint8_t *to, uint64_t bytes)
{
    uint64_t off = q->r_off + skip;
    if (off >= q->size)
        off -= q->size;
    uint64_t to_end = q->size - off;
    if (__builtin_expect(bytes <= to_end, 1)) {
        memcpy(to, q->ring + off, bytes);
    } else {
        memcpy(to, q->ring + off, to_end);
        memcpy(to + to_end, q->ring, bytes - to_end);
    }
}

/* Gives `bytes` at R back to the writer. 0 or -EBADMSG. */
static inline int nnb_mq_consume(struct nnb_mq *q, uint64_t bytes)
{
    if (!nnb_mq_owns_r(q))
        return -EBADMSG;
    q->own_r += bytes;
    q->r_off += bytes;
    if (q->r_off >= q->size)
        q->r_off -= q->size;
    nnb_store_release(q->r, q->own_r); /* SYNC POINT: commit_read <-> available_to_write */
    return 0;
}

/* burst_wire.c: tells request packets apart quickly. */
uint32_t nnb_wire_hash(const uint8_t *packet, uint32_t n);
/* Writes new sizes into a request packet: for each argument, its length and its dimensions. -EINVAL: `n` does not
 * fit the packet. */
int nnb_wire_resize_request(uint8_t *packet, const uint32_t *sizes, uint32_t n);

#endif
