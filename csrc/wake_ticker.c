/* Brings sleeping threads back to their callers ten times a second, so that they look again.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * A wait without a deadline is a futex wait without a timeout: a timer would be set and cancelled for each packet,
 * which a sleeping round trip on one core would feel. But three things can happen between a thread's last look and its sleep that
 * set no bit, or whose bit a hostile peer may take back: a signal, whose handler an interpreter runs only once we
 * return to it; a handle that another thread closes; a hang-up. One thread per process wakes all sleepers without
 * setting a bit; each finds nothing and returns. It rests while no thread sleeps.
 */
#define _GNU_SOURCE
#include <limits.h>
#include <linux/futex.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "nnb_internal.h"

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t arrival = PTHREAD_COND_INITIALIZER;
static nnb_sleeper *sleepers;
static uint64_t slept; /* how often a thread has gone to sleep */
static int running, resting;

static void *tick_all(void *unused)
{
    (void)unused;
    uint64_t seen = 0;
    pthread_mutex_lock(&lock);
    for (;;) {
        resting = 1;
        while (!sleepers && slept == seen) /* a thread that sleeps again and again need not wake us each time */
            pthread_cond_wait(&arrival, &lock);
        resting = 0;
        seen = slept;
        pthread_mutex_unlock(&lock);
        nanosleep(&(struct timespec){.tv_nsec = NNB_SLICE_NS}, NULL);
        pthread_mutex_lock(&lock);
        for (nnb_sleeper *s = sleepers; s; s = s->next) {
            s->ticked = 1;
            syscall(SYS_futex, s->word, FUTEX_WAKE_BITSET, INT_MAX, NULL, NULL, FUTEX_BITSET_MATCH_ANY);
        }
    }
    return NULL;
}

/* The child has neither the thread nor the sleepers, and the lock may be taken by a thread that it does not have. */
static void forget_all(void)
{
    pthread_mutex_init(&lock, NULL);
    pthread_cond_init(&arrival, NULL);
    sleepers = NULL;
    running = resting = 0;
}

int nnb_ticker_enter(nnb_sleeper *s, uint32_t *word)
{
    static int knows_forks;
    pthread_mutex_lock(&lock);
    knows_forks = knows_forks || pthread_atfork(NULL, NULL, forget_all) == 0;
    running = running || nnb_start_thread(NULL, tick_all, NULL) == 0;
    int rc = running ? 0 : -EAGAIN;
    s->word = running ? word : NULL;
    s->ticked = 0;
    if (running) {
        s->link = &sleepers;
        s->next = sleepers;
        if (s->next)
            s->next->link = &s->next;
        sleepers = s;
        slept++;
        if (resting)
            pthread_cond_signal(&arrival);
    }
    pthread_mutex_unlock(&lock);
    return rc;
}

void nnb_ticker_leave(nnb_sleeper *s)
{
    if (!s->word)
        return;
    pthread_mutex_lock(&lock);
    *s->link = s->next;
    if (s->next)
        s->next->link = s->link;
    pthread_mutex_unlock(&lock);
}
