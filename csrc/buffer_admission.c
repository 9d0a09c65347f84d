/* The present users of driver-managed buffers, and the state of the contents. The bytes belong to Python.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * A request takes all its buffers or none, under one lock for all buffers of the process, so no two requests wait for
 * each other in a circle. The lock is held for a few loads and stores, never while bytes are copied or kernels run.
 *
 * `use` of a buffer is the number of its readers, or WRITTEN. Closing adds CLOSED, so that present users continue and
 * no more are admitted. A closed buffer without users has exactly CLOSED.
 */
#define _GNU_SOURCE
#include <stdlib.h>
#include <time.h>

#include "nnb_internal.h"

#define WRITTEN (-1)
#define CLOSED (-(1ll << 40))

static struct {
    pthread_mutex_t lock;
    pthread_cond_t left; /* a user left, or a buffer was closed */
    uint64_t moves;
    nnb_buffer *all; /* all living buffers */
} gate = {.lock = PTHREAD_MUTEX_INITIALIZER};

struct nnb_buffer {
    nnb_buffer *next, **link; /* in the list of all; `link` points to the pointer to this buffer */
    uint32_t refs;
    int32_t initialised;
    int64_t use;
    uint64_t generation;
    nnb_buffer_contents contents; /* only users access it */
};

struct nnb_uses {
    uint32_t refs;
    uint32_t n_reading, n; /* read buffers come first */
    uint64_t moves;        /* the gate's moves when views were made; or NNB_ANYWHERE; UINT64_MAX: no views yet */
    nnb_buffer *buffers[];
};

/* ---- the gate ------------------------------------------------------------------------------------------------- */

/* fork() takes this lock, too. So a thread that has it never waits for a lock that the forking thread may have. */
static void enter(void) { pthread_mutex_lock(&gate.lock); }
static void leave(void) { pthread_mutex_unlock(&gate.lock); }

static void start(void)
{
    pthread_condattr_t attr;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC); /* deadlines are on this clock */
    pthread_cond_init(&gate.left, &attr);
    pthread_condattr_destroy(&attr);
}

static void after_fork_in_child(void)
{
    pthread_mutex_init(&gate.lock, NULL);
    start();
    for (nnb_buffer *b = gate.all; b; b = b->next) {
        int closed = b->use <= CLOSED / 2;
        if (b->use == WRITTEN || b->use == CLOSED + WRITTEN) {
            b->initialised = 0;
            b->generation++;
        }
        b->use = closed ? CLOSED : 0;
    }
}

static void prepare(void)
{
    start();
    pthread_atfork(enter, leave, after_fork_in_child);
}

uint64_t nnb_gate_moves(uint64_t more)
{
    enter();
    uint64_t moves = gate.moves += more;
    leave();
    return moves;
}

/* ---- buffers -------------------------------------------------------------------------------------------------- */

int nnb_buffer_create(nnb_buffer **out)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, prepare);
    nnb_buffer *b = calloc(1, sizeof *b);
    if (!b)
        return -ENOMEM;
    b->refs = 1;
    enter();
    b->next = gate.all;
    b->link = &gate.all;
    if (b->next)
        b->next->link = &b->next;
    gate.all = b;
    leave();
    *out = b;
    return 0;
}

static void release(nnb_buffer *b)
{
    if (--b->refs)
        return;
    *b->link = b->next;
    if (b->next)
        b->next->link = b->link;
    free(b);
}

void nnb_buffer_destroy(nnb_buffer *b)
{
    enter();
    release(b);
    leave();
}

void nnb_buffer_look(nnb_buffer *b, nnb_buffer_state *out)
{
    enter();
    *out = (nnb_buffer_state){.generation = b->generation,
                              .is_initialised = b->initialised,
                              .is_closed = b->use <= CLOSED / 2,
                              .is_idle = b->use == 0 || b->use == CLOSED};
    leave();
}

void nnb_buffer_close(nnb_buffer *b)
{
    enter();
    if (b->use > CLOSED / 2)
        b->use += CLOSED;
    pthread_cond_broadcast(&gate.left); /* requests that wait for the buffer must give up */
    leave();
}

