/* The choice of the next request: the policy of a group's leader, without threads.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * Nothing here touches an atomic, a lock, the clock or the kernel, so that a simulator can run it
 * (tests/c/test_schedule_sim.c). Only the leader uses it, except for the last two fields of a queue.
 */
#ifndef NNB_SCHEDULE_H
#define NNB_SCHEDULE_H

#include "nnburst.h"

#define NNB_MOST_SLOTS 16u
#define NNB_REQUEST_NS 500u /* minimum cost of a request */

typedef struct nnb_flow nnb_flow;
typedef struct nnb_queue nnb_queue;

/* The processor time of one client. */
struct nnb_flow {
    uint64_t spent;             /* ns of its runs, and of waiting for it; raised when it returns from idleness */
    uint64_t credit;            /* ns of later runs that will not count if the runs are interrupted */
    uint32_t n_busy;            /* number of its detached runs */
    uint32_t n_first;           /* at least this number of its queues have had a run */
    uint32_t n_ready, ready_at; /* number of ready queues; index among the ready flows */
    nnb_queue *first[NNB_PRIORITIES], **last[NNB_PRIORITIES]; /* lines of ready queues; place for the next one */
};

/* The requests of one burst. */
struct nnb_queue {
    nnb_flow *flow;
    uint32_t priority;
    int polls;       /* the client polls for answers */
    nnb_queue *next; /* next ready queue in the same line */
    uint32_t line;   /* the line's priority */
    int is_ready;
    int is_over;            /* the burst is known to be over */
    int in_service;         /* the queue has a slot */
    int is_entering;        /* it has had no answer since it got the slot */
    uint64_t wait_until;    /* end of the wait for the client's next request */
    uint64_t thinks_since;  /* when the client began to think; 0: unknown */
    uint64_t answered_at;   /* number of requests served until its last answer */
    int was_woken;          /* the last answer woke the client, as usual without a slot */
    uint64_t think_ns;      /* average time from an answer to the next request */
    nnb_batcher *batcher;   /* the batcher where its requests wait, or NULL */
    uint64_t batch_wait_ns; /* maximum wait there; 0: no wait, not even for joint runs under way */
    int joins;              /* the last request could run together with others, so the next one may */
    uint64_t left_ns;       /* when that request was taken, or answered with others; at first, when it came */
    nnb_queue *next_peer;   /* next queue of the same batcher */
    /* used by the thread that has taken the queue */
    int has_run;
    uint64_t average_ns; /* average time of its runs */
};

/* Runs that are under way in other threads than the leader. */
typedef struct nnb_load {
    uint32_t cpus;
    uint32_t n_detached;             /* all detached runs */
    uint32_t n_runs[NNB_PRIORITIES]; /* runs that are not stuck */
} nnb_load;

typedef struct nnb_schedule {
    nnb_load load;
    nnb_flow **ready;
    uint32_t n_ready, n_batched, room; /* ready flows; queues that have a batcher; room in `ready` */
    nnb_queue *slots[NNB_MOST_SLOTS];  /* the queues that are in service */
    uint32_t n_slots, most_slots;
    nnb_flow *rival;    /* the neediest flow whose next queue is not in service; NULL: not known */
    nnb_queue *awaited; /* queue in service that the leader waits for, while others are ready */
    uint64_t awaited_since, floor_ns, n_served, now_ns;
} nnb_schedule;

/* The cost of runs, before they are charged. */
typedef struct nnb_usage {
    uint64_t took_ns, excess_ns; /* total time; unusual part of it */
    uint64_t first_ns;           /* time of first runs, which neither uses nor earns credit */
} nnb_usage;

void nnb_schedule_init(nnb_schedule *s, uint32_t cpus);
int nnb_schedule_reserve(nnb_schedule *s, uint32_t flows); /* 0 or -ENOMEM */
void nnb_schedule_fini(nnb_schedule *s);

/* Adds a queue that has a request, or whose burst is over. */
void nnb_schedule_enqueue(nnb_schedule *s, nnb_queue *q, uint64_t now);
/* Takes the next queue out. NULL: no ready queue may run, or the leader waits for `awaited`. */
nnb_queue *nnb_schedule_next(nnb_schedule *s, const nnb_load *load, uint64_t now);
/* Notes that the queue's client has its answer. was_asleep: the answer woke the client. */
void nnb_schedule_answered(nnb_schedule *s, nnb_queue *q, uint64_t now, int was_asleep);
void nnb_schedule_leave(nnb_schedule *s, nnb_queue *q); /* gives up the queue's slot, if it has one */
/* Takes out the neediest other queue whose request waits in this batcher. NULL: there is none. */
nnb_queue *nnb_schedule_rider(nnb_schedule *s, const nnb_batcher *batcher);
/* Empties a batcher; adds a queue to it. */
void nnb_batcher_clear(nnb_batcher *b);
void nnb_batcher_add(nnb_batcher *b, nnb_queue *q);
/* Note that requests of a priority now run together, and that these requests have been answered. */
void nnb_batcher_hold(nnb_batcher *b, uint32_t priority, uint64_t now);
void nnb_batcher_free(nnb_batcher *b, uint64_t now);
/* Returns 1 if the next run of a ready flow may begin. */
int nnb_schedule_may_pick(nnb_schedule *s, const nnb_load *load, uint64_t now);
/* Returns how long the leader may sleep before a request's wait for others ends. 0: no request waits. */
uint64_t nnb_schedule_wait_ns(const nnb_schedule *s, uint64_t now);
/* Returns 1 if a request waits for a processor. */
int nnb_schedule_is_held(const nnb_schedule *s, const nnb_load *load);

/* Returns 1 if there is a processor for one more run of a priority. Runs of lower priorities do not count. */
static inline int nnb_load_has_processor(const nnb_load *load, int priority)
{
    uint32_t n = 0;
    for (int p = 0; p <= priority; p++)
        n += load->n_runs[p];
    return n < load->cpus;
}

/* Begins a run. Returns 1 if it counts as one of the client's first runs. */
int nnb_queue_begin(nnb_queue *q);
/* Ends a run. took_ns: its duration; 0: not measured. */
void nnb_queue_measure(nnb_queue *q, uint64_t took_ns, int is_new, int is_first, nnb_usage *sum);
/* Charges usage to a flow. n_ended: detached runs of the flow that are over. */
void nnb_schedule_charge(nnb_schedule *s, nnb_flow *f, nnb_usage *usage, uint32_t n_ended);

#endif
