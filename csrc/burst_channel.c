/* One end of one burst channel: send, receive with a polling window, then futex.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * While both ends poll, NOT_EMPTY stays set: a send is ring bytes, one store of W, a fence, and a load that hits the
 * cache. A receiver that goes to sleep consumes the bit first; the next send then sets it and wakes.
 */
#define _GNU_SOURCE
#include <sys/mman.h>
#include <unistd.h>

#include "nnb_channel.h"

#define CLOCK_EVERY 32      /* polls between two looks at the clock */
#define MOST_VAIN 8         /* windows in vain are counted up to this number */
#define FRUITLESS_ROUNDS 64 /* a peer that keeps setting bits must not hold this thread here */

int nnb_channel_init(nnb_channel *ch, nnb_mq *mq, int size_at, uint64_t window_ns, uint64_t *counters)
{
    memset(ch, 0, sizeof(*ch));
    ch->mq = mq;
    ch->size_at = size_at;
    ch->bell = -1;
    ch->window_ns = window_ns;
    ch->windows = 1;
    ch->left = window_ns != 0;
    ch->counters = counters;
    ch->packets = size_at == 4 ? NNB_REQUESTS : NNB_RESULTS;
    /* A forked child must neither keep an endpoint's queue alive nor use it. */
    for (uint32_t i = 0; mq && i < mq->n_maps; i++)
        madvise(mq->maps[i].base, mq->maps[i].length, MADV_DONTFORK);
    if (!mq || mq->flavour != NNB_SYNCHRONIZED || mq->quantum != NNB_DATUM_SIZE || !mq->event ||
        !(mq->options & NNB_MQ_EXCLUSIVE) || mq->capacity < NNB_MIN_CHANNEL || mq->capacity > NNB_MAX_CHANNEL)
        return -EINVAL;
    return 0;
}

void nnb_channel_fini(nnb_channel *ch)
{
    nnb_mq_close(ch->mq);
    ch->mq = NULL;
    if (ch->bell >= 0)
        close(ch->bell);
    ch->bell = -1;
}

/* ---- sending -------------------------------------------------------------------------------------------------- */

/* Wakes a receiver that sleeps or is about to sleep, in the kernel or (AWAITED) in an event loop with the bell. */
static void rouse(nnb_channel *ch)
{
    int rc = nnb_event_wake_unless(ch->mq->event, NNB_EVENT_NOT_EMPTY, ch->bell < 0 ? 0 : NNB_EVENT_AWAITED);
    if (rc <= 0)
        return;
    if (rc == NNB_MARKED)
        nnb_bell_ring(ch->bell);
    nnb_count(ch->counters, NNB_WAKES, 1);
}

int nnb_channel_send(nnb_channel *ch, const uint8_t *packet, uint32_t n)
{
    nnb_mq *q = ch->mq;
    uint64_t bytes = (uint64_t)n * NNB_DATUM_SIZE;
    if (bytes > q->size)
        return -EMSGSIZE;
    int rc = nnb_mq_put(q, packet, bytes);
    if (rc < 0)
        return rc == -EAGAIN ? -ENOBUFS : rc;
    nnb_count(ch->counters, ch->packets, 1);
    nnb_fence_seq_cst(); /* SYNC POINT: publish <-> sleep */
    ch->peer_sleeps = !(nnb_load32_relaxed((nnb_a32 *)q->event) & NNB_EVENT_NOT_EMPTY);
    if (ch->peer_sleeps)
        rouse(ch);
    return 0;
}

/* ---- receiving ------------------------------------------------------------------------------------------------ */

void nnb_channel_notify_not_full(nnb_channel *ch)
{
    if (!(nnb_load32_relaxed((nnb_a32 *)ch->mq->event) & NNB_EVENT_NOT_FULL) &&
        nnb_event_wake(ch->mq->event, NNB_EVENT_NOT_FULL) == 1)
        nnb_count(ch->counters, NNB_WAKES, 1);
}

/* Returns the length that a packetInformation announces. 0: another datum, or an impossible length. */
static uint32_t announced(const nnb_channel *ch, const uint8_t *datum, uint64_t left)
{
    uint32_t size;
    memcpy(&size, datum + ch->size_at, 4);
    return datum[0] == 0 && size >= 2 && size <= left ? size : 0;
}

/* Returns 1 if whole packets follow the first packet. Packets are published whole, so otherwise the first packet has
 * announced a wrong size. Each packet is passed here once, and checked again in its private copy when its turn
 * comes. */
static int rest_is_packets(nnb_channel *ch, uint64_t n, uint64_t datums)
{
    uint64_t from = ch->verified > n ? ch->verified : n;
    while (from < datums) {
        uint8_t header[NNB_DATUM_SIZE];
        nnb_mq_peek(ch->mq, from * NNB_DATUM_SIZE, header, sizeof header);
        uint32_t size = announced(ch, header, datums - from);
        if (!size)
            return 0;
        from += size;
    }
    ch->verified = from;
    return 1;
}

