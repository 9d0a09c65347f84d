/* The choice of the next request, by the rule of docs/internals/scheduler.md; see schedule.h.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * No client is ever behind another client by more than LAG_NS * (slots + 1) plus one run of each.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "schedule.h"

#define LAG_NS 1000000u       /* how far a client in service may get ahead of the neediest one */
#define SHORT_THINK_NS 10000u /* average think time of a client that is worth waiting for */
#define IDLE_NS 50000u        /* the leader's longest wait for a client in service, which may be interrupted */
#define WAKE_NS 400000u       /* the leader's longest wait for a client that was just woken */
#define EXCESS_NS 50000u      /* a run may exceed four times its average by this much */
#define CREDIT_PART 16u       /* 1/16 of the charged time becomes credit for runs that take longer */
#define MOST_CREDIT_NS 20000000u
/* Maximum charge for the first run of each of a client's first bursts, which may load what all clients need. */
#define MOST_FIRST_NS 2000000u
#define MOST_FIRST 16u

void nnb_schedule_init(nnb_schedule *s, uint32_t cpus)
{
    s->load.cpus = cpus;
    s->most_slots = cpus < 2 ? 1 : cpus - 1 < NNB_MOST_SLOTS ? cpus - 1 : NNB_MOST_SLOTS;
}

int nnb_schedule_reserve(nnb_schedule *s, uint32_t flows)
{
    if (flows <= s->room)
        return 0;
    nnb_flow **ready = realloc(s->ready, flows * sizeof(*ready));
    if (!ready)
        return -ENOMEM;
    s->ready = ready;
    s->room = flows;
    return 0;
}

void nnb_schedule_fini(nnb_schedule *s) { free(s->ready); }

/* ---- accounts -------------------------------------------------------------------------------------------------- */

int nnb_queue_begin(nnb_queue *q)
{
    int is_first = !q->has_run && q->flow->n_first < MOST_FIRST;
    if (is_first)
        q->flow->n_first++;
    q->has_run = 1;
    return is_first;
}

void nnb_queue_measure(nnb_queue *q, uint64_t took_ns, int is_new, int is_first, nnb_usage *sum)
{
    if (is_first) {
        sum->first_ns += NNB_REQUEST_NS + (took_ns < MOST_FIRST_NS ? took_ns : MOST_FIRST_NS);
        return;
    }
    uint64_t most = 4 * q->average_ns + EXCESS_NS, excess = took_ns > most ? took_ns - most : 0;
    if (!took_ns)
        took_ns = q->average_ns;
    else if (!is_new)
        q->average_ns = q->average_ns - q->average_ns / 8 + (took_ns - excess) / 8;
    sum->took_ns += took_ns + NNB_REQUEST_NS;
    sum->excess_ns += excess;
}

static void spend(nnb_schedule *s, nnb_flow *f, uint64_t ns)
{
    f->spent += ns;
    if (s->rival == f)
        s->rival = NULL;
}

/* A run that takes much longer than usual was perhaps interrupted, so credit pays for its excess time. */
void nnb_schedule_charge(nnb_schedule *s, nnb_flow *f, nnb_usage *usage, uint32_t n_ended)
{
    uint64_t forgiven = usage->excess_ns < f->credit ? usage->excess_ns : f->credit;
    uint64_t counts = usage->took_ns - forgiven, credit = f->credit - forgiven + counts / CREDIT_PART;
    f->credit = credit < MOST_CREDIT_NS ? credit : MOST_CREDIT_NS;
    spend(s, f, counts + usage->first_ns);
    usage->took_ns = usage->excess_ns = usage->first_ns = 0;
    f->n_busy -= n_ended;
    if (n_ended)
        s->rival = NULL; /* the client may run again, and be the rival */
}

/* ---- ready queues ---------------------------------------------------------------------------------------------- */

/* Returns the flow's next ready queue after `q`. NULL: its first one, of the highest priority. */
static nnb_queue *behind(const nnb_flow *f, const nnb_queue *q)
{
    nnb_queue *next = q ? q->next : f->first[0];
    for (uint32_t p = q ? q->line + 1 : 1; !next && p < NNB_PRIORITIES; p++)
        next = f->first[p];
    return next;
}

