/* One end of one queue of a burst: sending, waiting, stamps, deadlines; private to burst_*.c, watch.c, group*.c.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef NNB_CHANNEL_H
#define NNB_CHANNEL_H

#include "nnb_internal.h"

#define NNB_EVENT_AWAITED 0x4u        /* the reader sleeps in an event loop, not here: ring its bell */
#define NNB_EVENT_HANG_UP 0x80000000u /* wakes this end's waiters; `hung_up` tells if it is genuine */

/* One end of one queue of a burst. A wait polls before it sleeps, as long as polling finds packets. After n windows
 * in a row without a packet, waits sleep at once, until 2^n waits were shorter than the window. So an end sleeps, as a
 * socket does, if its peer answers rarely, computes for long or needs the same processor. */
typedef struct nnb_channel {
    nnb_mq *mq;
    uint64_t window_ns;  /* polling window of the receiver */
    uint64_t windows;    /* windows to poll for the awaited packet */
    uint64_t poll_until; /* end of the present window; 0: no window began since the last packet */
    uint32_t vain;       /* windows in a row that ended without a packet */
    uint32_t left;       /* short waits that are needed before the next window */
    uint64_t slept_ns;   /* when a wait that has not polled began to sleep; 0: no such wait */
    int peer_sleeps;     /* the last packet found the receiver asleep: an answer needs a processor first */
    int waiting;         /* the window is over: polling will not find the next packet */
    int armed;           /* AWAITED is set */
    uint64_t verified;   /* datums after the head that form whole packets, as was checked */
    int size_at;         /* byte of packetSize in a packetInformation: 4 in requests, 8 in results */
    uint64_t deadlines;  /* number of deadlines set since the last wipe */
    uint64_t timed_at;   /* W after the packet with the last deadline */
    int bell;            /* sender: the receiver's bell, which this end owns; -1: none */
    nnb_a32 hung_up;
    uint64_t poll_ended; /* when the last wait gave up polling; 0: polling found the packet; 1: no polling */
    uint64_t *counters;  /* counters of this end: a row's, or private ones */
    uint32_t packets;    /* index of the counter of packets */
} nnb_channel;

/* Takes a queue over (also on failure), if it can carry a burst. size_at: 4 for requests, 8 for results. */
int nnb_channel_init(nnb_channel *ch, nnb_mq *mq, int size_at, uint64_t window_ns, uint64_t *counters);
void nnb_channel_fini(nnb_channel *ch);

/* Sends a packet of n datums. -EMSGSIZE / -ENOBUFS: larger than the ring / than the free room: nothing was sent;
 * -EBADMSG: corrupt. Contains the seq_cst fence of SYNC POINT publish <-> sleep. */
int nnb_channel_send(nnb_channel *ch, const uint8_t *packet, uint32_t n);

/* Wakes a writer that waits for room. The caller has passed a seq_cst fence since it read. */
void nnb_channel_notify_not_full(nnb_channel *ch);

/* Copy the next packet out (room for the whole ring) and return its datums. -EAGAIN: nothing there (try); -EPROTO:
 * the bytes were no packets and have been thrown away; -EBADMSG, -EPIPE; wait also -ETIMEDOUT, -ERESTART. */
int nnb_channel_try(nnb_channel *ch, uint8_t *packet, uint32_t spins);
int nnb_channel_wait(nnb_channel *ch, uint8_t *packet, uint64_t deadline_ns);

/* Does the polling of nnb_channel_wait alone. -EAGAIN: the window is over, or it is not worth it; -ERESTART: the wait
 * continues, but the moment has come (0: the end of a slice). */
int nnb_channel_look(nnb_channel *ch, uint8_t *packet, uint64_t deadline_ns, uint64_t until_ns);

/* Makes the sender ring the bell for the next packet. 1: a packet is there already. A channel stays armed, without
 * effect while polling finds packets. Disarm it before nnb_channel_wait: returns 1 if the channel was armed. */
int nnb_channel_arm(nnb_channel *ch);
int nnb_channel_disarm(nnb_channel *ch);

/* Throws away all bytes in the ring. Returns datums or -EBADMSG. */
int nnb_channel_drain(nnb_channel *ch);

void nnb_channel_hang_up(nnb_channel *ch);

/* watch.c: puts the times of the next packet, of n datums, and the number of joined requests beside W. */
void nnb_channel_stamp(nnb_channel *ch, uint32_t n, uint64_t time_ns, uint64_t lasted_ns, uint32_t together);

/* Returns 1 if the last packet taken has times. They are on the cache line of W, which is loaded already. */
static inline int nnb_channel_is_stamped(const nnb_channel *ch)
{
    const nnb_mq *q = ch->mq;
    if (!q->stamp)
        return 0;
    uint64_t time = nnb_load_relaxed(&q->stamp[0]);
    return time && time >> 48 == ((q->own_r >> 3) & 0xffff);
}
/* Returns 1 and the packet's times. 0: it has none, or impossible ones. */
int nnb_channel_stamp_of(const nnb_channel *ch, uint64_t now_ns, uint64_t *time_ns, uint64_t *lasted_ns,
                         uint32_t *together);

/* Sets the deadline of the next packet, of n datums; 0: none. After a first call each packet needs a call. */
void nnb_channel_set_deadline(nnb_channel *ch, uint32_t n, uint64_t deadline_ns);
void nnb_channel_unset_deadline(nnb_channel *ch); /* the packet could not be sent */
/* Marks the packet that ends where W was `position` as past its deadline. */
void nnb_channel_revoke(nnb_channel *ch, uint64_t position);
uint64_t nnb_channel_find_deadline(const nnb_channel *ch);
/* Returns the deadline of the last packet taken; 0: none. */
static inline uint64_t nnb_channel_deadline(const nnb_channel *ch)
{
    const nnb_mq *q = ch->mq;
    return q->stamp && nnb_load_relaxed(&q->stamp[2]) ? nnb_channel_find_deadline(ch) : 0;
}

/* Chooses the runs of a client that are timed. */
typedef struct nnb_sampling {
    uint32_t every;     /* time each n-th run; 0: one in 256 on average */
    uint32_t countdown; /* runs until the next timed one */
    uint32_t random;
    int was_slow; /* the last answer did not come at once: this run is timed, too */
} nnb_sampling;

enum { NNB_TIMED = 1, NNB_ITS_TURN = 2 };

/* Called once for each run. Returns 0: not timed; NNB_TIMED; or NNB_TIMED | NNB_ITS_TURN: timed as the n-th run. */
static inline int nnb_sample_due(nnb_sampling *s)
{
    if (s->countdown-- > 1)
        return s->was_slow ? NNB_TIMED : 0;
    s->random = s->random * 1664525u + 1013904223u;
    s->countdown = s->every ? s->every : 1 + (s->random >> 23); /* 1 to 512 */
    return NNB_TIMED | NNB_ITS_TURN;
}

/* Returns 1 if the next wait will poll. */
static inline int nnb_channel_polls(const nnb_channel *ch) { return ch->window_ns && !ch->left && !ch->peer_sleeps; }

#endif
