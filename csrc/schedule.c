/* Who is served next: see schedule.h.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * Turns. A client that polls for its answer takes it in a microsecond; one that sleeps has to be woken and to find a
 * processor. So while clients that wait are asleep, as many as there are processors beside the leader's have a turn: those
 * are answered first, and waited for a little between two requests, until they have had a turn's time, or have got ahead
 * of another one that is ready, or have gone to sleep. Then one that sleeps is answered, and has the next turn. Without
 * turns all clients are awake for each of their requests, and push each other and the leader off the processors.
 * Waiting counts as time of the client that is waited for. One that does not use its turn, because it has no next request
 * at once, is answered without one, and seldom given another one to show that it has changed: it costs the others nothing.
 * A turn is of a queue that the leader has: it ends when a run is detached, or the burst is over.
 */
#include <errno.h>
#include <stdlib.h>

#include "schedule.h"

#define CREDIT_NS 1000000u /* what a client that was idle may be ahead of the others */
#define LEAD_NS 1000000u   /* how far a client may get ahead in its turn */
#define TURN_NS 2000000u
#define THINK_NS 10000u  /* how long the leader waits in a client's turn for its next request */
#define BREAK_NS 50000u  /* ... of one that has made use of its turn: perhaps it was interrupted */
#define WAKE_NS 400000u  /* ... for the first one after it was woken */
#define LEAVE_NS 100000u /* how long one whose turn is over is given to fall asleep */
#define MOST_SLEEPS 16u  /* in a row, in one turn */
#define MADE_USE 2u      /* of its turn: so many requests at once */
#define EXCESS_NS 50000u /* what a run may take beyond four times the usual */
#define CREDIT_PART 16u  /* of what has counted is credit for runs that take longer */
#define MOST_CREDIT_NS 20000000u
#define REVIEW_NS 50000u /* so often all that are ready are compared, while a turn goes on */
/* What the first run of a burst counts at most, for a client's first bursts. It waits for the client's memory, and may load
 * what all need: while many programs start, one that had to pay for that would not run for seconds. */
#define MOST_FIRST_NS 2000000u
#define MOST_FIRST 16u
#define MOST_TURNLESS 255u /* requests without a turn, after some turns that were not used */

