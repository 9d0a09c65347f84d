/* Who is served next: see schedule.h.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * Each client is a flow, and the ready flow of the highest priority that has had least time is the neediest: start-time
 * fair queueing (Goyal, Vin, Cheng: "Start-time Fair Queueing", SIGCOMM 1996), where a flow that comes back from idleness
 * begins LAG_NS behind the one that has had most, so that it has nothing saved up.
 *
 * A client that polls for its answer takes it in a microsecond; one that sleeps has to be woken and to find a processor. If
 * each request went to the neediest, all clients would be awake for each of their requests, and push each other and the
 * leader off the processors. So service is anticipatory, with a budget (Iyer, Druschel: "Anticipatory Scheduling", SOSP 2001;
 * Linux's BFQ): as many queues as there are processors beside the leader's are in service. A client in service is answered
 * first, and waited for if its average think time is short, while
 *
 *     spent <= spent of the neediest + LAG_NS
 *
 * Then it is told to rest, and once it sleeps the neediest takes its slot. Waiting is charged to whom the leader waits for.
 * A client that does not poll, or thinks for long, needs no slot: it is served when it is the neediest, and takes nothing
 * from the others but the time of its runs. So no client is ever behind another one by more than LAG_NS * (slots + 1) and
 * a run of each. A queue leaves its slot when a run of it is detached, or its burst is over.
 */
#include <errno.h>
#include <stdlib.h>

#include "schedule.h"

#define LAG_NS 1000000u       /* how far a client in service may get ahead of the neediest one */
#define SHORT_THINK_NS 10000u /* average think time of a client that is worth waiting for */
#define IDLE_NS 50000u        /* how long the leader waits for a client in service, which was perhaps interrupted */
#define WAKE_NS 400000u       /* ... for one that was just woken */
#define EXCESS_NS 50000u      /* what a run may take beyond four times the usual */
#define CREDIT_PART 16u       /* of what has counted is credit for runs that take longer */
#define MOST_CREDIT_NS 20000000u
/* What the first run of a burst counts at most, for a client's first bursts. It waits for the client's memory, and may load
 * what all need: while many programs start, one that had to pay for that would not run for seconds. */
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

/* ---- accounts --------------------------------------------------------------------------------------------------- */

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

/* A run that takes much longer than usual was perhaps interrupted: the excess does not count, as far as its client has
 * credit from runs that have counted. */
void nnb_schedule_charge(nnb_schedule *s, nnb_flow *f, nnb_usage *usage, uint32_t n_ended)
{
    uint64_t forgiven = usage->excess_ns < f->credit ? usage->excess_ns : f->credit;
    uint64_t counts = usage->took_ns - forgiven, credit = f->credit - forgiven + counts / CREDIT_PART;
    f->credit = credit < MOST_CREDIT_NS ? credit : MOST_CREDIT_NS;
    spend(s, f, counts + usage->first_ns);
    nnb_usage_clear(usage);
    f->n_busy -= n_ended;
    if (n_ended)
        s->rival = NULL; /* it may run again */
}

/* ---- who is ready ----------------------------------------------------------------------------------------------- */

int nnb_flow_priority(const nnb_flow *f)
{
    for (int p = 0; p < NNB_PRIORITIES; p++)
        if (f->first[p])
            return p;
    return NNB_PRIORITIES;
}

/* A client whose runs hang keeps its other requests waiting, but the bursts that it closes end. */
static int may_run(const nnb_schedule *s, const nnb_flow *f)
{
    uint32_t most = s->load.cpus > 2 ? s->load.cpus : 2;
    if (!s->load.n_detached)
        return 1;
    return nnb_load_has_processor(&s->load, nnb_flow_priority(f)) &&
           (f->n_busy < most || (f->first[0] && f->first[0]->is_over));
}

static void note_load(nnb_schedule *s, const nnb_load *load)
{
    if (!load->n_detached && !s->load.n_detached)
        return;
    int is_same = load->n_detached == s->load.n_detached;
    s->load.n_detached = load->n_detached;
    for (int p = 0; p < NNB_PRIORITIES; p++) {
        is_same &= load->n_runs[p] == s->load.n_runs[p];
        s->load.n_runs[p] = load->n_runs[p];
    }
    if (!is_same)
        s->rival = NULL;
}

int nnb_schedule_may_pick(nnb_schedule *s, const nnb_load *load)
{
    note_load(s, load);
    for (uint32_t i = 0; i < s->n_ready; i++)
        if (may_run(s, s->ready[i]))
            return 1;
    return 0;
}

static nnb_queue *first_of(const nnb_flow *f)
{
    int p = nnb_flow_priority(f);
    return p < NNB_PRIORITIES ? f->first[p] : NULL;
}

static int needs_slot(const nnb_queue *q) { return q->polls && q->think_ns <= SHORT_THINK_NS; }

