/* Who uses which driver-managed buffer at the moment, and which of them have contents.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * The bytes of the buffers belong to Python; here is only their state. One lock for all buffers of a process: a
 * request takes all its buffers or none, so no two requests wait for each other in a circle. It is held for a few
 * loads and stores, never while bytes are copied or kernels run.
 *
 * `use` of a buffer is how many read it, or WRITTEN; closing adds CLOSED on top, so that its users go on and no
 * more are admitted. A closed buffer without users has exactly CLOSED.
 */
#define _GNU_SOURCE
#include <stdlib.h>
#include <time.h>

#include "nnb_internal.h"

#define WRITTEN (-1)
#define CLOSED (-(1ll << 40))

struct nnb_gate {
    pthread_mutex_t lock;
    pthread_cond_t left; /* a user left while others wait */
    uint32_t waiting;
    uint64_t moves;
    nnb_buffer *all; /* alive */
    nnb_gate *next;
};

static nnb_gate *gates;
static pthread_mutex_t gates_lock = PTHREAD_MUTEX_INITIALIZER;

struct nnb_buffer {
    nnb_gate *gate;
    nnb_buffer *next, **link; /* among all; `link` is what points here */
    uint32_t refs;
    int32_t initialised;
    int64_t use;
    uint64_t generation;
};

struct nnb_uses {
    nnb_gate *gate;
    uint32_t refs;
    uint32_t n_reading, n; /* those that are read come first */
    uint64_t moves;        /* nothing has moved while the gate's are the same; UINT64_MAX: never looked */
    nnb_buffer *buffers[];
};

/* ---- the gate ------------------------------------------------------------------------------------------------- */

static void start(nnb_gate *g)
{
    pthread_condattr_t attr;
    pthread_mutex_init(&g->lock, NULL);
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC); /* deadlines are on this clock */
    pthread_cond_init(&g->left, &attr);
    pthread_condattr_destroy(&attr);
    g->waiting = 0;
}

/* The handlers run inside fork(), on the thread that forks. A holder of a lock here waits for nothing that this
 * thread may hold, such as an interpreter lock: it holds it for a few loads and stores. */
static void before_fork(void)
{
    pthread_mutex_lock(&gates_lock);
    for (nnb_gate *g = gates; g; g = g->next)
        pthread_mutex_lock(&g->lock);
}

static void after_fork_in_parent(void)
{
    for (nnb_gate *g = gates; g; g = g->next)
        pthread_mutex_unlock(&g->lock);
    pthread_mutex_unlock(&gates_lock);
}

static void free_all(nnb_gate *g)
{
    for (nnb_buffer *b = g->all; b; b = b->next) {
        int closed = b->use <= CLOSED / 2;
        if (b->use == WRITTEN || b->use == CLOSED + WRITTEN) {
            b->initialised = 0;
            b->generation++;
        }
        b->use = closed ? CLOSED : 0;
    }
}

static void after_fork_in_child(void)
{
    pthread_mutex_init(&gates_lock, NULL);
    for (nnb_gate *g = gates; g; g = g->next) {
        start(g);
        free_all(g);
    }
}

int nnb_gate_create(nnb_gate **out)
{
    nnb_gate *g = calloc(1, sizeof *g);
    if (!g)
        return -ENOMEM;
    start(g);
    pthread_mutex_lock(&gates_lock);
    int rc = gates ? 0 : -pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
    if (!rc) {
        g->next = gates;
        gates = g;
    }
    pthread_mutex_unlock(&gates_lock);
    if (rc < 0) {
        free(g);
        return rc;
    }
    *out = g;
    return 0;
}

uint64_t nnb_gate_moves(nnb_gate *g, uint64_t more)
{
    pthread_mutex_lock(&g->lock);
    uint64_t moves = g->moves += more;
    pthread_mutex_unlock(&g->lock);
    return moves;
}

uint32_t nnb_gate_waiting(nnb_gate *g)
{
    pthread_mutex_lock(&g->lock);
    uint32_t waiting = g->waiting;
    pthread_mutex_unlock(&g->lock);
    return waiting;
}

/* ---- buffers -------------------------------------------------------------------------------------------------- */

int nnb_buffer_create(nnb_buffer **out, nnb_gate *g)
{
    nnb_buffer *b = calloc(1, sizeof *b);
    if (!b)
        return -ENOMEM;
    b->gate = g;
    b->refs = 1;
    pthread_mutex_lock(&g->lock);
    b->next = g->all;
    b->link = &g->all;
    if (b->next)
        b->next->link = &b->next;
    g->all = b;
    pthread_mutex_unlock(&g->lock);
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
    nnb_gate *g = b->gate;
    pthread_mutex_lock(&g->lock);
    release(b);
    pthread_mutex_unlock(&g->lock);
}

