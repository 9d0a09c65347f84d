/* What the kernel and the C library do for the core, as the model checker should see it.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * Each program includes this first and then the real files of csrc. The names that it replaces are those of system and
 * library calls; everything that has a memory order is the product's own. A sleeper on the event word of a queue is woken
 * by a call of the kernel for one of its bits, not by the bit. A wake-up that is lost is a thread that sleeps for ever,
 * which the checker reports: time passes only where a program says LET_TIME_PASS, and then for two waits of an execution.
 */
#ifndef MODEL_H
#define MODEL_H

#define _GNU_SOURCE
#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <genmc.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#ifndef F_SEAL_SHRINK
#define F_SEAL_SHRINK 2
#define F_ADD_SEALS 1033
#define F_GET_SEALS 1034
#endif

#ifndef ECANCELED
#define ECANCELED 125
#endif
#ifndef _SC_PAGESIZE
#define _SC_PAGESIZE 30
#endif

static __thread int model_errno;
#define errno model_errno

/* ---- memory ---------------------------------------------------------------------------------------------------- */

/* Memory is modelled in steps of four bytes, of which the first is accessed: enough to see a race and a stale value of
 * every word, and every number of a program is below 256. */
#ifndef STEP
#define STEP 4
#endif

static void model_copy(uint8_t *to, const uint8_t *from, size_t n)
{
    for (size_t i = 0; i < n; i += STEP)
        to[i] = from[i];
}
static void model_copy_i32(int32_t *to, const int32_t *from, size_t n)
{
    for (size_t i = 0; i < n / sizeof *to; i++)
        to[i] = from[i];
}
static void model_get32(uint32_t *to, const uint8_t *from, size_t n) { *to = from[0]; }
static void model_get64(uint64_t *to, const uint8_t *from, size_t n) { *to = from[0]; }
static void model_put32(uint8_t *to, const uint32_t *from, size_t n) { to[0] = (uint8_t)*from; }
static void model_put64(uint8_t *to, const uint64_t *from, size_t n) { to[0] = (uint8_t)*from; }
static void model_fill(uint8_t *to, int value, size_t n)
{
    for (size_t i = 0; i < n; i += STEP)
        to[i] = (uint8_t)value;
}
static int model_compare(const uint8_t *a, const uint8_t *b, size_t n)
{
    for (size_t i = 0; i < n; i += STEP)
        if (a[i] != b[i])
            return 1;
    return 0;
}
static int model_compare_i32(const int32_t *a, const int32_t *b, size_t n)
{
    for (size_t i = 0; i < n / sizeof *a; i++)
        if (a[i] != b[i])
            return 1;
    return 0;
}
/* clang-format off */
#define memcpy(to, from, n)                                  \
    _Generic((to),                                           \
        int32_t *: model_copy_i32,                           \
        uint32_t *: model_get32,                             \
        uint64_t *: model_get64,                             \
        uint8_t *: _Generic((from),                          \
            uint32_t *: model_put32,                         \
            uint64_t *: model_put64,                         \
            int32_t *: model_copy_i32,                       \
            const int32_t *: model_copy_i32,                 \
            const uint8_t *: model_copy,                     \
            uint8_t *: model_copy,                           \
            default: model_copy))((void *)(to), (const void *)(from), n)
#define memset(to, value, n) \
    _Generic((to), uint8_t *: model_fill((void *)(to), value, n), default: (void)0) /* structures are fresh: zero */
#define memcmp(a, b, n) \
    _Generic((a), const int32_t *: model_compare_i32, default: model_compare)((const void *)(a), (const void *)(b), n)
/* clang-format on */

/* Zeroed memory is static, so that nothing has to write the zeros. The checker looks after each byte of it: a program
 * says how much it needs. */
#ifndef PAGES
#define PAGES 1
#define PAGE 8
#endif
static _Alignas(16) uint8_t model_pages[PAGES][PAGE];
static int model_next_page;
static void *model_page(void) { return model_pages[model_next_page++]; }
#define calloc(n, size) model_page()
#define mmap(address, length, ...) model_page()
#define realloc(old, size) malloc(size)
#define munmap(address, length) 0
#define madvise(base, length, advice) 0
#define __builtin_ia32_pause() ((void)0)

/* Blocks until the condition holds; an error if it never does. */
#define AWAIT(condition)                \
    do {                                \
        __VERIFIER_loop_begin();        \
        __VERIFIER_spin_start();        \
        __VERIFIER_spin_end(condition); \
    } while (0)

/* ---- threads --------------------------------------------------------------------------------------------------- */

/* Every wait ends with a broadcast: none times out, none ends for no reason. */
typedef struct pthread_cond {
    _Atomic uint32_t broadcasts; /* under the mutex */
} pthread_cond_t;
typedef int pthread_condattr_t;
typedef int pthread_once_t;

static int model_cond_wait(pthread_cond_t *cond, pthread_mutex_t *mutex)
{
    uint32_t before = atomic_load_explicit(&cond->broadcasts, memory_order_relaxed);
    pthread_mutex_unlock(mutex);
    AWAIT(atomic_load_explicit(&cond->broadcasts, memory_order_relaxed) != before);
    pthread_mutex_lock(mutex);
    return 0;
}
#define pthread_cond_timedwait(cond, mutex, until) ((void)(until), model_cond_wait(cond, mutex))
#define pthread_cond_broadcast(cond) atomic_fetch_add_explicit(&(cond)->broadcasts, 1, memory_order_relaxed)
#define pthread_cond_init(cond, attributes) ((void)(attributes))
#define pthread_condattr_init(attributes) (*(attributes) = 0)
#define pthread_condattr_setclock(attributes, clock) ((void)0)
#define pthread_condattr_destroy(attributes) ((void)0)
#define pthread_atfork(prepare, parent, child) ((void)(prepare), (void)(parent), (void)(child), 0)
#define pthread_once(once, function) ((void)(function))

