/* Statistics of a process: rows of counters and histograms in memory that others map read-only. Also the stamps that
 * tell each end of a burst when the other end had a packet.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * A row has one writer at a time. Each number is written with one relaxed store and read with one relaxed load. So a
 * reader costs the writer only cache misses, and a writer that dies leaves no number half written. The numbers that a
 * reader gets may belong to different moments. Histograms are log-linear: 16 buckets to an octave, from 1 ns to 68 s.
 *
 * Stamps (docs/WIRE.md has their format)
 *   Reading clocks at both ends costs as much as a round trip, so only some requests are timed: one in 256 on
 *   average, chosen at random so that a rhythm of the program does not matter; and each request while answers are
 *   slow. The client puts the time of sending beside W, on the cache line that the server loads anyway. Beside the W of
 *   the answer, the server puts when it took the request, how long the run took, and how many requests ran as one. A
 *   peer may write wrong times, which affect only the statistics of its own burst.
 *
 * Deadlines
 *   After the stamp are four words for requests in the ring, used in turn. The first word is zero as long as no
 *   request has a deadline. If the ring has more than four requests with deadlines, the oldest lose their words: then
 *   only the client gives them up. A tag repeats after 512 KiB, so the client wipes the words when it has sent 64 KiB
 *   since the last deadline. A request that the client gives up gets a deadline in the past.
 */
#define _GNU_SOURCE
#include "nnb_channel.h"

#define TIME_BITS 48
#define TIME_MASK ((1ull << TIME_BITS) - 1)
#define LASTED_BITS 42   /* more than an hour */
#define MOST_TOGETHER 63 /* stands for 63 or more */
#define DEADLINES 4u
#define WIPE_AFTER (1u << 16)           /* bytes; a word is at most five times as old, and its tag has not repeated */
#define LONGEST (3600ull * 1000000000u) /* a longer time is invalid */

/* ---- histograms ----------------------------------------------------------------------------------------------- */

uint32_t nnb_bucket_of(uint64_t ns)
{
    if (ns < 16)
        return (uint32_t)ns;
    uint32_t octave = 63u - (uint32_t)__builtin_clzll(ns);
    uint32_t bucket = (octave - 3) * 16 + (uint32_t)((ns >> (octave - 4)) & 15);
    return bucket < NNB_BUCKETS ? bucket : NNB_BUCKETS - 1;
}

uint64_t nnb_bucket_start(uint32_t bucket) { return bucket < 16 ? bucket : (16ull + bucket % 16) << (bucket / 16 - 1); }

static void add(uint64_t *word, uint64_t n) { nnb_count(word, 0, n); }

void nnb_histogram_add(nnb_histogram *h, uint64_t ns, uint64_t weight)
{
    add(&h->count, weight);
    add(&h->sum, ns * weight);
    if (ns > nnb_load_relaxed((nnb_a64 *)&h->max))
        nnb_store_relaxed((nnb_a64 *)&h->max, ns);
    add(&h->buckets[nnb_bucket_of(ns)], weight);
}

/* ---- rows ----------------------------------------------------------------------------------------------------- */

static void fold(nnb_row *into, const nnb_row *other)
{
    for (uint32_t i = 0; i < NNB_COUNTERS; i++)
        add(&into->counters[i], other->counters[i]);
    for (uint32_t i = 0; i < NNB_HISTOGRAMS; i++) {
        nnb_histogram *a = &into->histograms[i];
        const nnb_histogram *b = &other->histograms[i];
        if (!b->count)
            continue;
        add(&a->count, b->count);
        add(&a->sum, b->sum);
        if (b->max > a->max)
            nnb_store_relaxed((nnb_a64 *)&a->max, b->max);
        for (uint32_t k = 0; k < NNB_BUCKETS; k++)
            if (b->buckets[k])
                add(&a->buckets[k], b->buckets[k]);
    }
}

void nnb_row_count(nnb_row *row, uint32_t which, uint64_t n) { nnb_count(row->counters, which, n); }

void nnb_row_open(nnb_row *row, const nnb_row *head, uint64_t number)
{
    size_t first = offsetof(nnb_row, parent);
    nnb_copy_racy((uint8_t *)row + first, (const uint8_t *)head + first, offsetof(nnb_row, counters) - first, 0);
    nnb_store_release((nnb_a64 *)&row->number, number); /* SYNC POINT: row_open <-> row_look */
}

static void wipe(void *from, size_t n)
{
    for (size_t i = 0; i < n / sizeof(uint64_t); i++)
        nnb_store_relaxed((nnb_a64 *)from + i, 0);
}

void nnb_row_close(nnb_row *row, nnb_row *above)
{
    nnb_store_relaxed((nnb_a64 *)&row->number, 0);
    nnb_fence_release(); /* SYNC POINT: row_close <-> row_look */
    if (above)
        fold(above, row);
    wipe(row, offsetof(nnb_row, histograms));
    for (uint32_t i = 0; i < NNB_HISTOGRAMS; i++)
        if (row->histograms[i].count)
            wipe(&row->histograms[i], sizeof(nnb_histogram));
}

