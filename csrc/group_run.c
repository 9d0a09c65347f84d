/* The work of a group's worker: it looks for a request, takes it, runs it inline or detached, and answers.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include <sched.h>
#include <stdlib.h>

#include "nnb_group.h"

#define LONG_NS 100000u /* a run that will probably last longer is detached */
#define SLOW_NS 20000u  /* after a longer run, the leader looks at every queue */

static int has_kernel(int id) { return id >= 0 && id & NNB_PLAN_KERNEL; }

/* ---- taking a request ------------------------------------------------------------------------------------------ */

/* Makes a burst's request, or its end, the worker's present one. Returns the same as the loop's steps. */
static int take_up(nnb_worker *w, const nnb_burst *b, int id, int is_first)
{
    w->ended = id < 0 ? id : 0;
    w->is_new = id >= 0 && id & NNB_PLAN_NEW;
    w->is_first = is_first;
    nnb_store_relaxed(&w->runs, nnb_load_relaxed(&w->runs) + 1);
    return (int)(b->number * NNB_BURST_PLANS) + (w->ended ? NNB_BURST_ENDED : id);
}

/* Takes the request of a burst. >= 0: run it; -EAGAIN: the burst had no request. */
static int take(nnb_worker *w, nnb_burst *b)
{
    int id = nnb_server_try(b->server, 1);
    if (w->burst != b) /* other threads read `burst` of a detached worker */
        w->burst = b;
    if (id == -EAGAIN)
        return id;
    b->futile = 0;
    return take_up(w, b, id, nnb_queue_begin(&b->queue));
}

/* Takes the requests that wait in the same batcher as the request just taken. At most one of them needs binding. It
 * runs last, so that no other client waits while its own client is asked for a memory. */
static void gather(nnb_worker *w, nnb_burst *b)
{
    nnb_group *g = w->group;
    nnb_batcher *batcher = b->queue.batcher;
    nnb_queue *q;
    nnb_look_at_all(g);
    while (w->n_riders + 1 < batcher->most && (q = nnb_schedule_rider(&g->schedule, batcher))) {
        nnb_burst *rider = (nnb_burst *)q;
        nnb_store32_relaxed(&rider->taken, 1);
        int id = nnb_server_try(rider->server, 1), is_first = nnb_queue_begin(q);
        if (id == -EAGAIN) { /* ill-formed, and answered; see `begin` */
            q->flow->spent += NNB_REQUEST_NS;
            nnb_store32_relaxed(&rider->taken, 0);
            continue;
        }
        nnb_look_heat(g, rider);
        uint32_t place = has_kernel(id) ? w->n_riders : 0; /* riders[0] runs last */
        w->riders[w->n_riders++] = w->riders[place];
        w->riders[place] = (nnb_rider){rider, id, is_first};
        if (!has_kernel(id))
            break;
    }
    w->n_together = w->n_riders + 1;
    if (w->n_riders)
        nnb_batcher_hold(batcher, b->queue.priority, g->schedule.now_ns);
}

/* Runs the request at hand and riders of the same shape as one. If that fails, each request runs alone. */
static void run_together(nnb_worker *w)
{
    nnb_burst *bursts[NNB_MOST_BATCHED] = {w->burst};
    nnb_kernel *kernels[NNB_MOST_BATCHED] = {nnb_server_kernel(w->burst->server)};
    const nnb_batch *batch = kernels[0]->batch;
    uint64_t deadline = nnb_server_deadline(w->burst->server), began = nnb_now_ns();
    uint32_t n = 1;
    for (uint32_t i = w->n_riders; batch && n < batch->most && i-- > 0;) {
        nnb_burst *b = w->riders[i].burst;
        if (!has_kernel(w->riders[i].id) || b->share_ns || nnb_server_kernel(b->server)->batch != batch)
            continue;
        uint64_t until = nnb_server_deadline(b->server);
        deadline = !deadline || !until ? 0 : until > deadline ? until : deadline; /* the latest deadline */
        bursts[n] = b;
        kernels[n++] = nnb_server_kernel(b->server);
    }
    if (n < 2)
        return;
    if (nnb_batch_run(kernels, n, deadline)) {
        w->n_together = 0;
        nnb_lead_free(w, w->burst->queue.batcher);
        return;
    }
    uint64_t share = (nnb_now_ns() - began) / n + 1;
    nnb_count(w->burst->inbox->counters, NNB_BATCHES, 1);
    for (uint32_t i = 0; i < n; i++) {
        bursts[i]->share_ns = share;
        nnb_server_ran_together(bursts[i]->server, n);
        nnb_count(bursts[i]->inbox->counters, NNB_BATCHED, 1);
    }
}

/* Continues with the next rider. Returns the same as `take`. */
static int next_rider(nnb_worker *w)
{
    nnb_rider r = w->riders[--w->n_riders];
    w->burst = r.burst;
    w->started_ns = r.burst->share_ns ? 0 : nnb_now_ns();
    int id = take_up(w, r.burst, r.id, r.is_first);
    if (!w->n_riders && w->n_together)
        nnb_lead_free(w, r.burst->queue.batcher);
    if (w->role != NNB_LEADS)
        w->role = NNB_DETACHED;
    else if (has_kernel(r.id))
        nnb_lead_busy(w, 1);
    else
        nnb_lead_detach(w);
    return id;
}