/* Returns 1 if the queue is ready, or had an answer less than wait_ns ago and so may be ready again in time. */
static int is_expected(const nnb_batcher *b, const nnb_queue *q)
{
    return q->is_ready || q->left_ns + b->wait_ns >= b->since_ns;
}

static void count_expected(nnb_batcher *b)
{
    b->n_expected = 0;
    for (const nnb_queue *q = b->queues; q; q = q->next_peer)
        b->n_expected += (uint32_t)is_expected(b, q);
}

void nnb_batcher_clear(nnb_batcher *b)
{
    b->queues = NULL;
    b->n_queues = b->n_expected = 0;
}

void nnb_batcher_add(nnb_batcher *b, nnb_queue *q)
{
    q->next_peer = b->queues;
    b->queues = q;
    b->n_queues++;
    b->n_expected += (uint32_t)is_expected(b, q);
}

void nnb_batcher_hold(nnb_batcher *b, uint32_t priority, uint64_t now)
{
    b->held = 1 + priority;
    b->began_ns = now;
}

void nnb_batcher_free(nnb_batcher *b, uint64_t now)
{
    uint64_t took_ns = now - b->began_ns, again_ns = took_ns < b->wait_ns ? took_ns : b->wait_ns;
    b->held = 0;
    /* Requests that waited for this joint run wait again, at most as long, for the clients that were answered. */
    b->since_ns = now - (b->wait_ns - again_ns);
    for (nnb_queue *q = b->queues; q; q = q->next_peer)
        if (q->left_ns >= b->began_ns)
            q->left_ns = now;
    count_expected(b);
}

/* Returns 1 if a run is full, or if more than a third of the expected requests are ready (at least two, if two are
 * expected). The others gather during the run, so that workers and clients do not wait for each other. */
static int has_enough(const nnb_batcher *b)
{
    return b->n_ready >= b->most || (3 * b->n_ready > b->n_expected && (b->n_ready > 1 || b->n_expected < 2));
}

/* Returns the end of a request's wait for others; 0: no wait, e.g. because enough are ready. It also waits for the end
 * of a joint run, unless its batch_wait_ns is 0 or its priority is higher. */
static uint64_t waits_until(const nnb_queue *q)
{
    const nnb_batcher *b = q->batcher;
    if (!b || !q->batch_wait_ns || !q->joins || q->is_over)
        return 0;
    if (b->held)
        return q->priority + 1 < b->held ? 0 : UINT64_MAX;
    return has_enough(b) ? 0 : b->since_ns + q->batch_wait_ns;
}

/* Returns a flow's next queue: the first whose request does not wait for others. */
static nnb_queue *first_of(const nnb_schedule *s, const nnb_flow *f)
{
    nnb_queue *q = behind(f, NULL);
    while (q && waits_until(q) > s->now_ns)
        q = behind(f, q);
    return q;
}

static int priority_of(const nnb_queue *q) { return !q ? NNB_PRIORITIES : q->is_over ? 0 : (int)q->priority; }

static int precedes(const nnb_queue *q, const nnb_queue *other)
{
    int p = priority_of(q), than = priority_of(other);
    return p < than || (p == than && q->flow->spent < other->flow->spent);
}

/* If a client's runs hang, its other requests wait. Bursts that it closes end nevertheless. */
static int may_run(const nnb_schedule *s, const nnb_flow *f)
{
    const nnb_queue *q = first_of(s, f);
    uint32_t most = s->load.cpus > 2 ? s->load.cpus : 2;
    return q && (!s->load.n_detached ||
                 (nnb_load_has_processor(&s->load, priority_of(q)) && (f->n_busy < most || q->is_over)));
}

int nnb_schedule_is_held(const nnb_schedule *s, const nnb_load *load)
{
    const nnb_queue *q;
    for (uint32_t i = 0; i < s->n_ready; i++)
        if ((q = first_of(s, s->ready[i])) && !nnb_load_has_processor(load, priority_of(q)))
            return 1;
    return 0;
}

static void note_load(nnb_schedule *s, const nnb_load *load)
{
    if (!load->n_detached && !s->load.n_detached)
        return;
    if (memcmp(&s->load, load, sizeof(*load)))
        s->rival = NULL;
    memcpy(&s->load, load, sizeof(*load));
}

