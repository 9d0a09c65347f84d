/* The sleep of a group's leader on all queues, and the threads that sleep on those beyond the kernel's limit.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * The kernel waits for 128 words at a time (futex_waitv). Queues beyond these that were not used for long are left to
 * sleeper threads, 127 to each, which hand a burst back with its first packet. Without futex_waitv each has one.
 */
#define _GNU_SOURCE
#include <limits.h>
#include <linux/futex.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "nnb_group.h"

#ifndef SYS_futex_waitv
#define SYS_futex_waitv 449
#endif

#define FUTILE_WAKES 1024u /* most wakes without a packet before a client is not served any more */
#define SLEEPING_BITS (NNB_EVENT_NOT_EMPTY | NNB_EVENT_HANG_UP)

struct nnb_sleeper_thread {
    nnb_group *group;
    pthread_t thread;
    pthread_mutex_t lock;
    uint32_t n;
    int closing;
    nnb_a32 bell;
    nnb_sleeper_thread *next;
    nnb_burst *bursts[NNB_WAITV_WORDS];
};

uint32_t nnb_sleep_words(uint32_t most)
{
    int has_waitv = syscall(SYS_futex_waitv, NULL, 0, 0, NULL, 0) < 0 && errno == EINVAL;
    return !has_waitv ? 0 : most < NNB_WAITV_WORDS ? most : NNB_WAITV_WORDS;
}

/* Returns 1 if it took `ns`; 0 ns: however long it takes. */
static int wait_for_words(struct futex_waitv *words, uint32_t n, uint64_t ns)
{
    uint64_t until = n == 1 ? ns : nnb_now_ns() + ns; /* futex_waitv is told a moment */
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
    return !nnb_and32_relaxed(bell, 0) && is_over; /* heard: it would end the next sleep, too */
}

static nnb_a32 *event_of(const nnb_burst *b) { return (nnb_a32 *)(void *)b->inbox->mq->event; }

static void clear_bits(nnb_burst *b)
{
    if (nnb_load32_relaxed(event_of(b)) & SLEEPING_BITS) /* clear already: nobody has sent since it was cleared */
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
    struct futex_waitv words[NNB_WAITV_WORDS + 1];
    for (;;) {
        int found = 0;
        pthread_mutex_lock(&x->lock);
        int closing = x->closing;
        nnb_take32(&x->bell, 0); /* SYNC POINT: wake <-> consume */
        for (uint32_t i = 0; i < x->n; i++)
            clear_bits(x->bursts[i]);
        nnb_fence_seq_cst(); /* SYNC POINT: publish <-> sleep */
        for (uint32_t i = 0; i < x->n;) {
            nnb_burst *b = x->bursts[i];
            if (is_quiet(b)) {
                words[i] = wait_word(event_of(b), b->expected);
                i++;
                continue;
            }
            x->bursts[i] = x->bursts[--x->n];
            nnb_store32_release(&b->away, 0); /* SYNC POINT: give_back <-> take_up */
            found = 1;
        }
        uint32_t n = x->n;
        words[n] = wait_word(&x->bell, 0);
        pthread_mutex_unlock(&x->lock);
        if (found) {
            nnb_store32_release(&x->group->changed, 1);
            nnb_ring(&x->group->bell);
        }
        if (closing)
            return NULL;
        /* no futex_waitv: the bell of a thread for one queue is that queue's word */
        wait_for_words(words, n && !x->group->words ? 1 : n + 1, 0);
    }
}

static nnb_sleeper_thread *new_sleeper_thread(nnb_group *g)
{
    nnb_sleeper_thread *x = calloc(1, sizeof(*x));
    if (!x)
        return NULL;
    x->group = g;
    pthread_mutex_init(&x->lock, NULL);
    if (nnb_start_thread(&x->thread, sleep_on_some, x) < 0) {
        pthread_mutex_destroy(&x->lock);
        free(x);
        return NULL;
    }
    pthread_mutex_lock(&g->lock);
    x->next = g->sleepers;
    g->sleepers = x;
    pthread_mutex_unlock(&g->lock);
    return x;
}

static nnb_sleeper_thread *first_sleeper_thread(nnb_group *g)
{
    pthread_mutex_lock(&g->lock);
    nnb_sleeper_thread *x = g->sleepers;
    pthread_mutex_unlock(&g->lock);
    return x; /* they live as long as the group */
}

static int leave_to(nnb_sleeper_thread *x, nnb_burst *b, uint32_t capacity)
{
    pthread_mutex_lock(&x->lock);
    int fits = x->n < capacity;
    if (fits) {
        x->bursts[x->n++] = b;
        nnb_store32_relaxed(&b->away, 1);
    }
    pthread_mutex_unlock(&x->lock);
    if (fits)
        nnb_ring(&x->bell);
    return fits;
}

static int by_use(const void *a, const void *b)
{
    uint64_t x = (*(nnb_burst *const *)a)->used_ns, y = (*(nnb_burst *const *)b)->used_ns;
    return x < y ? 1 : x > y ? -1 : 0; /* the latest first */
}

/* Leaves bursts beyond the limit to sleeper threads. */
static void leave_some(nnb_group *g)
{
    if (g->n_mine <= g->words)
        return;
    uint32_t capacity = g->words ? g->words : 1, keep = g->words / 2; /* so that not each packet moves one */
    qsort(g->mine, g->n_mine, sizeof(*g->mine), by_use);
    uint32_t n = g->n_mine;
    g->n_mine = 0;
    for (uint32_t i = 0; i < n; i++) {
        nnb_burst *b = g->mine[i];
        nnb_sleeper_thread *x = NULL;
        if (i >= keep && nnb_burst_is_free(b)) {
            x = first_sleeper_thread(g);
            while (x && !leave_to(x, b, capacity))
                x = x->next;
            if (!x && (x = new_sleeper_thread(g)) && !leave_to(x, b, capacity))
                x = NULL;
        }
        if (x) {
            b->is_hot = 0;
            nnb_schedule_leave(&g->schedule, &b->queue);
        } else {
            g->mine[g->n_mine++] = b;
        }
    }
    g->n_hot = 0;
    for (uint32_t i = 0; i < g->n_mine; i++)
        if (g->mine[i]->is_hot)
            g->hot[g->n_hot++] = g->mine[i];
}

void nnb_sleepers_wake(nnb_group *g)
{
    for (nnb_sleeper_thread *x = first_sleeper_thread(g); x; x = x->next) {
        nnb_ring(&x->bell);
        pthread_mutex_lock(&x->lock);
        for (uint32_t i = 0; i < x->n && !g->words; i++) /* sleeps on that word alone */
            syscall(SYS_futex, x->bursts[i]->inbox->mq->event, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
        pthread_mutex_unlock(&x->lock);
    }
}

void nnb_sleepers_end(nnb_group *g)
{
    while (g->sleepers) {
        nnb_sleeper_thread *x = g->sleepers;
        g->sleepers = x->next;
        pthread_mutex_lock(&x->lock);
        x->closing = 1;
        pthread_mutex_unlock(&x->lock);
        nnb_ring(&x->bell);
        pthread_join(x->thread, NULL);
        pthread_mutex_destroy(&x->lock);
        free(x);
    }
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
        if (n == g->words || !is_quiet(b)) /* no thread to sleep on it: look again and again */
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
        if (++b->futile >= FUTILE_WAKES) { /* it writes into the word, and sends nothing */
            b->inbox->mq->corrupt = 1;
            nnb_group_enqueue(g, b);
        }
    }
}