int nnb_row_look(nnb_row *out, const nnb_row *row)
{
    const nnb_a64 *number = (const nnb_a64 *)&row->number;
    size_t first = offsetof(nnb_row, parent);
    if (!(out->number = nnb_load_acquire(number))) /* SYNC POINT: row_open <-> row_look */
        return 0;
    nnb_copy_racy((uint8_t *)out + first, (const uint8_t *)row + first, offsetof(nnb_row, histograms) - first, 1);
    for (uint32_t i = 0; i < NNB_HISTOGRAMS; i++)
        if (nnb_load_relaxed((const nnb_a64 *)&row->histograms[i].count)) /* empty ones may have no pages */
            nnb_copy_racy((uint8_t *)&out->histograms[i], (const uint8_t *)&row->histograms[i], sizeof(nnb_histogram),
                          1);
    nnb_fence_acquire(); /* SYNC POINT: row_close <-> row_look */
    return nnb_load_relaxed(number) == out->number;
}

/* ---- stamps --------------------------------------------------------------------------------------------------- */

static uint64_t tagged(uint64_t position, uint64_t value) { return (position >> 3) << TIME_BITS | (value & TIME_MASK); }

void nnb_channel_stamp(nnb_channel *ch, uint32_t n, uint64_t time_ns, uint64_t lasted_ns, uint32_t together)
{
    nnb_mq *q = ch->mq;
    if (!q->stamp)
        return;
    uint64_t position = q->own_w + (uint64_t)n * NNB_DATUM_SIZE;
    nnb_store_relaxed(&q->stamp[0], tagged(position, time_ns));
    uint64_t most = together < MOST_TOGETHER ? together : MOST_TOGETHER;
    nnb_store_relaxed(&q->stamp[1], tagged(position, most << LASTED_BITS | lasted_ns));
}

void nnb_channel_set_deadline(nnb_channel *ch, uint32_t n, uint64_t deadline_ns)
{
    nnb_mq *q = ch->mq;
    uint64_t position = q->own_w + (uint64_t)n * NNB_DATUM_SIZE;
    if (!q->stamp)
        return;
    if (ch->deadlines && position - ch->timed_at >= WIPE_AFTER) {
        for (uint32_t i = 0; i < DEADLINES; i++)
            nnb_store_relaxed(&q->stamp[2 + i], 0);
        ch->deadlines = 0;
    }
    if (!deadline_ns)
        return;
    /* SYNC POINT commit_write <-> available_to_read: published with the packet, by the store of W */
    nnb_store_relaxed(&q->stamp[2 + ch->deadlines++ % DEADLINES], tagged(position, deadline_ns));
    ch->timed_at = position;
}

void nnb_channel_revoke(nnb_channel *ch, uint64_t position)
{
    nnb_mq *q = ch->mq;
    uint64_t revoked = tagged(position, nnb_now_ns());
    uint32_t i = 0, used = ch->deadlines < DEADLINES ? (uint32_t)ch->deadlines : DEADLINES;
    if (!q->stamp)
        return;
    while (i < used && nnb_load_relaxed(&q->stamp[2 + i]) >> TIME_BITS != revoked >> TIME_BITS)
        i++;
    if (i == used)
        i = (uint32_t)(ch->deadlines++ % DEADLINES);
    nnb_store_relaxed(&q->stamp[2 + i], revoked);
    if (position > ch->timed_at)
        ch->timed_at = position;
}

void nnb_channel_unset_deadline(nnb_channel *ch)
{
    nnb_mq *q = ch->mq;
    if (q->stamp) /* a position where no packet ends; 0 in the first word would hide the others */
        nnb_store_relaxed(&q->stamp[2 + (ch->deadlines - 1) % DEADLINES], tagged(ch->timed_at + 8, 1));
}

uint64_t nnb_channel_find_deadline(const nnb_channel *ch)
{
    const nnb_mq *q = ch->mq;
    for (uint32_t i = 0; i < DEADLINES; i++) {
        uint64_t word = nnb_load_relaxed(&q->stamp[2 + i]);
        if (!word || word >> TIME_BITS != ((q->own_r >> 3) & 0xffff))
            continue;
        uint64_t now = nnb_now_ns(), left = (word - now) & TIME_MASK;
        uint64_t deadline = left >> (TIME_BITS - 1) ? now - (TIME_MASK + 1 - left) : now + left;
        return deadline ? deadline : 1;
    }
    return 0;
}

int nnb_channel_stamp_of(const nnb_channel *ch, uint64_t now_ns, uint64_t *time_ns, uint64_t *lasted_ns,
                         uint32_t *together)
{
    const nnb_mq *q = ch->mq;
    uint64_t time = nnb_load_relaxed(&q->stamp[0]), lasted = nnb_load_relaxed(&q->stamp[1]);
    uint64_t ago = (now_ns - time) & TIME_MASK;
    if (!nnb_channel_is_stamped(ch) || lasted >> TIME_BITS != time >> TIME_BITS || ago > LONGEST || ago > now_ns)
        return 0;
    *time_ns = now_ns - ago;
    *lasted_ns = lasted & ((1ull << LASTED_BITS) - 1);
    *together = lasted >> LASTED_BITS & MOST_TOGETHER;
    return *lasted_ns <= ago;
}