int nnb_schedule_may_pick(nnb_schedule *s, const nnb_load *load, uint64_t now)
{
    s->now_ns = now;
    note_load(s, load);
    for (uint32_t i = 0; i < s->n_ready; i++)
        if (may_run(s, s->ready[i]))
            return 1;
    return 0;
}

uint64_t nnb_schedule_wait_ns(const nnb_schedule *s, uint64_t now)
{
    uint64_t least = 0;
    for (uint32_t i = 0; s->n_batched && i < s->n_ready; i++)
        for (const nnb_queue *q = NULL; (q = behind(s->ready[i], q));) {
            uint64_t until = waits_until(q);
            if (until > now && until < UINT64_MAX && (!least || until - now < least))
                least = until - now;
        }
    return least;
}

/* A client with joint runs gets no slot: its requests wait for others, and the leader does not wait for it. */
static int needs_slot(const nnb_queue *q)
{
    return q->polls && q->think_ns <= SHORT_THINK_NS && !(q->batcher && q->batcher->n_queues > 1);
}

/* Notes a flow if it is the neediest one whose next queue is not in service. */
static void note_rival(nnb_schedule *s, nnb_flow *f)
{
    const nnb_queue *q = first_of(s, f);
    if (q && precedes(q, s->rival ? first_of(s, s->rival) : NULL) && !q->in_service && may_run(s, f))
        s->rival = f;
}

/* Limits a long time, because one among many short ones was an interruption. */
static void note_think(nnb_queue *q, uint64_t ns)
{
    q->think_ns = q->think_ns - q->think_ns / 8 + (ns < IDLE_NS ? ns : IDLE_NS) / 8;
    q->thinks_since = 0;
}

void nnb_schedule_enqueue(nnb_schedule *s, nnb_queue *q, uint64_t now)
{
    nnb_flow *f = q->flow;
    if (q->is_ready)
        return;
    q->is_ready = 1;
    s->now_ns = now;
    s->n_batched += q->batcher != NULL;
    if (q->batcher) {
        if (!q->batcher->n_ready++)
            q->batcher->since_ns = now;
        count_expected(q->batcher);
    }
    uint64_t thought = now - q->thinks_since;
    if (q->thinks_since && !q->was_woken && (thought <= SHORT_THINK_NS || q->answered_at == s->n_served))
        note_think(q, thought); /* else the leader was busy and looked late, so the time is unknown */
    else if (q->thinks_since && q->was_woken && thought <= IDLE_NS)
        note_think(q, q->think_ns - q->think_ns / 8); /* so that the queue may later get a slot again */
    q->thinks_since = 0;
    int goes_first = q->is_over || q->in_service;
    uint32_t p = q->line = q->is_over ? 0 : q->priority;
    nnb_queue **link = goes_first || !f->first[p] ? &f->first[p] : f->last[p];
    q->next = *link;
    *link = q;
    if (!q->next)
        f->last[p] = &q->next;
    if (!f->n_ready++) {
        f->ready_at = s->n_ready;
        s->ready[s->n_ready++] = f;
        if (f->spent + LAG_NS < s->floor_ns) /* a client cannot save unused time */
            f->spent = s->floor_ns - LAG_NS;
    }
    if (s->rival == f)
        s->rival = NULL;
    else if (s->rival)
        note_rival(s, f);
}

static nnb_queue *dequeue(nnb_schedule *s, nnb_queue *q)
{
    nnb_flow *f = q->flow;
    nnb_queue **link = &f->first[q->line];
    while (*link != q)
        link = &(*link)->next;
    if (!(*link = q->next))
        f->last[q->line] = link;
    q->is_ready = 0;
    q->left_ns = s->now_ns;
    s->n_batched -= q->batcher != NULL;
    if (q->batcher)
        q->batcher->n_ready--;
    if (!--f->n_ready) {
        s->ready[f->ready_at] = s->ready[--s->n_ready];
        s->ready[f->ready_at]->ready_at = f->ready_at;
    }
    if (s->rival == f)
        s->rival = NULL;
    else if (s->rival && f->n_ready)
        note_rival(s, f);
    if (f->spent > s->floor_ns && !q->is_over) /* a burst that ends gets no service */
        s->floor_ns = f->spent;
    s->n_served++;
    return q;
}

/* ---- queues in service ----------------------------------------------------------------------------------------- */

