/* The lead of a group: the word `lead`, its hand-over, parked workers, and the monitor.
 *
 * SPDX-License-Identifier: Apache-2.0
 */

#include "nnb_group.h"

#define IDLE_TICKS 8        /* ticks without a run after which the monitor rests */
#define GROW_NS 1000000000u /* time after which a missing worker is requested again */
#define MOST_WORKERS 1024u
#define SPARE 4u             /* number of parked workers that never end */
#define KEEP_NS 10000000000u /* other parked workers end after this time without work */

/* ---- how many runs there are ----------------------------------------------------------------------------------- */

void nnb_group_load(const nnb_group *g, nnb_load *load)
{
    load->cpus = g->cpus;
    load->n_detached = nnb_load32_relaxed(&g->n_detached);
    for (int p = 0; p < NNB_PRIORITIES; p++)
        load->n_runs[p] = load->n_detached ? nnb_load32_relaxed(&g->n_runs[p]) : 0;
}

int nnb_group_is_saturated(const nnb_group *g)
{
    nnb_load load;
    nnb_group_load(g, &load);
    int p = 0;
    while (p < NNB_PRIORITIES - 1 && !nnb_load32_relaxed(&g->n_bursts[p]))
        p++;
    return !nnb_load_has_processor(&load, p);
}

int nnb_group_wants_worker(nnb_group *g)
{
    uint32_t runs = nnb_load32_relaxed(&g->n_detached);
    uint32_t enough = nnb_group_is_saturated(g) || runs < g->cpus ? g->cpus : runs + 1; /* runs + 1: one leads */
    if (g->parked || g->n_workers >= MOST_WORKERS || (g->n_workers > enough && !nnb_load32_relaxed(&g->n_stuck)))
        return 0;
    uint64_t now = nnb_now_ns();
    if (g->asked_ns && now - g->asked_ns < GROW_NS)
        return 0;
    g->asked_ns = now;
    return -EUSERS;
}

/* Under lock, by the leader: notes that a run is detached. Its queue leaves service. began_ns 0: not measured. */
static void mark_detached(nnb_group *g, nnb_worker *w, uint64_t began_ns)
{
    nnb_queue *q = &w->burst->queue;
    nnb_schedule_leave(&g->schedule, q);
    q->flow->n_busy++;
    w->is_detached = 1;
    w->seen_runs = nnb_load_relaxed(&w->runs);
    w->seen_ns = began_ns;
    nnb_count_up(&g->n_detached);
    nnb_count_up(&g->n_runs[q->priority]);
}

/* Under lock: passes the cost of a run to the leader, which charges it. */
static void mark_done(nnb_group *g, nnb_worker *w)
{
    nnb_member *m = nnb_member_of(w->burst);
    uint64_t runs = nnb_load_relaxed(&w->runs);
    m->usage.took_ns += w->usage.took_ns;
    m->usage.excess_ns += w->usage.excess_ns;
    m->usage.first_ns += w->usage.first_ns;
    w->usage = (nnb_usage){0};
    if (w->is_detached) {
        m->n_ended++;
        nnb_count_down(runs & NNB_STUCK ? &g->n_stuck : &g->n_runs[w->burst->queue.priority]);
        nnb_count_down(&g->n_detached);
        nnb_store_relaxed(&w->runs, runs & ~NNB_STUCK);
        w->is_detached = 0;
    }
    nnb_store32_relaxed(&g->is_owed, 1);
}

void nnb_group_settle(nnb_group *g)
{
    pthread_mutex_lock(&g->lock);
    nnb_store32_relaxed(&g->is_owed, 0);
    for (nnb_member *m = g->members; m; m = m->next) {
        nnb_schedule_charge(&g->schedule, &m->flow, &m->usage, m->n_ended);
        m->n_ended = 0;
    }
    for (; g->freed; g->freed = g->freed->next_freed)
        nnb_batcher_free(g->freed, nnb_now_ns());
    pthread_mutex_unlock(&g->lock);
}

void nnb_lead_free(nnb_worker *w, nnb_batcher *batcher)
{
    nnb_group *g = w->group;
    if (w->role == NNB_LEADS) {
        nnb_batcher_free(batcher, nnb_now_ns());
        return;
    }
    pthread_mutex_lock(&g->lock);
    batcher->next_freed = g->freed;
    g->freed = batcher;
    nnb_store32_relaxed(&g->is_owed, 1);
    pthread_mutex_unlock(&g->lock);
    nnb_ring(&g->bell);
}