void nnb_buffer_look(nnb_buffer *b, nnb_buffer_state *out)
{
    pthread_mutex_lock(&b->gate->lock);
    *out = (nnb_buffer_state){.generation = b->generation,
                              .is_initialised = b->initialised,
                              .is_closed = b->use <= CLOSED / 2,
                              .is_idle = b->use == 0 || b->use == CLOSED};
    pthread_mutex_unlock(&b->gate->lock);
}

void nnb_buffer_close(nnb_buffer *b)
{
    pthread_mutex_lock(&b->gate->lock);
    if (b->use > CLOSED / 2)
        b->use += CLOSED;
    if (b->gate->waiting)
        pthread_cond_broadcast(&b->gate->left); /* they will never get it */
    pthread_mutex_unlock(&b->gate->lock);
}

/* ---- the buffers of one request ------------------------------------------------------------------------------- */

int nnb_uses_create(nnb_uses **out, nnb_gate *g, nnb_buffer *const *reading, uint32_t n_reading,
                    nnb_buffer *const *writing, uint32_t n_writing)
{
    uint32_t n = n_reading + n_writing;
    nnb_uses *u = malloc(sizeof *u + n * sizeof u->buffers[0]);
    if (!u)
        return -ENOMEM;
    u->gate = g;
    u->refs = 1;
    u->n_reading = n_reading;
    u->n = n;
    u->moves = UINT64_MAX;
    pthread_mutex_lock(&g->lock);
    for (uint32_t i = 0; i < n; i++) {
        u->buffers[i] = i < n_reading ? reading[i] : writing[i - n_reading];
        u->buffers[i]->refs++;
    }
    pthread_mutex_unlock(&g->lock);
    *out = u;
    return 0;
}

nnb_uses *nnb_uses_share(nnb_uses *u)
{
    pthread_mutex_lock(&u->gate->lock);
    u->refs++;
    pthread_mutex_unlock(&u->gate->lock);
    return u;
}

void nnb_uses_destroy(nnb_uses *u)
{
    if (!u)
        return;
    nnb_gate *g = u->gate;
    pthread_mutex_lock(&g->lock);
    int last = !--u->refs;
    for (uint32_t i = 0; last && i < u->n; i++)
        release(u->buffers[i]);
    pthread_mutex_unlock(&g->lock);
    if (last)
        free(u);
}

/* With the lock held. 0: taken; -EAGAIN: one is in use; -ESHUTDOWN: one was closed. */
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
    pthread_mutex_lock(&u->gate->lock);
    if (u->moves == u->gate->moves) {
        ok = 1;
        for (uint32_t i = 0; ok && i < u->n_reading; i++)
            ok = u->buffers[i]->initialised;
        ok = ok && take(u) == 0;
    }
    pthread_mutex_unlock(&u->gate->lock);
    return ok;
}

int nnb_uses_enter(nnb_uses *u, uint64_t deadline_ns)
{
    nnb_gate *g = u->gate;
    struct timespec until = {.tv_sec = (time_t)(deadline_ns / 1000000000u),
                             .tv_nsec = (long)(deadline_ns % 1000000000u)};
    pthread_mutex_lock(&g->lock);
    int rc = take(u);
    if (rc == -EAGAIN && deadline_ns) {
        g->waiting++;
        while (rc == -EAGAIN && pthread_cond_timedwait(&g->left, &g->lock, &until) != ETIMEDOUT)
            rc = take(u);
        g->waiting--;
    }
    pthread_mutex_unlock(&g->lock);
    return rc;
}

void nnb_uses_settle(nnb_uses *u, uint64_t moves)
{
    pthread_mutex_lock(&u->gate->lock);
    u->moves = moves;
    pthread_mutex_unlock(&u->gate->lock);
}

int nnb_uses_leave(nnb_uses *u, int outcome)
{
    int idle = 0;
    pthread_mutex_lock(&u->gate->lock);
    for (uint32_t i = 0; i < u->n; i++) {
        nnb_buffer *b = u->buffers[i];
        b->use -= i < u->n_reading ? 1 : WRITTEN;
        if (i >= u->n_reading && outcome != NNB_UNCHANGED) {
            b->generation++;
            b->initialised = outcome == NNB_COMMITTED;
        }
        idle |= b->use == CLOSED;
    }
    if (u->gate->waiting)
        pthread_cond_broadcast(&u->gate->left);
    pthread_mutex_unlock(&u->gate->lock);
    return idle;
}