void nnb_schedule_leave(nnb_schedule *s, nnb_queue *q)
{
    if (!q->in_service)
        return;
    q->in_service = 0;
    s->rival = NULL;
    if (s->awaited == q)
        s->awaited = NULL;
    uint32_t i = 0;
    while (s->slots[i] != q)
        i++;
    s->slots[i] = s->slots[--s->n_slots];
}

static void enter(nnb_schedule *s, nnb_queue *q)
{
    for (uint32_t i = 0; i < s->n_slots && s->n_slots == s->most_slots; i++)
        if (s->slots[i]->priority > q->priority)
            nnb_schedule_leave(s, s->slots[i]);
    if (s->n_slots == s->most_slots)
        return;
    q->in_service = q->is_entering = 1;
    s->slots[s->n_slots++] = q;
}

/* Returns 1 if the leader waits for a client in service before it serves `next`. Else the client leaves service. */
static int is_awaited(nnb_schedule *s, nnb_queue *q, const nnb_queue *next, uint64_t now)
{
    int is_ahead = q->flow->spent > next->flow->spent + LAG_NS;
    if (!is_ahead && now < q->wait_until && (q->is_ready || q->think_ns <= SHORT_THINK_NS))
        return 1;
    if (q->thinks_since && !is_ahead)
        note_think(q, IDLE_NS);
    nnb_schedule_leave(s, q);
    return 0;
}

/* Charges waiting to the awaited client, but not the time of an interruption of the leader. */
static void end_waiting(nnb_schedule *s, uint64_t now)
{
    uint64_t waited = now - s->awaited_since;
    if (s->awaited)
        spend(s, s->awaited->flow, waited < WAKE_NS ? waited : WAKE_NS);
    s->awaited = NULL;
    s->awaited_since = now;
}

nnb_queue *nnb_schedule_next(nnb_schedule *s, const nnb_load *load, uint64_t now)
{
    s->now_ns = now;
    end_waiting(s, now);
    note_load(s, load);
    if (s->n_batched)
        s->rival = NULL; /* waits in a batcher may have ended meanwhile */
    for (uint32_t i = 0, n = s->rival ? 0 : s->n_ready; i < n; i++)
        note_rival(s, s->ready[i]);
    const nnb_flow *rival = s->rival;
    nnb_queue *next = rival ? first_of(s, rival) : NULL, *best = NULL, *awaited = NULL;
    int priority = priority_of(next), takes_slot = next && needs_slot(next);
    for (uint32_t i = s->n_slots; i-- > 0;) {
        nnb_queue *q = s->slots[i];
        const nnb_flow *f = q->flow;
        int p = priority_of(q);
        uint64_t bound = p < priority ? UINT64_MAX : rival->spent + (takes_slot ? LAG_NS : 0);
        if (p > priority)
            continue; /* gives way to a higher priority */
        if (q->is_ready && f->spent <= bound && first_of(s, f) == q && may_run(s, f)) {
            if (precedes(q, best))
                best = q;
        } else if (takes_slot && is_awaited(s, q, next, now)) {
            awaited = q;
        }
    }
    if (best)
        return dequeue(s, best);
    /* A worker and a client that poll for each other need two processors besides those of the other runs. */
    int has_two = !load->n_detached || load->n_detached + 2 <= load->cpus;
    if (awaited && s->n_slots == s->most_slots && has_two) {
        s->awaited = awaited;
        return NULL;
    }
    if (takes_slot)
        enter(s, next);
    return next ? dequeue(s, next) : NULL;
}

nnb_queue *nnb_schedule_rider(nnb_schedule *s, const nnb_batcher *batcher)
{
    nnb_queue *best = NULL;
    for (uint32_t i = 0; i < s->n_ready; i++)
        for (nnb_queue *q = NULL; (q = behind(s->ready[i], q));)
            if (q->batcher == batcher && q->joins && !q->is_over && precedes(q, best))
                best = q;
    if (best)
        nnb_schedule_leave(s, best);
    return best ? dequeue(s, best) : NULL;
}

void nnb_schedule_answered(nnb_schedule *s, nnb_queue *q, uint64_t now, int was_asleep)
{
    q->thinks_since = now;
    q->answered_at = s->n_served;
    q->was_woken = was_asleep && (q->is_entering || !q->in_service);
    q->wait_until = now + (was_asleep ? WAKE_NS : IDLE_NS);
    q->is_entering = 0;
}