void nnb_group_count_stuck(nnb_group *g, uint64_t now)
{
    for (nnb_worker *w = g->workers; w; w = w->next) {
        uint64_t runs = nnb_load_relaxed(&w->runs);
        if (!w->is_detached || runs & NNB_STUCK)
            continue;
        if (!w->seen_ns || w->seen_runs != runs) {
            w->seen_runs = runs;
            w->seen_ns = now;
        } else if (now - w->seen_ns >= 2 * NNB_TICK_NS && nnb_cas_relaxed(&w->runs, runs, runs | NNB_STUCK)) {
            nnb_count_up(&g->n_stuck);
            nnb_count_down(&g->n_runs[w->burst->queue.priority]);
        }
    }
}

/* ---- the lead -------------------------------------------------------------------------------------------------- */

uint64_t nnb_lead_word(const nnb_worker *w, uint32_t state)
{
    return nnb_load_relaxed(&w->runs) << 16 | (uint64_t)w->number << 2 | state;
}

void nnb_group_arm(nnb_group *g)
{
    if (nnb_load32_relaxed(&g->ticking) || !g->parked)
        return;
    g->monitor = g->parked;
    g->monitor->idle_ticks = 0;
    g->monitor->seen_lead = 0;
    nnb_store32_relaxed(&g->ticking, 1);
    nnb_ring(&g->monitor->bell);
}

/* Under lock, if no worker leads: makes this worker the leader. */
static void take_lead(nnb_group *g, const nnb_worker *w)
{
    nnb_store_relaxed(&g->lead, nnb_lead_word(w, NNB_LEAD_LOOKING));
}

/* Under lock: removes a worker from the parked ones. */
static void unpark(nnb_group *g, nnb_worker *w)
{
    for (nnb_worker **link = &g->parked; *link; link = &(*link)->next_parked)
        if (*link == w) {
            *link = w->next_parked;
            nnb_count_down(&g->n_parked);
            break;
        }
    if (g->monitor == w) {
        g->monitor = NULL;
        nnb_store32_relaxed(&g->ticking, 0);
    }
}

void nnb_lead_hand_on(nnb_group *g)
{
    nnb_worker *next = g->parked;
    if (next && next == g->monitor && next->next_parked)
        next = next->next_parked; /* let the monitor stay, if another worker is parked */
    if (next) {
        unpark(g, next);
        next->role = NNB_LEADS;
    }
    nnb_store_relaxed(&g->lead, next ? nnb_lead_word(next, NNB_LEAD_LOOKING) : NNB_LEAD_FREE);
    if (next)
        nnb_ring(&next->bell); /* under the lock, as the worker may end after that */
}

void nnb_lead_detach(nnb_worker *w)
{
    nnb_group *g = w->group;
    pthread_mutex_lock(&g->lock);
    mark_detached(g, w, w->started_ns);
    w->role = NNB_DETACHED;
    nnb_lead_hand_on(g);
    pthread_mutex_unlock(&g->lock);
}

void nnb_lead_busy(nnb_worker *w, int has_others)
{
    nnb_group *g = w->group;
    w->role = NNB_INLINE;
    nnb_store_release(&g->lead, nnb_lead_word(w, NNB_LEAD_BUSY)); /* SYNC POINT: hand_over <-> take_over */
    if (!has_others)
        return;
    nnb_fence_seq_cst(); /* SYNC POINT: arm <-> rest */
    if (!nnb_load32_relaxed(&g->ticking)) {
        pthread_mutex_lock(&g->lock);
        nnb_group_arm(g);
        pthread_mutex_unlock(&g->lock);
    }
}

int nnb_lead_resume(nnb_worker *w)
{
    if (w->role == NNB_INLINE) {
        /* Lead again, unless another worker has led meanwhile. */
        int leads =
            nnb_cas_relaxed(&w->group->lead, nnb_lead_word(w, NNB_LEAD_BUSY), nnb_lead_word(w, NNB_LEAD_LOOKING));
        w->role = leads ? NNB_LEADS : NNB_DETACHED;
    }
    return w->role == NNB_LEADS;
}

void nnb_lead_release(nnb_worker *w)
{
    w->role = NNB_NO_ROLE;
    nnb_store_relaxed(&w->group->lead, NNB_LEAD_FREE);
}

void nnb_worker_give_back(nnb_worker *w)
{
    nnb_group *g = w->group;
    nnb_burst *b = w->burst;
    pthread_mutex_lock(&g->lock);
    mark_done(g, w);
    w->role = NNB_LEAD_STATE(nnb_load_relaxed(&g->lead)) == NNB_LEAD_FREE ? NNB_LEADS : NNB_NO_ROLE;
    if (w->role == NNB_LEADS) {
        take_lead(g, w);
        g->is_slow = 1;
    }
    if (w->ended)
        nnb_group_bury(g, b);
    else
        nnb_store32_release(&b->taken, 0); /* SYNC POINT: give_back <-> take_up */
    pthread_mutex_unlock(&g->lock);
    w->burst = NULL;
    w->ended = 0;
    if (w->role == NNB_NO_ROLE)
        nnb_ring(&g->bell);
}