/* Copies the packet at the head of the ring, which has `bytes`. Each byte is read from shared memory once. */
static int take(nnb_channel *ch, uint8_t *packet, uint64_t bytes)
{
    nnb_mq *q = ch->mq;
    uint64_t datums = bytes / NNB_DATUM_SIZE;
    ch->poll_until = 0;
    if (!ch->waiting)
        ch->vain = 0;
    else if (ch->left && ch->slept_ns && nnb_now_ns() - ch->slept_ns < ch->window_ns * ch->windows)
        ch->left--;
    ch->waiting = 0;
    ch->slept_ns = 0;
    nnb_mq_peek(q, 0, packet, NNB_DATUM_SIZE);
    uint32_t n = announced(ch, packet, datums);
    if (__builtin_expect(!n || (n < datums && !rest_is_packets(ch, n, datums)), 0)) {
        nnb_count(ch->counters, NNB_MALFORMED, 1);
        ch->verified = 0;
        return nnb_mq_consume(q, bytes) < 0 ? -EBADMSG : -EPROTO;
    }
    nnb_mq_peek(q, NNB_DATUM_SIZE, packet + NNB_DATUM_SIZE, (uint64_t)(n - 1) * NNB_DATUM_SIZE);
    if (nnb_mq_consume(q, (uint64_t)n * NNB_DATUM_SIZE) < 0)
        return -EBADMSG;
    ch->verified = ch->verified > n ? ch->verified - n : 0;
    nnb_count(ch->counters, ch->packets, 1);
    return (int)n;
}

int nnb_channel_try(nnb_channel *ch, uint8_t *packet, uint32_t spins)
{
    do {
        int64_t bytes = nnb_mq_poll(ch->mq);
        if (bytes)
            return bytes < 0 ? (int)bytes : take(ch, packet, (uint64_t)bytes);
        if (nnb_load32_acquire(&ch->hung_up)) /* SYNC POINT: hang_up <-> waiter */
            return -EPIPE;
        nnb_pause();
    } while (spins-- > 1);
    return -EAGAIN;
}

/* Polls until the window, the slice or the deadline ends. -EAGAIN: the window is over. */
static int poll_window(nnb_channel *ch, uint8_t *packet, uint64_t deadline_ns, uint64_t slice)
{
    uint64_t now = nnb_now_ns();
    if (!slice)
        slice = now + NNB_SLICE_NS;
    if (!ch->poll_until)
        ch->poll_until = now + ch->window_ns * ch->windows;
    for (;;) {
        int rc = nnb_channel_try(ch, packet, CLOCK_EVERY);
        if (rc != -EAGAIN)
            return rc;
        now = nnb_now_ns();
        if (deadline_ns && now >= deadline_ns)
            return -ETIMEDOUT;
        if (now >= ch->poll_until) {
            ch->poll_ended = now;
            return -EAGAIN;
        }
        if (now >= slice)
            return -ERESTART;
    }
}

int nnb_channel_look(nnb_channel *ch, uint8_t *packet, uint64_t deadline_ns, uint64_t until_ns)
{
    if (ch->waiting)
        return -EAGAIN;
    if (nnb_channel_polls(ch)) {
        int rc = poll_window(ch, packet, deadline_ns, until_ns);
        if (rc != -EAGAIN)
            return rc;
        ch->vain += ch->vain < MOST_VAIN;
        ch->left = 1u << ch->vain;
    } else if (ch->left) {
        ch->slept_ns = nnb_now_ns();
    }
    if (!ch->poll_ended)
        ch->poll_ended = 1;
    ch->waiting = 1; /* one wait, however many slices it takes */
    return -EAGAIN;
}

int nnb_channel_wait(nnb_channel *ch, uint8_t *packet, uint64_t deadline_ns)
{
    int rc = nnb_channel_look(ch, packet, deadline_ns, 0);
    if (rc != -EAGAIN)
        return rc;
    for (int round = 0; round < FRUITLESS_ROUNDS; round++) {
        if ((rc = nnb_channel_try(ch, packet, 1)) != -EAGAIN)
            return rc;
        uint32_t state;
        nnb_count(ch->counters, NNB_SLEEPS, 1);
        rc = nnb_event_wait(ch->mq->event, NNB_EVENT_NOT_EMPTY | NNB_EVENT_HANG_UP, &state, deadline_ns);
        if (rc < 0 && rc != -EAGAIN) {
            int got = nnb_channel_try(ch, packet, 1);
            if (got != -EAGAIN)
                return got;
            return rc == -EINTR ? -ERESTART : rc;
        }
    }
    return -ERESTART;
}

int nnb_channel_arm(nnb_channel *ch)
{
    ch->armed = 1;
    nnb_event_expect(ch->mq->event, NNB_EVENT_NOT_EMPTY, NNB_EVENT_AWAITED);
    nnb_count(ch->counters, NNB_SLEEPS, 1);
    return nnb_mq_poll(ch->mq) != 0 || nnb_load32_relaxed(&ch->hung_up);
}

int nnb_channel_disarm(nnb_channel *ch)
{
    if (!ch->armed)
        return 0;
    ch->armed = 0;
    nnb_event_mark(ch->mq->event, NNB_EVENT_AWAITED, 0);
    return 1;
}

int nnb_channel_drain(nnb_channel *ch)
{
    int64_t bytes = nnb_mq_poll(ch->mq);
    if (bytes > 0 && nnb_mq_consume(ch->mq, (uint64_t)bytes) < 0)
        bytes = -EBADMSG;
    ch->verified = 0;
    return (int)(bytes < 0 ? bytes : bytes / NNB_DATUM_SIZE);
}

void nnb_channel_hang_up(nnb_channel *ch)
{
    nnb_store32_release(&ch->hung_up, 1); /* SYNC POINT: hang_up <-> waiter */
    if (ch->mq)
        nnb_event_wake(ch->mq->event, NNB_EVENT_HANG_UP);
}