void nnb_schedule_init(nnb_schedule *s, uint32_t cpus)
{
    s->load.cpus = cpus ? cpus : 1;
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

/* A run that takes much longer than usual was perhaps interrupted: the excess does not count, as far as its client has
 * credit from runs that have counted. */
void nnb_flow_charge(nnb_flow *f, const nnb_usage *usage)
{
    uint64_t forgiven = usage->excess_ns < f->credit ? usage->excess_ns : f->credit;
    uint64_t counts = usage->took_ns - forgiven, credit = f->credit - forgiven + counts / CREDIT_PART;
    f->credit = credit < MOST_CREDIT_NS ? credit : MOST_CREDIT_NS;
    f->spent += counts + usage->first_ns;
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
int nnb_schedule_may_run(const nnb_schedule *s, const nnb_flow *f)
{
    uint32_t most = s->load.cpus > 2 ? s->load.cpus : 2;
    return nnb_load_has_processor(&s->load, nnb_flow_priority(f)) &&
           (f->n_busy < most || (f->first[0] && f->first[0]->is_over));
}

int nnb_schedule_may_pick(const nnb_schedule *s)
{
    for (uint32_t i = 0; i < s->n_ready; i++)
        if (nnb_schedule_may_run(s, s->ready[i]))
            return 1;
    return 0;
}

static int needs_turn(const nnb_queue *q) { return q->polls && !q->turnless && !q->turn_until; }

static void note_rival(nnb_schedule *s, const nnb_flow *f)
{
    int p = nnb_flow_priority(f);
    if (p > s->rival_priority || (p == s->rival_priority && f->spent >= s->rival_spent) || !nnb_schedule_may_run(s, f))
        return;
    s->rival_priority = p;
    s->rival_spent = f->spent;
    s->rival_needs_turn = needs_turn(f->first[p]);
}

void nnb_schedule_enqueue(nnb_schedule *s, nnb_queue *q, uint64_t now)
{
    nnb_flow *f = q->flow;
    if (q->is_ready)
        return;
    q->is_ready = 1;
    int goes_first = q->is_over || q->turn_until > now;
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
        if (f->spent + CREDIT_NS < s->floor_ns) /* it did not save what it left unused */
            f->spent = s->floor_ns - CREDIT_NS;
    }
    if (!f->n_slots)
        note_rival(s, f);
    else if (!q->turn_until)
        s->reviewed_ns = 0;
}

/* ---- who is in service ------------------------------------------------------------------------------------------ */

void nnb_schedule_leave(nnb_schedule *s, nnb_queue *q)
{
    if (!q->turn_until)
        return;
    q->turn_until = q->awaited_until = 0;
    q->flow->n_slots--;
    s->reviewed_ns = 0;
    if (s->awaited == q)
        s->awaited = NULL;
    uint32_t i = 0;
    while (s->slots[i] != q)
        i++;
    s->slots[i] = s->slots[--s->n_slots];
}

/* It had no next request at once in its turn: the next ones are answered without one, twice as many each time. If it did
 * have some, it was perhaps interrupted. */
static void lose_turn(nnb_schedule *s, nnb_queue *q)
{
    nnb_schedule_leave(s, q);
    if (q->awake_in_turn >= MADE_USE)
        q->turnless_next = 0;
    q->turnless = q->turnless_next;
    if (q->turnless_next < MOST_TURNLESS)
        q->turnless_next = 2 * q->turnless_next + 1;
}

/* Whom the leader waits for, rather than give a turn to a client of `priority` that has had `spent`: one whose turn it is,
 * for its next request, or one whose turn is over, until it falls asleep and leaves its processor to the other. */
static nnb_queue *whom_to_await(nnb_schedule *s, uint64_t now, uint32_t priority, uint64_t spent)
{
    nnb_queue *awaited = NULL;
    for (uint32_t i = s->n_slots; i-- > 0;) {
        nnb_queue *q = s->slots[i];
        if (now < q->turn_until && q->flow->spent > spent + LEAD_NS)
            q->turn_until = now;
        int has_ended = now >= q->turn_until;
        q->is_to_rest |= has_ended;
        if (has_ended && (q->is_asleep || now - q->turn_until >= LEAVE_NS)) {
            q->turnless_next = 0;
            nnb_schedule_leave(s, q);
        } else if (!has_ended && !q->is_ready && now >= q->awaited_until) {
            lose_turn(s, q);
        } else if ((has_ended || !q->is_ready) && q->priority <= priority) { /* if ready, it is behind another one */
            awaited = q;
        }
    }
    return s->n_slots == s->most_slots ? awaited : NULL;
}

/* Waiting counts as time of the client that is waited for; not longer than it lasts if the leader is not interrupted. */
static void end_waiting(nnb_schedule *s, uint64_t now)
{
    uint64_t waited = now - s->awaited_since;
    if (s->awaited)
        s->awaited->flow->spent += waited < WAKE_NS ? waited : WAKE_NS;
    s->awaited = NULL;
    s->awaited_since = now;
}

static void begin_turn(nnb_schedule *s, nnb_queue *q, uint64_t now)
{
    if (q->turn_until) {
        if (now >= q->turn_until) { /* it is the neediest all the same */
            q->turn_until = now + TURN_NS;
            q->turnless_next = 0;
        }
        return;
    }
    if (!q->polls)
        return;
    if (q->turnless) {
        q->turnless--;
        return;
    }
    for (uint32_t i = 0; i < s->n_slots && s->n_slots == s->most_slots; i++)
        if (s->slots[i]->priority > q->priority)
            nnb_schedule_leave(s, s->slots[i]);
    if (s->n_slots == s->most_slots)
        return;
    q->turn_until = q->awaited_until = now + TURN_NS;
    q->sleeps_in_turn = q->awake_in_turn = 0;
    q->is_asleep = 0;
    q->flow->n_slots++;
    s->reviewed_ns = 0;
    s->slots[s->n_slots++] = q;
}

/* Whose turn goes on as far as is known, without a look at all that are ready: one of them that is ready, or else, with
 * `s->awaited`, one to wait for. */
static nnb_queue *go_on(nnb_schedule *s, uint64_t now)
{
    if (!s->n_slots || now - s->reviewed_ns >= REVIEW_NS)
        return NULL;
    nnb_queue *best = NULL, *awaited = NULL;
    uint64_t least = 0;
    for (uint32_t i = 0; i < s->n_slots; i++) {
        nnb_queue *q = s->slots[i];
        const nnb_flow *f = q->flow;
        int p = nnb_flow_priority(f), r = (int)q->priority;
        if (now >= q->turn_until || p < r || r > s->rival_priority ||
            (r == s->rival_priority && f->spent > s->rival_spent + LEAD_NS))
            return NULL;
        if (q->is_ready) {
            if (f->first[p] != q || !nnb_schedule_may_run(s, f))
                return NULL;
            if (!best || f->spent < least)
                best = q, least = f->spent;
        } else {
            if (now >= q->awaited_until || (p == r && !needs_turn(f->first[p])))
                return NULL;
            awaited = q;
        }
    }
    if (!best && s->n_slots == s->most_slots && nnb_load_has_two(&s->load, s->load.n_detached) &&
        (s->rival_needs_turn || s->rival_priority == NNB_PRIORITIES))
        s->awaited = awaited;
    return best;
}

/* The neediest: the highest priority, then the client that had least, or one whose turn it is. NULL: those that are ready
 * may not run, or, with `s->awaited`, the leader waits. */
static nnb_queue *review(nnb_schedule *s, uint64_t now)
{
    nnb_flow *best = NULL, *held = NULL;
    int priority = NNB_PRIORITIES;
    uint64_t least = 0, least_held = 0;
    s->rival_priority = NNB_PRIORITIES;
    s->rival_spent = 0;
    s->reviewed_ns = now;
    for (uint32_t i = 0; i < s->n_ready; i++) {
        nnb_flow *f = s->ready[i];
        int p = nnb_flow_priority(f);
        if (!f->n_slots)
            note_rival(s, f);
        if (p > priority || !nnb_schedule_may_run(s, f))
            continue;
        if (p < priority || f->spent < least)
            best = f, least = f->spent;
        if (p < priority)
            held = NULL;
        priority = p;
        if (f->first[p]->turn_until > now && (!held || f->spent < least_held))
            held = f, least_held = f->spent;
    }
    if (!best)
        return NULL;
    if (held && held != best && least_held <= least + LEAD_NS)
        best = held;
    nnb_queue *q = best->first[priority];
    if (needs_turn(q) && s->n_slots && nnb_load_has_two(&s->load, s->load.n_detached))
        s->awaited = whom_to_await(s, now, q->priority, least);
    return s->awaited ? NULL : q;
}

nnb_queue *nnb_schedule_next(nnb_schedule *s, uint64_t now)
{
    end_waiting(s, now);
    nnb_queue *q = go_on(s, now);
    if (!q && !s->awaited)
        q = review(s, now);
    if (!q)
        return NULL;
    nnb_flow *f = q->flow;
    f->first[nnb_flow_priority(f)] = q->next;
    q->is_ready = 0;
    if (!--f->n_ready) {
        s->ready[f->ready_at] = s->ready[--s->n_ready];
        s->ready[f->ready_at]->ready_at = f->ready_at;
    }
    if (f->spent > s->floor_ns && !q->is_over) /* a burst that ends was no client's turn */
        s->floor_ns = f->spent;
    begin_turn(s, q, now);
    return q;
}

void nnb_schedule_answered(nnb_schedule *s, nnb_queue *q, uint64_t now, int was_asleep)
{
    if (!q->turn_until)
        return;
    q->awaited_until = now + (was_asleep ? WAKE_NS : q->awake_in_turn < MADE_USE ? THINK_NS : BREAK_NS);
    if (!was_asleep)
        q->sleeps_in_turn = 0, q->awake_in_turn++;
    else if (q->sleeps_in_turn++ >= MOST_SLEEPS)
        lose_turn(s, q);
}