/* ---- parked workers -------------------------------------------------------------------------------------------- */

/* Under lock: one tick of the monitor. 1: the monitor leads now. */
static int tick(nnb_worker *w)
{
    nnb_group *g = w->group;
    uint64_t x = nnb_load_relaxed(&g->lead);
    uint32_t state = NNB_LEAD_STATE(x);
    if (state == NNB_LEAD_FREE) {
        nnb_group_count_stuck(g, nnb_now_ns());
        if (nnb_group_is_saturated(g))
            return 0;
        take_lead(g, w);
        return 1;
    }
    if (state == NNB_LEAD_BUSY && x == w->seen_lead) {
        nnb_worker *busy = g->workers;
        while (busy && busy->number != (x >> 2 & 0x3fff))
            busy = busy->next;
        /* SYNC POINT: hand_over <-> take_over */
        if (busy && nnb_cas_acquire(&g->lead, x, nnb_lead_word(w, NNB_LEAD_LOOKING))) {
            mark_detached(g, busy, nnb_now_ns() - NNB_TICK_NS); /* or earlier; the worker may be writing started_ns */
            return 1;
        }
    }
    /* In a changed group, a leader that does not know all bursts may begin a run, so the monitor must not rest. */
    if (state == NNB_LEAD_BUSY || x != w->seen_lead || nnb_load32_relaxed(&g->changed)) {
        w->idle_ticks = 0;
    } else if (++w->idle_ticks >= IDLE_TICKS) {
        nnb_store32_relaxed(&g->ticking, 0);
        nnb_fence_seq_cst(); /* SYNC POINT: arm <-> rest */
        w->idle_ticks = 0;
        if (NNB_LEAD_STATE(nnb_load_relaxed(&g->lead)) == NNB_LEAD_BUSY)
            nnb_store32_relaxed(&g->ticking, 1);
        else
            g->monitor = NULL;
    }
    w->seen_lead = x;
    return 0;
}

/* The worker that parked last is called first, so a worker that stays parked for long is not needed. */
static int has_too_many(const nnb_group *g)
{
    return nnb_load32_relaxed(&g->n_parked) > SPARE && g->n_workers > g->cpus + 1 + nnb_load32_relaxed(&g->n_stuck);
}

/* Under lock. 0: the worker leads; 1: it is parked and must wait; -EPIPE. */
static int line_up(nnb_group *g, nnb_worker *w)
{
    uint32_t state = NNB_LEAD_STATE(nnb_load_relaxed(&g->lead));
    if (w->is_fresh) {
        nnb_ask_for_short_slices();
        w->is_fresh = 0;
        g->asked_ns = 0; /* the requested worker has come: others may be requested */
    }
    if (nnb_load32_relaxed(&g->closing))
        return -EPIPE;
    if (state == NNB_LEAD_FREE && !nnb_group_is_saturated(g)) {
        take_lead(g, w);
        w->role = NNB_LEADS;
        return 0;
    }
    w->next_parked = g->parked;
    g->parked = w;
    nnb_count_up(&g->n_parked);
    int is_shared = nnb_load32_relaxed(&g->n_live) > 1;
    if (state == NNB_LEAD_FREE || (is_shared && (state == NNB_LEAD_BUSY || nnb_load32_relaxed(&g->changed))))
        nnb_group_arm(g);
    return 1;
}

int nnb_worker_park(nnb_worker *w)
{
    nnb_group *g = w->group;
    pthread_mutex_lock(&g->lock);
    int rc = line_up(g, w);
    while (rc == 1) {
        uint64_t ns = g->monitor == w ? NNB_TICK_NS : has_too_many(g) ? KEEP_NS : 0;
        pthread_mutex_unlock(&g->lock);
        int is_over = nnb_sleep_on_bell(&w->bell, ns);
        pthread_mutex_lock(&g->lock);
        if (w->role == NNB_LEADS) { /* another worker has handed over the lead */
            rc = 0;
        } else if (nnb_load32_relaxed(&g->closing)) {
            unpark(g, w);
            rc = -EPIPE;
        } else if (g->monitor == w && tick(w)) {
            unpark(g, w);
            w->role = NNB_LEADS;
            rc = 0;
        } else if (is_over && ns == KEEP_NS && g->monitor != w && has_too_many(g)) {
            unpark(g, w);
            rc = -ESHUTDOWN;
        }
    }
    if (rc < 0)
        nnb_worker_retire(w);
    pthread_mutex_unlock(&g->lock);
    return rc;
}
