/* The state of a group: several threads serve the bursts of many clients. docs/internals/scheduler.md explains it.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * Private to group*.c. "Leader only" fields pass from thread to thread with the word `lead`, or under `lock`.
 *
 *   SYNC POINT hand_over <-> take_over   (lead)
 *     The leader stores BUSY with release; the worker that takes over swaps it with acquire, and so sees what the
 *     last leader did. All other changes, from and to FREE and to another worker, are made under `lock`.
 *   SYNC POINT give_back <-> take_up   (burst.taken)
 *     A worker stores 0 with release when it is done with a burst; the leader loads it with acquire before it looks.
 *   SYNC POINT arm <-> rest   (a Dekker pair)
 *     The leader stores BUSY; fence; loads `ticking`. The monitor clears `ticking`; fence; loads `lead`. At least one
 *     of them sees the other: a run is never without a monitor.
 *   SYNC POINT publish <-> sleep
 *     As in a channel, for all queues at once: clear the bits; one fence; look at each W.
 */
#ifndef NNB_GROUP_H
#define NNB_GROUP_H

#include "nnb_server.h"
#include "schedule.h"

#define NNB_GROUP_MAGIC 0x6e6e6267u
#define NNB_LOOKS_PER_CLOCK 32u /* looks at queues between two looks at the clock */
#define NNB_TICK_NS 1000000u    /* period of the monitor */
#define NNB_WAITV_WORDS 127u    /* words that the kernel waits for at a time, beside a bell */

enum { NNB_LEAD_FREE, NNB_LEAD_LOOKING, NNB_LEAD_BUSY };
#define NNB_LEAD_STATE(x) ((x) & 3u)

#define NNB_STUCK (1ull << 63) /* in `runs`: the run counts as stuck. Set under lock, while it is under way */

typedef struct nnb_sleeper_thread nnb_sleeper_thread;

typedef struct nnb_member {
    nnb_flow flow; /* first: a pointer to it is a pointer to the member */
    uint64_t number;
    /* under lock */
    uint32_t n_users; /* number of bursts, plus one until the client leaves */
    uint32_t n_ended; /* detached runs that are over and not charged yet */
    nnb_usage usage;  /* usage of these runs */
    struct nnb_member *next;
} nnb_member;

typedef struct nnb_burst {
    nnb_queue queue; /* first: a pointer to it is a pointer to the burst */
    nnb_server *server;
    nnb_channel *inbox;
    uint32_t number;
    nnb_a32 taken; /* a worker has the burst, and only it may use the server */
    int is_away;   /* a sleeper thread has the burst; under lock */
    /* leader only */
    int is_hot;
    uint64_t used_ns;
    uint32_t expected; /* the event word when the leader began to sleep on it */
    uint32_t futile;   /* wakes in a row that brought no packet */
    uint64_t share_ns; /* share of a joint run's time, set by the worker; 0: none */
    struct nnb_burst *next_dead;
} nnb_burst;

/* A thread that sleeps on queues of bursts, at most as many as the kernel waits for. */
struct nnb_sleeper_thread {
    nnb_group *group;
    pthread_t thread;
    nnb_a32 bell;
    /* under lock */
    uint32_t n;
    nnb_burst *bursts[NNB_WAITV_WORDS];
    nnb_sleeper_thread *next;
};

/* A burst that a worker has taken after another one, to run both requests together. Answered after the other. */
typedef struct nnb_rider {
    nnb_burst *burst;
    int id;       /* what nnb_server_try returned */
    int is_first; /* as in a worker */
} nnb_rider;

enum nnb_role { NNB_NO_ROLE, NNB_LEADS, NNB_INLINE, NNB_DETACHED };

struct nnb_worker {
    nnb_group *group;
    uint32_t number;
    enum nnb_role role;  /* under lock while the worker is parked */
    nnb_burst *burst;    /* burst of the request at hand */
    int is_new;          /* the request at hand has to be bound first */
    int ended;           /* the error that ended the burst, 0: none */
    int is_first;        /* the run is one of its client's first */
    uint64_t started_ns; /* 0: not measured */
    nnb_usage usage;     /* usage of runs that are over, of bursts not given back */
    nnb_a64 runs;        /* number of runs begun; | STUCK: the last one is stuck */
    uint32_t n_together; /* requests taken at once, the last time */
    uint32_t n_riders;   /* riders that are left */
    nnb_rider riders[NNB_MOST_BATCHED];
    /* under lock */
    int is_fresh, is_detached;
    uint64_t seen_runs, seen_ns;
    nnb_worker *next_parked, *next;
    nnb_a32 bell;
    /* monitor */
    uint64_t seen_lead;
    int idle_ticks;
};

struct nnb_group {
    uint32_t magic;
    uint32_t cpus;
    uint32_t words; /* words that the kernel waits for at a time, without the bell */

    _Alignas(NNB_CACHE_LINE) nnb_a64 lead;
    nnb_a32 ticking; /* a monitor is at work */