/* Measures few runs while there is only one client, which needs no fair share. */
static int must_measure(const nnb_worker *w) { return nnb_load_relaxed(&w->runs) % NNB_LOOKS_PER_CLOCK == 0; }

/* Returns 1 if an answer must wake the burst's client. */
static int is_asleep(const nnb_burst *b)
{
    return !(nnb_load32_relaxed((nnb_a32 *)(void *)nnb_server_outbox(b->server)->mq->event) & NNB_EVENT_NOT_EMPTY);
}

/* Returns the burst that is served next. NULL: no burst is served now. */
static nnb_burst *pick(nnb_group *g)
{
    nnb_load load;
    nnb_group_load(g, &load);
    return (nnb_burst *)nnb_schedule_next(&g->schedule, &load, g->now_ns);
}

/* Begins the next ready request. -EAGAIN: no request may run now, or the worker has lost the lead; -EUSERS. */
static int begin(nnb_worker *w)
{
    nnb_group *g = w->group;
    int has_others = nnb_load32_relaxed(&g->n_live) > 1;
    if (has_others && (!nnb_load32_relaxed(&g->n_parked) || nnb_group_is_saturated(g))) {
        pthread_mutex_lock(&g->lock);
        int rc = nnb_group_wants_worker(g);
        if (!rc && nnb_group_is_saturated(g)) { /* no lead: the worker whose run ends first will lead */
            nnb_lead_release(w);
            rc = -EAGAIN;
        }
        pthread_mutex_unlock(&g->lock);
        if (rc)
            return rc;
    }
    /* now_ns is a few rounds old. These rounds count as time of the awaited client. */
    int knows_time = g->schedule.awaited != NULL;
    nnb_burst *b = pick(g);
    if (!b)
        return -EAGAIN;
    g->picks_hot++;
    g->picks_all++;
    nnb_store32_relaxed(&b->taken, 1);
    int id = take(w, b);
    if (id == -EAGAIN) { /* the request was ill-formed, and was answered */
        b->queue.flow->spent += NNB_REQUEST_NS;
        nnb_store32_relaxed(&b->taken, 0);
        w->burst = NULL;
        return id;
    }
    nnb_look_found(g, b);
    nnb_look_heat(g, b);
    w->n_together = 1;
    if (b->queue.batcher && b->queue.batcher->n_queues > 1 && !b->queue.batcher->held && has_kernel(id))
        gather(w, b);
    int is_long = w->ended || (has_others && (w->is_new || b->queue.average_ns > LONG_NS));
    w->started_ns = 0;
    if (has_others && (is_long || g->n_hot > 1 || must_measure(w))) {
        if (!knows_time || !b->queue.in_service)
            g->now_ns = nnb_now_ns();
        w->started_ns = g->now_ns;
    }
    if (is_long)
        nnb_lead_detach(w);
    else
        nnb_lead_busy(w, has_others);
    return id;
}

/* ---- answering ------------------------------------------------------------------------------------------------- */

/* Accounts for a run. The leader charges its time now, or after the worker has given the burst back. `ended_ns`: a time
 * before the answer woke a client, because that client may take this processor. */
static void account(nnb_worker *w, nnb_burst *b, uint64_t ended_ns)
{
    uint64_t took_ns = b->share_ns ? b->share_ns : w->started_ns ? ended_ns - w->started_ns : 0;
    b->share_ns = 0;
    nnb_queue_measure(&b->queue, took_ns, w->is_new, w->is_first, &w->usage);
    if (w->role != NNB_LEADS)
        return;
    nnb_schedule_charge(&w->group->schedule, b->queue.flow, &w->usage, 0);
    if (w->started_ns)
        w->group->now_ns = ended_ns;
}

/* Answers the request at hand. 0, NNB_BURST_ENDED | ..., or -ERESTART. */
static int conclude(nnb_worker *w)
{
    nnb_group *g = w->group;
    nnb_burst *b = w->burst;
    if (w->ended) { /* the burst is over, and the caller has released its resources */
        nnb_worker_give_back(w);
        return 0;
    }
    int was_asleep = is_asleep(b);
    uint64_t ended_ns = w->started_ns && was_asleep ? nnb_now_ns() : 0;
    int rc = nnb_server_reply(b->server);
    if (w->started_ns && !was_asleep)
        ended_ns = nnb_now_ns();
    w->ended = rc < 0 && rc != -ERESTART ? rc : 0;
    int leads = nnb_lead_resume(w);
    account(w, b, ended_ns);
    if (leads) {
        if (w->ended)
            nnb_lead_detach(w);
        g->is_slow |= b->queue.average_ns > SLOW_NS;
    }
    if (w->ended)
        return NNB_BURST_ENDED + (int)(b->number * NNB_BURST_PLANS);
    if (leads) {
        if (was_asleep && b->queue.in_service)
            g->now_ns = nnb_now_ns(); /* waking the client took a while */
        if (w->started_ns)
            nnb_schedule_answered(&g->schedule, &b->queue, g->now_ns, was_asleep);
        nnb_store32_relaxed(&b->taken, 0);
        w->burst = NULL;
    } else {
        nnb_worker_give_back(w);
    }
    return rc < 0 ? rc : 0;
}