/* Keeps the neediest of those that wait beside the ones in service. */
static void note_rival(nnb_schedule *s, nnb_flow *f)
{
    int p = nnb_flow_priority(f), than = s->rival ? nnb_flow_priority(s->rival) : NNB_PRIORITIES;
    if ((p < than || (p == than && f->spent < s->rival->spent)) && !first_of(f)->in_service && may_run(s, f))
        s->rival = f;
}

/* One long time among many short ones was an interruption. */
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
    uint64_t thought = now - q->thinks_since;
    if (q->thinks_since && !q->was_woken && (thought <= SHORT_THINK_NS || q->answered_at == s->n_served))
        note_think(q, thought); /* else the leader was busy, and did not look */
    else if (q->thinks_since && q->was_woken && thought <= IDLE_NS)
        note_think(q, q->think_ns - q->think_ns / 8); /* perhaps it did not think: it may try a slot again some time */
    q->thinks_since = 0;
    int goes_first = q->is_over || q->in_service;
    uint32_t p = q->is_over ? 0 : q->priority;
    q->next = goes_first ? f->first[p] : NULL;
    if (!f->first[p])
        f->last[p] = q;
    if (!f->first[p] || goes_first) {
        f->first[p] = q;
    } else {
        f->last[p]->next = q;
        f->last[p] = q;
    }
    if (!f->n_ready++) {
        f->ready_at = s->n_ready;
        s->ready[s->n_ready++] = f;
        if (f->spent + LAG_NS < s->floor_ns) /* it did not save what it left unused */
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
    f->first[nnb_flow_priority(f)] = q->next;
    q->is_ready = 0;
    if (!--f->n_ready) {
        s->ready[f->ready_at] = s->ready[--s->n_ready];
        s->ready[f->ready_at]->ready_at = f->ready_at;
    }
    if (s->rival == f)
        s->rival = NULL;
    if (f->spent > s->floor_ns && !q->is_over) /* a burst that ends has had no service */
        s->floor_ns = f->spent;
    s->n_served++;
    return q;
}

/* ---- who is in service ------------------------------------------------------------------------------------------ */

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
    q->is_asleep = q->is_to_rest = 0;
    s->slots[s->n_slots++] = q;
}

/* Whether the leader waits for a client in service, rather than serve `next` in its place: for its next request, or, if it
 * is too far ahead, for it to fall asleep and leave its processor to the other one. If not, it is in service no more. */
static int is_awaited(nnb_schedule *s, nnb_queue *q, const nnb_queue *next, uint64_t now)
{
    int is_ahead = q->flow->spent > next->flow->spent + LAG_NS;
    if (is_ahead && !q->is_to_rest) {
        q->is_to_rest = 1;
        q->wait_until = now + IDLE_NS;
    }
    if (now < q->wait_until && (is_ahead ? !q->is_asleep : q->is_ready || q->think_ns <= SHORT_THINK_NS))
        return 1;
    if (q->thinks_since && !is_ahead)
        note_think(q, IDLE_NS);
    nnb_schedule_leave(s, q);
    return 0;
}

/* Waiting counts as time of the client that is waited for; not longer than it lasts if the leader is not interrupted. */
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
    end_waiting(s, now);
    note_load(s, load);
    if (!s->rival)
        for (uint32_t i = 0; i < s->n_ready; i++)
            note_rival(s, s->ready[i]);
    const nnb_flow *rival = s->rival;
    nnb_queue *next = rival ? first_of(rival) : NULL, *best = NULL, *awaited = NULL;
    int priority = rival ? nnb_flow_priority(rival) : NNB_PRIORITIES, takes_slot = next && needs_slot(next);
    for (uint32_t i = s->n_slots; i-- > 0;) {
        nnb_queue *q = s->slots[i];
        const nnb_flow *f = q->flow;
        uint64_t bound = (int)q->priority < priority ? UINT64_MAX : rival->spent + (takes_slot ? LAG_NS : 0);
        if ((int)q->priority > priority)
            continue; /* gives way */
        if (q->is_ready && f->spent <= bound && first_of(f) == q && may_run(s, f)) {
            if (!best || q->priority < best->priority || (q->priority == best->priority && f->spent < best->flow->spent))
                best = q;
        } else if (takes_slot && is_awaited(s, q, next, now)) {
            awaited = q;
        }
    }
    if (best)
        return dequeue(s, best);
    if (awaited && s->n_slots == s->most_slots && nnb_load_has_two(load, load->n_detached)) {
        s->awaited = awaited;
        return NULL;
    }
    if (takes_slot)
        enter(s, next);
    return next ? dequeue(s, next) : NULL;
}

void nnb_schedule_answered(nnb_schedule *s, nnb_queue *q, uint64_t now, int was_asleep)
{
    q->thinks_since = now;
    q->answered_at = s->n_served;
    q->was_woken = was_asleep && (q->is_entering || !q->in_service);
    q->wait_until = now + (was_asleep ? WAKE_NS : IDLE_NS);
    q->is_entering = 0;
}
