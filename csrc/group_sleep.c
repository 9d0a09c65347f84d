/* The sleep of a group's leader on all queues, and the threads that sleep on those beyond the kernel's limit.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * The kernel waits for 128 words at a time (futex_waitv). If there are more queues, sleeper threads get those that were
 * unused for longest, at most 127 each, and hand a burst back at its first packet. Without futex_waitv, each gets one.
 */
#define _GNU_SOURCE
#include <linux/futex.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "nnb_group.h"

#ifndef SYS_futex_waitv
#define SYS_futex_waitv 449
#endif

#define FUTILE_WAKES 1024u /* wakes without a packet after which a burst is ended */
#define SLEEPING_BITS (NNB_EVENT_NOT_EMPTY | NNB_EVENT_HANG_UP)

uint32_t nnb_sleep_words(uint32_t most)
{
    int has_waitv = syscall(SYS_futex_waitv, NULL, 0, 0, NULL, 0) < 0 && errno == EINVAL;
    return !has_waitv ? 0 : most < NNB_WAITV_WORDS ? most : NNB_WAITV_WORDS;
}

/* Returns 1 if the wait took `ns`. 0 ns: no limit. */
static int wait_for_words(struct futex_waitv *words, uint32_t n, uint64_t ns)
{
    uint64_t until = n == 1 ? ns : nnb_now_ns() + ns; /* futex_waitv takes an absolute time */
    struct timespec t = {.tv_sec = (time_t)(until / 1000000000), .tv_nsec = (long)(until % 1000000000)};
    long rc = n == 1 ? syscall(SYS_futex, words[0].uaddr, FUTEX_WAIT, words[0].val, ns ? &t : NULL, NULL, 0)
                     : syscall(SYS_futex_waitv, words, n, 0, ns ? &t : NULL, CLOCK_MONOTONIC);
    return rc < 0 && errno == ETIMEDOUT;
}

static struct futex_waitv wait_word(const void *word, uint32_t value)
{
    return (struct futex_waitv){.val = value, .uaddr = (uint64_t)(uintptr_t)word, .flags = FUTEX_32};
}

int nnb_sleep_on_bell(nnb_a32 *bell, uint64_t ns)
{
    struct futex_waitv word = wait_word(bell, 0);
    int is_over = !nnb_and32_relaxed(bell, 0) && wait_for_words(&word, 1, ns);
    return !nnb_and32_relaxed(bell, 0) && is_over; /* clear it, or it would end the next sleep, too */
}

static nnb_a32 *event_of(const nnb_burst *b) { return (nnb_a32 *)(void *)b->inbox->mq->event; }

static void clear_bits(nnb_burst *b)
{
    if (nnb_load32_relaxed(event_of(b)) & SLEEPING_BITS) /* else no packet was sent since they were cleared */
        nnb_take32(event_of(b), ~SLEEPING_BITS);         /* SYNC POINTS: wake <-> consume, publish <-> sleep */
}

/* Returns 1 if the leader may sleep on the burst, after the fence. */
static int is_quiet(nnb_burst *b)
{
    b->expected = nnb_load32_relaxed(event_of(b));
    return !(b->expected & SLEEPING_BITS) && !nnb_burst_has_news(b);
}

/* ---- sleeper threads ------------------------------------------------------------------------------------------- */

static void *sleep_on_some(void *argument)
{
    nnb_sleeper_thread *x = argument;
    nnb_group *g = x->group;
    struct futex_waitv words[NNB_WAITV_WORDS + 1];
    for (;;) {
        pthread_mutex_lock(&g->lock);
        uint32_t n = 0, had = x->n;
        nnb_take32(&x->bell, 0); /* SYNC POINT: wake <-> consume */
        for (uint32_t i = 0; i < had; i++)
            clear_bits(x->bursts[i]);
        nnb_fence_seq_cst(); /* SYNC POINT: publish <-> sleep */
        for (uint32_t i = 0; i < had; i++) {
            nnb_burst *b = x->bursts[i];
            if (!(b->is_away = is_quiet(b)))
                continue;
            words[n] = wait_word(event_of(b), b->expected);
            x->bursts[n++] = b;
        }
        x->n = n;
        if (n < had)
            nnb_store32_relaxed(&g->changed, 1);
        pthread_mutex_unlock(&g->lock);
        if (n < had)
            nnb_ring(&g->bell);
        if (nnb_load32_relaxed(&g->closing))
            return NULL;
        words[n] = wait_word(&x->bell, 0);
        int is_deaf = n && !g->words; /* without futex_waitv, it waits only for its queue */
        wait_for_words(words, is_deaf ? 1 : n + 1, is_deaf ? NNB_SLICE_NS : 0);
    }
}