/* ---- looking for a request ------------------------------------------------------------------------------------- */

/* Leads until a request must run. -EAGAIN: after `limit` rounds (0: no limit), or if the lead is lost. */
static int lead(nnb_worker *w, uint32_t limit)
{
    nnb_group *g = w->group;
    int polls = nnb_look_window(g) != 0;
    for (uint32_t round = 1;; round++) {
        if (nnb_load32_relaxed(&g->changed))
            nnb_look_refresh(g);
        if (nnb_load32_relaxed(&g->is_owed))
            nnb_group_settle(g);
        nnb_look_around(g);
        int found = nnb_look_at_slots(g), waits = g->schedule.awaited != NULL;
        int looks_up = ++g->rounds % NNB_LOOKS_PER_CLOCK == 0;
        if (g->schedule.n_ready && (found || !waits || looks_up)) {
            if (waits && !found)
                g->now_ns = nnb_now_ns();
            int rc = begin(w);
            if (rc != -EAGAIN || w->role != NNB_LEADS)
                return rc;
        }
        if (limit && round >= limit)
            return -EAGAIN;
        if (nnb_load32_relaxed(&g->closing)) {
            pthread_mutex_lock(&g->lock);
            nnb_lead_release(w);
            pthread_mutex_unlock(&g->lock);
            return -EAGAIN;
        }
        if (!limit && (looks_up || (!polls && !waits))) {
            nnb_look_idle(g);
            polls = nnb_look_window(g) != 0;
        } else if (g->schedule.n_batched) {
            sched_yield(); /* the processor may be needed by the clients that are awaited */
        } else {
            nnb_pause();
        }
    }
}

/* ---- the loop's steps ------------------------------------------------------------------------------------------ */

void nnb_worker_destroy(nnb_worker *w)
{
    nnb_group *g = w->group;
    int id = 0;
    if (g->magic != NNB_GROUP_MAGIC)
        return;
    do {
        if (w->burst && !w->ended) {
            if (id != -EAGAIN)
                nnb_server_set_result(w->burst->server, &(nnb_result){.status = -1}); /* a general failure */
            if (conclude(w) >= NNB_BURST_ENDED)
                nnb_server_hang_up(w->burst->server);
        }
        w->ended = 0; /* the caller was not told: another worker will find the end */
        if (w->burst)
            nnb_worker_give_back(w);
        id = w->n_riders ? nnb_group_run(w, next_rider(w)) : 0;
    } while (w->burst);
    pthread_mutex_lock(&g->lock);
    if (w->role == NNB_LEADS)
        nnb_lead_hand_on(g);
    nnb_worker_retire(w);
    pthread_mutex_unlock(&g->lock);
    free(w);
}

int nnb_worker_ending(const nnb_worker *w) { return w->ended; }

int nnb_group_ran_long(const nnb_worker *w) { return w->role == NNB_DETACHED; }

uint32_t nnb_group_spins(const nnb_worker *w)
{
    return w->role == NNB_LEADS && nnb_look_window(w->group) ? NNB_SPINS : 0;
}

int nnb_group_answer(nnb_worker *w)
{
    if (w->group->magic != NNB_GROUP_MAGIC)
        return -ECHILD;
    return w->burst ? conclude(w) : 0;
}

int nnb_group_try(nnb_worker *w, uint32_t spins)
{
    if (w->n_riders && !w->burst)
        return next_rider(w);
    return w->role == NNB_LEADS ? lead(w, spins) : -EAGAIN;
}

int nnb_group_run(nnb_worker *w, int id)
{
    if (!has_kernel(id) || id >= NNB_BURST_ENDED)
        return id;
    if (w->n_riders && w->n_together > 1 && !w->burst->share_ns)
        run_together(w);
    return w->burst->share_ns ? nnb_server_ran(w->burst->server, id) : nnb_server_run(w->burst->server, id);
}

int nnb_group_next(nnb_worker *w)
{
    int rc = nnb_group_answer(w);
    while (!rc) {
        if (w->role == NNB_NO_ROLE && !w->n_riders && (rc = nnb_worker_park(w)) < 0)
            return rc;
        uint32_t spins = nnb_group_spins(w);
        int id = spins ? nnb_group_try(w, spins) : -EAGAIN; /* does not look at idle queues */
        id = nnb_group_run(w, id == -EAGAIN ? nnb_group_try(w, 0) : id);
        if (id != -EAGAIN)
            return id;
        rc = nnb_group_answer(w);
    }
    return rc;
}