    _Alignas(NNB_CACHE_LINE) nnb_a32 changed; /* the leader must look at `bursts` again */
    nnb_a32 is_owed;                          /* the leader must charge members */
    nnb_a32 bell, n_live, n_parked, n_detached, n_stuck, closing;
    nnb_a32 n_bursts[NNB_PRIORITIES]; /* changed under lock */
    nnb_a32 n_runs[NNB_PRIORITIES];   /* runs that are detached and not stuck; changed under lock */

    pthread_mutex_t lock;
    /* under lock */
    nnb_burst **bursts;
    uint32_t room;
    nnb_member *members;
    nnb_burst *dead; /* ended bursts that the leader may still refer to */
    nnb_worker *workers, *parked, *monitor;
    uint32_t n_workers, next_worker;
    nnb_batcher *freed; /* batchers that workers have left for the leader */
    uint64_t asked_ns;  /* when a missing worker was requested; 0: none was */
    nnb_sleeper_thread *sleepers;

    /* leader only */
    nnb_schedule schedule;
    nnb_burst **mine, **hot;
    uint32_t n_mine, n_hot, mine_room;
    uint64_t now_ns, idle_since;
    uint32_t picks_hot, picks_all, rounds;
    int is_slow;
    uint64_t slept_ns; /* start of a sleeping leader's idle time; 0: it has not slept */
    uint32_t doubts;   /* waits in a row that were longer than the window: each halves polling */
};

static inline nnb_member *nnb_member_of(const nnb_burst *b) { return (nnb_member *)b->queue.flow; }
static inline void nnb_ring(nnb_a32 *bell) { nnb_event_wake((uint32_t *)(void *)bell, 1); }
static inline void nnb_count_up(nnb_a32 *n) { nnb_store32_relaxed(n, nnb_load32_relaxed(n) + 1); } /* under lock */
static inline void nnb_count_down(nnb_a32 *n) { nnb_store32_relaxed(n, nnb_load32_relaxed(n) - 1); }

/* group.c, under lock. */
void nnb_group_bury(nnb_group *g, nnb_burst *b); /* the burst is over */
void nnb_worker_retire(nnb_worker *w);           /* the worker leaves the group */

/* group_lead.c. */
void nnb_group_load(const nnb_group *g, nnb_load *load);
int nnb_group_is_saturated(const nnb_group *g); /* 1 if no burst's priority lets a run begin */
uint64_t nnb_lead_word(const nnb_worker *w, uint32_t state);
void nnb_group_arm(nnb_group *g);                        /* under lock: lets a parked worker monitor, if needed */
int nnb_group_wants_worker(nnb_group *g);                /* under lock: -EUSERS, once, if workers are missing */
void nnb_group_count_stuck(nnb_group *g, uint64_t now);  /* under lock: stops counting runs that last two ticks */
void nnb_group_settle(nnb_group *g);                     /* by the leader: charges runs that workers have given back */
void nnb_lead_hand_on(nnb_group *g);                     /* under lock: lets another worker lead */
void nnb_lead_free(nnb_worker *w, nnb_batcher *batcher); /* the worker has ended its joint run */
void nnb_lead_release(nnb_worker *w);                    /* under lock: nobody leads */
void nnb_lead_detach(nnb_worker *w);                     /* continues with its burst, and lets another worker lead */
void nnb_lead_busy(nnb_worker *w, int has_others); /* runs a request inline; monitored if there are other bursts */
int nnb_lead_resume(nnb_worker *w);                /* after a run: 1 if its worker leads */
void nnb_worker_give_back(nnb_worker *w);          /* after a detached run: its worker leads if nobody does */
int nnb_worker_park(nnb_worker *w); /* 0: the worker leads; -EPIPE: closed; -ESHUTDOWN: there are enough others */

/* group_look.c. The first function is a hint. */
static inline int nnb_burst_is_over(const nnb_burst *b) { return nnb_load32_relaxed(&b->inbox->hung_up) != 0; }
int nnb_burst_is_free(const nnb_burst *b);
int nnb_burst_has_news(nnb_burst *b);
void nnb_group_enqueue(nnb_group *g, nnb_burst *b);
void nnb_look_heat(nnb_group *g, nnb_burst *b); /* the burst's queue was used */
void nnb_look_refresh(nnb_group *g);            /* bursts have come, gone, or been handed back by a sleeper thread */
int nnb_look_at_slots(nnb_group *g);
void nnb_look_around(nnb_group *g);
void nnb_look_at_all(nnb_group *g);
uint64_t nnb_look_window(const nnb_group *g);          /* how long the leader polls before it sleeps; 0: not at all */
void nnb_look_found(nnb_group *g, const nnb_burst *b); /* a request was found, by polling or after a sleep */
void nnb_look_idle(nnb_group *g);                      /* nothing was found: continues polling, or sleeps */

/* group_sleep.c. */
uint32_t nnb_sleep_words(uint32_t most);           /* words that the kernel waits for at a time */
void nnb_sleep_on_all(nnb_group *g);               /* the leader sleeps until any queue has news or the bell rings */
int nnb_sleep_on_bell(nnb_a32 *bell, uint64_t ns); /* 1: no ring for `ns`; 0 ns: no limit */

/* slices.c: lets the calling thread run soon after a wake, but in short slices (Linux 6.12). */
void nnb_ask_for_short_slices(void);

#endif