nnb_buffer_contents *nnb_buffer_contents_of(nnb_buffer *b) { return &b->contents; }

int nnb_buffer_settle(nnb_buffer *b, uint32_t rank, const int64_t *dims)
{
    nnb_buffer_contents *c = &b->contents;
    if (rank > NNB_MAX_RANK)
        return -EINVAL;
    int is_same = c->rank == rank;
    c->rank = rank;
    for (uint32_t i = 0; i < rank; i++) {
        is_same &= c->dims[i] == dims[i];
        c->dims[i] = (uint32_t)dims[i];
    }
    if (!is_same)
        nnb_gate_moves(1);
    return 0;
}

/* ---- the buffers of one request ------------------------------------------------------------------------------- */

int nnb_uses_create(nnb_uses **out, nnb_buffer *const *reading, uint32_t n_reading, nnb_buffer *const *writing,
                    uint32_t n_writing)
{
    uint32_t n = n_reading + n_writing;
    nnb_uses *u = malloc(sizeof *u + n * sizeof u->buffers[0]);
    if (!u)
        return -ENOMEM;
    u->refs = 1;
    u->n_reading = n_reading;
    u->n = n;
    u->moves = UINT64_MAX;
    enter();
    for (uint32_t i = 0; i < n; i++) {
        u->buffers[i] = i < n_reading ? reading[i] : writing[i - n_reading];
        u->buffers[i]->refs++;
    }
    leave();
    *out = u;
    return 0;
}

nnb_uses *nnb_uses_share(nnb_uses *u)
{
    enter();
    u->refs++;
    leave();
    return u;
}

void nnb_uses_destroy(nnb_uses *u)
{
    if (!u)
        return;
    enter();
    int last = !--u->refs;
    for (uint32_t i = 0; last && i < u->n; i++)
        release(u->buffers[i]);
    leave();
    if (last)
        free(u);
}

/* Takes all buffers. Under the lock. -EAGAIN: one is in use; -ESHUTDOWN: one was closed. */
static int take(nnb_uses *u)
{
    int rc = 0;
    for (uint32_t i = 0; i < u->n; i++) {
        int64_t use = u->buffers[i]->use;
        if (use <= CLOSED / 2)
            return -ESHUTDOWN;
        if (i < u->n_reading ? use < 0 : use != 0)
            rc = -EAGAIN;
    }
    for (uint32_t i = 0; !rc && i < u->n; i++)
        u->buffers[i]->use = i < u->n_reading ? u->buffers[i]->use + 1 : WRITTEN;
    return rc;
}

int nnb_uses_admit(nnb_uses *u)
{
    int ok = 0;
    enter();
    if (u->moves == gate.moves || u->moves == NNB_ANYWHERE) {
        ok = 1;
        for (uint32_t i = 0; ok && i < u->n_reading; i++)
            ok = u->buffers[i]->initialised;
        ok = ok && take(u) == 0;
    }
    leave();
    return ok;
}

int nnb_uses_enter(nnb_uses *u, uint64_t deadline_ns)
{
    struct timespec until = {.tv_sec = (time_t)(deadline_ns / 1000000000u),
                             .tv_nsec = (long)(deadline_ns % 1000000000u)};
    enter();
    int rc = take(u);
    while (rc == -EAGAIN && deadline_ns && pthread_cond_timedwait(&gate.left, &gate.lock, &until) != ETIMEDOUT)
        rc = take(u);
    leave();
    return rc;
}

void nnb_uses_settle(nnb_uses *u, uint64_t moves)
{
    enter();
    u->moves = moves;
    leave();
}

int nnb_uses_leave(nnb_uses *u, int outcome)
{
    int idle = 0;
    enter();
    for (uint32_t i = 0; i < u->n; i++) {
        nnb_buffer *b = u->buffers[i];
        b->use -= i < u->n_reading ? 1 : WRITTEN;
        if (i >= u->n_reading && outcome != NNB_UNCHANGED) {
            b->generation++;
            b->initialised = outcome == NNB_COMMITTED;
        }
        idle |= b->use == CLOSED;
    }
    pthread_cond_broadcast(&gate.left);
    leave();
    return idle;
}
