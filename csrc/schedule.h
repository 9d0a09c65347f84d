/* The choice of the next request: the policy of a group's leader, without threads.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * Nothing here touches an atomic, a lock, the clock or the kernel, so that a simulator can run it
 * (tests/c/test_schedule_sim.c). All of it belongs to the leader, but for the last two fields of a queue.
 */
#ifndef NNB_SCHEDULE_H
#define NNB_SCHEDULE_H

#include "nnburst.h"

#define NNB_MOST_SLOTS 16u
#define NNB_REQUEST_NS 500u /* what a request costs at least */

typedef struct nnb_flow nnb_flow;
typedef struct nnb_queue nnb_queue;

/* What one client gets. */
struct nnb_flow {
    uint64_t spent;   /* ns of all its runs, and of waiting for it; moved up when it comes back from idleness */
    uint64_t credit;  /* ns of its next runs that need not count, should they be interrupted */
    uint32_t n_busy;  /* its runs that are detached */
    uint32_t n_first; /* of its queues have had a run, that many at least */
    uint32_t n_ready, ready_at;                               /* its queues; its place among the ready flows */
    nnb_queue *first[NNB_PRIORITIES], **last[NNB_PRIORITIES]; /* where the next one goes */
};

/* The requests of one burst. */
struct nnb_queue {
    nnb_flow *flow;
    uint32_t priority;
    int polls;       /* its client polls for answers */
    nnb_queue *next; /* ready after it, */
    uint32_t line;   /* in the line of that priority */
    int is_ready;
    int is_over;            /* as far as is known */
    int in_service;         /* it has a slot */
    int is_entering;        /* ... and had no answer since */
    uint64_t wait_until;    /* for the next request of its client */
    uint64_t thinks_since;  /* since when its client thinks; 0: unknown */
    uint64_t answered_at;   /* number of requests served until its last answer */
    int was_woken;          /* its answer woke the client, as usual without a slot */
    uint64_t think_ns;      /* average from an answer to the next request */
    nnb_batcher *batcher;   /* the batcher where its requests wait, or NULL; */
    uint64_t batch_wait_ns; /* and for how long; 0: not at all, nor for those that run */
    int joins;              /* its last one could run together with others, so the next one may */
    uint64_t left_ns;       /* when that was taken, or answered with others; at first, when it came */
    nnb_queue *next_peer;   /* of the same batcher */
    /* of the thread that has taken it */
    int has_run;
    uint64_t average_ns; /* of its runs */
};

/* Runs that are under way beside the leader. */
typedef struct nnb_load {
    uint32_t cpus;
    uint32_t n_detached;             /* all of them */
    uint32_t n_runs[NNB_PRIORITIES]; /* without those that are stuck */
} nnb_load;

typedef struct nnb_schedule {
    nnb_load load;
    nnb_flow **ready;
    uint32_t n_ready, n_batched, room; /* flows; queues that have a batcher */
    nnb_queue *slots[NNB_MOST_SLOTS];  /* the queues that are in service */
    uint32_t n_slots, most_slots;
    nnb_flow *rival;    /* the neediest whose next queue is not in service; NULL: not known */
    nnb_queue *awaited; /* in service, while others are ready */
    uint64_t awaited_since, floor_ns, n_served, now_ns;
} nnb_schedule;

/* The cost of runs, before they are charged. */
typedef struct nnb_usage {
    uint64_t took_ns, excess_ns; /* all; the unusual part of it */
    uint64_t first_ns;           /* of first runs: neither forgiven nor a reason to forgive */
} nnb_usage;

void nnb_schedule_init(nnb_schedule *s, uint32_t cpus);
int nnb_schedule_reserve(nnb_schedule *s, uint32_t flows); /* 0 or -ENOMEM */
void nnb_schedule_fini(nnb_schedule *s);

/* Adds a queue that has a request, or whose burst is over. */
void nnb_schedule_enqueue(nnb_schedule *s, nnb_queue *q, uint64_t now);
/* Takes the next queue out. NULL: the ready ones may not run, or, with `awaited`, the leader waits. */
nnb_queue *nnb_schedule_next(nnb_schedule *s, const nnb_load *load, uint64_t now);
/* Notes that the queue's client has its answer, and if it was asleep. */
void nnb_schedule_answered(nnb_schedule *s, nnb_queue *q, uint64_t now, int was_asleep);
void nnb_schedule_leave(nnb_schedule *s, nnb_queue *q); /* its slot, if it has one */
/* Takes out another queue whose request waits for the same batcher, the neediest. NULL: there is none. */
nnb_queue *nnb_schedule_rider(nnb_schedule *s, const nnb_batcher *batcher);
/* Empties a batcher; adds a queue to it. */
void nnb_batcher_clear(nnb_batcher *b);
void nnb_batcher_add(nnb_batcher *b, nnb_queue *q);
/* Notes that a batcher's requests of that priority run together from now on; that they have been answered. */
void nnb_batcher_hold(nnb_batcher *b, uint32_t priority, uint64_t now);
void nnb_batcher_free(nnb_batcher *b, uint64_t now);
/* 1 if some ready flow's next run may begin. */
int nnb_schedule_may_pick(nnb_schedule *s, const nnb_load *load, uint64_t now);
/* Returns how long the leader may sleep until a request has waited long enough for others. 0: none waits. */
uint64_t nnb_schedule_wait_ns(const nnb_schedule *s, uint64_t now);
/* Returns 1 if a request waits for a processor. */
int nnb_schedule_is_held(const nnb_schedule *s, const nnb_load *load);

/* Returns 1 if there is a processor for one more run of a priority: it does not wait for runs of a lower one. */
static inline int nnb_load_has_processor(const nnb_load *load, int priority)
{
    uint32_t n = 0;
    for (int p = 0; p <= priority; p++)
        n += load->n_runs[p];
    return n < load->cpus;
}

/* Begins a run. Returns 1 if it counts as one of its client's first. */
int nnb_queue_begin(nnb_queue *q);
/* Ends a run; `took_ns` 0: it was not measured. */
void nnb_queue_measure(nnb_queue *q, uint64_t took_ns, int is_new, int is_first, nnb_usage *sum);
/* Charges usage to a flow, of whose detached runs `n_ended` are over. */
void nnb_schedule_charge(nnb_schedule *s, nnb_flow *f, nnb_usage *usage, uint32_t n_ended);

#endif
