/* Event flag: a futex word whose bits are sticky notifications.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * A set bit means "do not sleep" until a waiter consumes it. While a receiver polls, neither side makes a system
 * call.
 */
#define _GNU_SOURCE
#include <limits.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "nnb_internal.h"

uint64_t nnb_now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* Not FUTEX_PRIVATE: several processes use the word. */
static long futex(uint32_t *word, int op, uint32_t value, const struct timespec *timeout, uint32_t bitset)
{
    return syscall(SYS_futex, word, op, value, timeout, NULL, bitset);
}

/* Takes the pending bits of `mask`. The caller's next look must come after the bits are cleared. Otherwise the sender
 * may find the bit set, and the sleeper no packet. The fence is needed because a later load may pass a
 * read-modify-write, even a seq_cst one (ARMv8.3). */
static uint32_t consume(uint32_t *word, uint32_t mask)
{
    uint32_t old = nnb_take32((nnb_a32 *)word, ~mask); /* SYNC POINTS: wake <-> consume, publish <-> sleep */
    nnb_fence_seq_cst();                               /* SYNC POINT: publish <-> sleep */
    return old;
}

/* Relaxed: a mark wakes no thread and orders nothing. */
void nnb_event_mark(uint32_t *word, uint32_t mark, int on)
{
    uint32_t old;
    do {
        old = nnb_load32_relaxed((nnb_a32 *)word);
        if (((old & mark) != 0) == on)
            return;
    } while (!nnb_cas32_relaxed((nnb_a32 *)word, old, on ? old | mark : old & ~mark));
}

void nnb_event_expect(uint32_t *word, uint32_t mask, uint32_t mark)
{
    nnb_event_mark(word, mark, 1);
    consume(word, mask);
}

int nnb_event_wake_unless(uint32_t *word, uint32_t mask, uint32_t mark)
{
    uint32_t old = nnb_or32_release((nnb_a32 *)word, mask); /* SYNC POINT: wake <-> consume */
    if ((old & mask) == mask)
        return 0; /* all bits were pending, so no waiter for them sleeps */
    if (old & mark)
        return NNB_MARKED;
    return futex(word, FUTEX_WAKE_BITSET, INT_MAX, NULL, mask) < 0 ? -errno : 1;
}

int nnb_event_wake(uint32_t *word, uint32_t mask)
{
    return !word ? -EINVAL : mask ? nnb_event_wake_unless(word, mask, 0) : 0;
}

int nnb_event_wait(uint32_t *word, uint32_t mask, uint32_t *state, uint64_t deadline_ns)
{
    if (!word || !state || !mask)
        return -EINVAL;
    uint32_t old = consume(word, mask);
    if ((*state = old & mask))
        return 0;

    /* Sleeps are short: a signal or a closed handle sets no bit, and a hostile peer may clear a bit. */
    uint64_t slice = nnb_now_ns() + NNB_SLICE_NS, until = deadline_ns && deadline_ns < slice ? deadline_ns : slice;
    struct timespec t = {.tv_sec = (time_t)(until / 1000000000u), .tv_nsec = (long)(until % 1000000000u)};
    /* The kernel compares the whole word, so a change of any bit ends the wait. */
    int rc = futex(word, FUTEX_WAIT_BITSET, old, &t, mask) < 0 ? -errno : 0;
    if (rc == -ETIMEDOUT)
        return until == deadline_ns ? -ETIMEDOUT : -ERESTART;
    if (rc < 0 && rc != -EINTR)
        return rc;
    old = consume(word, mask); /* also after a signal: a wake that coincided with it must not be lost */
    return (*state = old & mask) ? 0 : -EINTR;
}

int nnb_event_wait_retry(uint32_t *word, uint32_t mask, uint32_t *state, uint64_t deadline_ns)
{
    for (;;) {
        int rc = nnb_event_wait(word, mask, state, deadline_ns);
        if (rc == -EINTR)
            return -ERESTART; /* perhaps a signal, whose handler the caller must run */
        if (rc != -EAGAIN)
            return rc;
        if (deadline_ns && nnb_now_ns() >= deadline_ns) {
            /* Other bits of the word keep changing. Take the bits once more before the deadline counts. */
            uint32_t old = consume(word, mask);
            return (*state = old & mask) ? 0 : -ETIMEDOUT;
        }
    }
}