/* Under lock: returns a sleeper thread with room for a burst. NULL: the system cannot start a thread. */
static nnb_sleeper_thread *find_sleeper_thread(nnb_group *g)
{
    nnb_sleeper_thread *x = g->sleepers;
    while (x && x->n >= (g->words ? g->words : 1))
        x = x->next;
    if (x || !(x = calloc(1, sizeof(*x))))
        return x;
    x->group = g;
    if (nnb_start_thread(&x->thread, sleep_on_some, x) < 0) {
        free(x);
        return NULL;
    }
    x->next = g->sleepers;
    return g->sleepers = x;
}

static int by_use(const void *a, const void *b)
{
    uint64_t x = (*(nnb_burst *const *)a)->used_ns, y = (*(nnb_burst *const *)b)->used_ns;
    return x < y ? 1 : x > y ? -1 : 0; /* the last used first */
}

/* Hands bursts beyond the limit to sleeper threads. */
static void leave_some(nnb_group *g)
{
    uint32_t n = g->n_mine, keep = g->words / 2; /* some room, so that not each packet moves a burst */
    if (n <= g->words)
        return;
    qsort(g->mine, n, sizeof(*g->mine), by_use);
    g->n_mine = g->n_hot = 0;
    pthread_mutex_lock(&g->lock);
    for (uint32_t i = 0; i < n; i++) {
        nnb_burst *b = g->mine[i];
        nnb_sleeper_thread *x = i >= keep && nnb_burst_is_free(b) ? find_sleeper_thread(g) : NULL;
        if (x) {
            x->bursts[x->n++] = b;
            nnb_ring(&x->bell);
            b->is_away = 1;
            b->is_hot = 0;
            nnb_schedule_leave(&g->schedule, &b->queue);
        } else {
            g->mine[g->n_mine++] = b;
            if (b->is_hot)
                g->hot[g->n_hot++] = b;
        }
    }
    pthread_mutex_unlock(&g->lock);
}

/* ---- the leader ------------------------------------------------------------------------------------------------ */

void nnb_sleep_on_all(nnb_group *g)
{
    struct futex_waitv words[NNB_WAITV_WORDS + 1];
    leave_some(g);
    uint32_t n = 0, quiet = 1;
    for (uint32_t i = 0; i < g->n_mine; i++)
        if (nnb_burst_is_free(g->mine[i]))
            clear_bits(g->mine[i]);
    nnb_load load;
    nnb_group_load(g, &load);
    int held = nnb_schedule_is_held(&g->schedule, &load);
    if (nnb_take32(&g->bell, 0)) /* SYNC POINT: wake <-> consume */
        quiet = 0;
    nnb_fence_seq_cst(); /* SYNC POINT: publish <-> sleep */
    for (uint32_t i = 0; quiet && i < g->n_mine; i++) {
        nnb_burst *b = g->mine[i];
        if (!nnb_burst_is_free(b))
            continue;
        if (n == g->words || !is_quiet(b)) /* no thread sleeps on it: do not sleep, but look again */
            quiet = 0;
        else
            words[n++] = wait_word(event_of(b), b->expected);
        nnb_count(b->inbox->counters, NNB_SLEEPS, 1);
    }
    words[n] = wait_word(&g->bell, 0);
    uint64_t most = nnb_schedule_wait_ns(&g->schedule, g->now_ns);
    if (held && (!most || most > NNB_TICK_NS))
        most = NNB_TICK_NS;
    if (quiet)
        wait_for_words(words, n + 1, most);
    g->now_ns = nnb_now_ns();
    if (held) {
        pthread_mutex_lock(&g->lock);
        nnb_group_count_stuck(g, g->now_ns);
        pthread_mutex_unlock(&g->lock);
    }
    for (uint32_t i = 0; quiet && i < g->n_mine; i++) {
        nnb_burst *b = g->mine[i];
        if (!nnb_burst_is_free(b) || nnb_load32_relaxed(event_of(b)) == b->expected || nnb_burst_has_news(b))
            continue;
        if (++b->futile >= FUTILE_WAKES) { /* the client changes the word, but sends no packet */
            b->inbox->mq->corrupt = 1;
            nnb_group_enqueue(g, b);
        }
    }
}