#include "nnb_channel.h"

/* ---- futex ------------------------------------------------------------------------------------------------------ */

/* Ends a wait early in some executions: one by a signal, one because its time is over. Each wait is tried. */
static nnb_a32 model_time;
static void *model_let_time_pass(void *unused)
{
    nnb_store32_relaxed(&model_time, EINTR);
    nnb_store32_relaxed(&model_time, ETIMEDOUT);
    return unused;
}
#define LET_TIME_PASS()                                          \
    do {                                                         \
        pthread_t time;                                          \
        pthread_create(&time, NULL, model_let_time_pass, NULL);  \
    } while (0)

static int model_ends_early(void)
{
    uint32_t why = nnb_load32_relaxed(&model_time) ? nnb_and32_relaxed(&model_time, 0) : 0;
    if (why)
        errno = (int)why;
    return why != 0;
}

/* How often the kernel was called to wake the sleepers of an event word, for each bit in a byte of its own. */
#define EVENTS 4
static const void *model_events[EVENTS]; /* those that a queue was attached to, before there are threads */
static int model_n_events;
static nnb_a32 model_wakes[EVENTS];
static uint32_t model_bytes(uint32_t mask)
{
    return (mask & NNB_EVENT_NOT_EMPTY ? 0xff : 0) | (mask & NNB_EVENT_NOT_FULL ? 0xff00 : 0) |
           (mask & NNB_EVENT_HANG_UP ? 0xff0000 : 0);
}
static nnb_a32 *model_wakes_of(const void *word)
{
    for (int i = 0; i < model_n_events; i++)
        if (model_events[i] == word)
            return &model_wakes[i];
    return NULL;
}

/* The kernel holds its queue while it compares or wakes: who comes second sees what the first one has done. */
static long model_futex_wake(const void *word, uint32_t mask)
{
    nnb_a32 *wakes = model_wakes_of(word);
    if (wakes)
        atomic_fetch_add_explicit(wakes, model_bytes(mask) & 0x010101, memory_order_acq_rel);
    return 0;
}

/* What a sleeper waits for: another value than `before` of these bits of the word that it returns. The bells of a group
 * are no event words: their bits wake. */
static nnb_a32 *model_sleep(nnb_a32 *word, uint32_t mask, uint32_t *bits, uint32_t *before)
{
    nnb_a32 *wakes = model_wakes_of(word);
    *bits = wakes ? model_bytes(mask) : mask;
    *before = wakes ? nnb_load32_acquire(wakes) & *bits : 0;
    return wakes ? wakes : word;
}
#define WOKEN(at, bits, before) ((nnb_load32_relaxed(at) & (bits)) != (before))

static long model_futex_wait(nnb_a32 *word, uint32_t value, uint32_t mask)
{
    uint32_t bits, before;
    nnb_a32 *at = model_sleep(word, mask, &bits, &before);
    if (nnb_load32_relaxed(word) != value) {
        errno = EAGAIN;
        return -1;
    }
    if (model_ends_early())
        return -1;
    AWAIT(WOKEN(at, bits, before));
    return 0;
}

#define model_SYS_futex(word, op, value, timeout, other, mask)                                  \
    ((op) == FUTEX_WAIT_BITSET   ? model_futex_wait((nnb_a32 *)(word), value, mask)               \
     : (op) == FUTEX_WAIT        ? model_futex_wait((nnb_a32 *)(word), value, ~(uint32_t)(value)) \
     : (op) == FUTEX_WAKE_BITSET ? model_futex_wake((const void *)(word), mask)                   \
                                 : model_futex_wake((const void *)(word), ~0u))
#define syscall(number, ...) model_##number(__VA_ARGS__)

/* Bells: what the kernel sends along with a byte is seen by who receives it. */
static nnb_a32 model_bells[2];
#define nnb_bell_ring(fd) nnb_or32_release(&model_bells[fd], 1)
#define nnb_bell_copy(copy, fd) (*(copy) = (fd), 0)
#define BELL_RINGS(fd) nnb_load32_acquire(&model_bells[fd])
#define SILENCE(fd) nnb_and32_acquire(&model_bells[fd], 0)

/* A thread that yields goes on when the holder of the client has: the macro reads the `c` of its caller. */
#define sched_yield() AWAIT(!(nnb_load_relaxed(&c->busy) & BRIEF))

#define clock_gettime(clock, t) ((t)->tv_sec = 1, (t)->tv_nsec = 0)

/* ---- queues: what nnb_mq_open makes, without files ------------------------------------------------------------- */

typedef struct ring {
    nnb_a64 r, w, intent;
    nnb_a32 event;
    uint8_t bytes[216] __attribute__((aligned(8)));
} ring;

static void attach(nnb_mq *q, ring *ring, uint32_t quantum, uint32_t elements, uint32_t flavour, uint32_t options)
{
    q->ring = ring->bytes;
    q->quantum = quantum;
    q->capacity = elements;
    q->size = (uint64_t)quantum * elements;
    q->flavour = flavour;
    q->options = options;
    q->w = &ring->w;
    q->r = flavour == NNB_SYNCHRONIZED ? &ring->r : &q->private_r;
    q->intent = flavour == NNB_SYNCHRONIZED ? NULL : &ring->intent;
    q->event = (uint32_t *)&ring->event;
    if (!model_wakes_of(q->event))
        model_events[model_n_events++] = q->event;
}

#endif
