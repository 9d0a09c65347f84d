/* Several threads serve the bursts of many clients: who looks for requests, who runs which, who sleeps.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * Each burst has a seat, each thread is a worker. At any time one worker at most *leads*: it looks at the queues of all
 * seats that no other worker has taken, polls for a while, then sleeps on all of them. It picks the request of the
 * highest priority, and among those the client whose runs have taken the least time so far.
 *
 *   inline     A run that will be short, by its seat's history, is run by the leader, who stays leader ("busy"). No other
 *              worker is disturbed. A parked worker is the watchman: while there are other bursts it wakes every
 *              millisecond, and takes the lead from a leader who is busy with one run all that time. It stops after
 *              some ticks without a run, so an idle service sets no timer.
 *   detached   Before a run that will be long, or whose request has to be bound first, the leader hands the lead to a
 *              parked worker. After it, if the new leader is asleep, the worker stays with its seat and polls that
 *              alone: so a client that runs long models by itself is served as by a thread of its own.
 *   saturated  As many runs are under way as there are processors, and another request waits. Nobody leads; the worker
 *              that ends first takes the lead and picks. The watchman counts runs that last too long as stuck, and
 *              starts others beside them; then one more worker is asked for (-EUSERS). A client may have a few
 *              runs under way, so that its own that hang take no more. Its other requests wait for one of those.
 *   held       The same, but a burst of a higher priority is open, whose runs do not wait for those: there is a leader,
 *              who sleeps until that burst has a request, or a run ends, and wakes every millisecond to count the stuck.
 *
 * A run of a higher priority shares the processors with those that it did not wait for, as the kernel divides them. So that
 * it does so at once, workers ask for short slices: then whoever is woken, be it a worker or a client, comes before a run
 * that has had its slice. That holds for who is woken, not for a client that polls and has lost its processor. So while
 * runs have the processors clients are told not to poll.
 *
 * Turns. A client that polls for its answer takes it in a microsecond; one that sleeps has to be woken and to find a
 * processor. So while clients that wait are asleep, as many as there are processors beside the leader's have a turn: those
 * are answered first, and waited for a little between two requests, until they have had a turn's time, or have got ahead
 * of another one that is ready, or have gone to sleep. Then one that sleeps is answered, and has the next turn. Without
 * turns all clients are awake for each of their requests, and push each other and the leader off the processors.
 * Waiting counts as time of the client that is waited for. One that does not use its turn, because it has no next request
 * at once, is answered without one, and seldom given another one to show that it has changed: it costs the others nothing.
 * A turn is of a seat that the leader has: it ends when a run is detached, or the burst is over.
 *
 * The word `lead` says who leads: FREE, LOOKING, or BUSY with which run of which worker. What is "the leader's" below is
 * touched by the leader alone; `lead` itself, or `lock`, hands it on.
 *
 *   SYNC POINT hand_over <-> take_over   (lead)
 *     The leader stores BUSY with release; who takes the lead from it swaps it with acquire, and so sees what the last
 *     leader did. All other changes, from and to FREE and to another worker, are made under `lock`.
 *   SYNC POINT give_back <-> take_up   (seat.taken)
 *     A worker stores 0 with release when it is done with a seat; the leader loads it with acquire before it looks.
 *   SYNC POINT arm <-> rest   (a Dekker pair)
 *     The leader stores BUSY; fence; loads `ticking`. The watchman clears `ticking`; fence; loads `lead`. At least one of
 *     them sees the other: a run is never without a watchman.
 *   SYNC POINT publish <-> sleep
 *     As in a channel, for all queues at once: clear the bits; one fence; look at each W.
 *
 * The kernel waits for 128 words at a time (futex_waitv). What is beyond that, and has not been used for long, is left to
 * threads that do nothing but sleep on such queues, 127 each, and hand a seat back with its first packet. A kernel
 * without futex_waitv is used the same way, with one queue for each of those threads.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "nnb_server.h"

#ifndef SYS_futex_waitv
#define SYS_futex_waitv 449
#endif

#define MAGIC 0x6e6e6267u
#define SPINS 128u
#define CLOCK_EVERY 32u        /* rounds between two looks at the clock */
#define LONG_NS 100000u        /* a run that is expected to last longer is detached */
#define SLOW_NS 20000u         /* after such a run every queue is looked at */
#define WAIT_ROUNDS 8u         /* the same while it waits in a client's turn */
#define TICK_NS 1000000u       /* of the watchman */
#define IDLE_TICKS 8           /* so many without a run, and it rests */
#define STUCK_NS 2000000u      /* a run is not stuck before */
#define GROW_NS 1000000000u    /* a worker that was asked for and has not come by then is asked for again */
#define COLD_NS 2000000u       /* a queue without packets for so long is looked at now and then only */
#define MEASURE_EVERY 16u      /* runs, while one client is served and no share has to be fair */
#define FEW 16u                /* active queues are looked at before each pick if they are so few */
#define PICKS_BEFORE_HOT 8u    /* ... else after so many */
#define PICKS_BEFORE_ALL 32u   /* and all others after so many */
#define CREDIT_NS 1000000u     /* what a client that was idle may be ahead of the others */
#define LEAD_NS 1000000u       /* how far a client may get ahead in its turn */
#define TURN_NS 2000000u
#define THINK_NS 10000u        /* how long the leader waits in a client's turn for its next request */
#define BREAK_NS 50000u        /* ... of one that has made use of its turn: perhaps it was interrupted */
#define WAKE_NS 400000u        /* ... for the first one after it was woken */
#define LEAVE_NS 100000u       /* how long one whose turn is over is given to fall asleep */
#define MOST_SLEEPS 16u        /* in a row, in one turn */
#define MADE_USE 2u            /* of its turn: so many requests at once */
#define MOST_TURNS 16u
#define EXCESS_NS 50000u       /* what a run may take beyond four times the usual */
#define CREDIT_PART 16u        /* of what has counted is credit for runs that take longer */
#define MOST_CREDIT_NS 20000000u
#define REVIEW_NS 50000u       /* so often the leader compares all that are ready, while a turn goes on */
/* What the first run of a burst counts at most, for a client's first bursts. It waits for the client's memory, and may load
 * what all need: while many programs start, one that had to pay for that would not run for seconds. */
#define MOST_FIRST_NS 2000000u
#define MOST_FIRST 16u
#define FLOOR_NS 500u          /* what a request costs at least */
#define FUTILE_WAKES 1024u     /* a client that wakes us so often without a packet is not served any more */
#define WORDS 127u             /* and a bell */
#define KEEP_WORDS 64u         /* queues that the leader keeps when it has to leave some to watchers */
#define MOST_WORKERS 1024u
#define SPARE 4u               /* parked workers that stay for ever */
#define KEEP_NS 10000000000u   /* ... and others when they have not been needed for so long */
#define MOST_TURNLESS 255u     /* requests without a turn, after some turns that were not used */
#define SLEEPING_BITS (NNB_EVENT_NOT_EMPTY | NNB_EVENT_HANG_UP)

#define FREE 0u
#define LOOKING 1u
#define BUSY 2u
#define STATE(x) ((x) & 3u)

#define STUCK (1ull << 63) /* in `runs`: the run counts as stuck. Set under lock, and only while the run is under way */

typedef struct seat seat;
typedef struct watcher watcher;

/* What one client has in the group. */
typedef struct share {
    uint64_t client;
    nnb_a64 spent; /* ns of all its runs, moved up when it comes back from idleness */
    nnb_a64 credit; /* ns of its next runs that need not count, should they be interrupted */
    nnb_a32 busy;  /* its runs that are detached; changed under lock */
    nnb_a32 n_first; /* of its bursts have had a run, that many at least */
    uint32_t users; /* seats, and the client itself until it leaves; under lock */
    struct share *next;
    /* leader only */
    uint32_t n_ready, ready_at; /* its seats; its place among the ready shares */
    uint32_t n_turns;           /* of its seats */
    seat *first[NNB_PRIORITIES], *last[NNB_PRIORITIES];
} share;

struct seat {
    nnb_server *server;
    nnb_channel *inbox;
    share *share;
    uint32_t number, priority;
    uint64_t window_ns;
    nnb_a32 taken; /* a worker has it, and nobody else may touch the server */
    nnb_a32 away;  /* a watcher has it, likewise */
    /* leader only */
    seat *next;   /* ready after it */
    int is_ready, is_hot;
    uint64_t used_ns;
    uint64_t turn_until, awaited_until; /* 0: it is not its turn */
    uint32_t sleeps_in_turn, awake_in_turn; /* answers while it slept, in a row; others */
    int is_to_rest;                  /* its client was told that its turn is over */
    uint32_t turnless, turnless_next; /* requests that have no turn: still; when it has lost its next turn */
    uint32_t expected; /* the event word as it was when we slept on it */
    uint32_t futile;
    /* who has it */
    int has_run;
    uint64_t average_ns; /* of its runs */
};

enum role { NONE, LEADS, INLINE, DETACHED, ATTACHED };

struct nnb_worker {
    nnb_group *group;
    uint32_t number;
    enum role role; /* under lock while it is parked */
    seat *seat;     /* of the request at hand, or the one that it polls (ATTACHED) */
    int has_turn;   /* it is the seat's turn */
    int is_new;     /* the request at hand has to be bound first */
    int ended;      /* what ended the seat's burst, 0: it goes on */
    int is_first;   /* of the seat's */
    uint64_t started_ns; /* 0: not measured */
    uint64_t poll_until;
    nnb_a64 runs; /* those that have begun, in steps of 2; odd: one is under way, or none was watched since; | STUCK */
    uint64_t busy_word;
    /* under lock */
    int is_fresh, is_detached;
    uint64_t seen_runs, seen_ns;
    nnb_worker *next_parked, *next;
    nnb_a32 bell;
    /* watchman */
    uint64_t seen_lead;
    int idle_ticks;
};

struct watcher {
    nnb_group *group;
    pthread_t thread;
    pthread_mutex_t lock;
    uint32_t n;
    int closing;
    nnb_a32 bell;
    watcher *next;
    seat *seats[WORDS];
};

struct nnb_group {
    uint32_t magic;
    uint32_t cpus;
    uint32_t words; /* that the kernel waits for at a time, without the bell */

    _Alignas(NNB_CACHE_LINE) nnb_a64 lead;
    nnb_a32 ticking; /* there is a watchman */

    _Alignas(NNB_CACHE_LINE) nnb_a32 changed; /* the leader must look at `seats` again */
    nnb_a32 bell, asleep, waiting, n_live, n_parked, n_detached, n_stuck, closing;
    nnb_a32 n_seats[NNB_PRIORITIES]; /* changed under lock */
    nnb_a32 n_runs[NNB_PRIORITIES];  /* that are detached and not stuck; likewise */

    pthread_mutex_t lock;
    /* under lock */
    seat **seats;
    uint32_t room;
    share *shares;
    seat *dead; /* the leader may still know them */
    nnb_worker *workers, *parked, *watchman;
    uint32_t n_workers, next_worker;
    uint64_t asked_ns; /* when the worker was asked for that has not come yet; 0: none is due */
    watcher *watchers;

    /* leader only */
    seat **mine, **hot;
    share **ready;
    uint32_t n_mine, n_hot, n_ready, mine_room;
    seat *turns[MOST_TURNS];
    uint32_t n_turns, most_turns;
    seat *awaited; /* one of them, while others are ready */
    /* The next in order of the ready ones that are of no client whose turn it is, as `pick` has found them last. */
    int rival_priority, rival_needs_turn;
    uint64_t rival_spent, reviewed_ns; /* 0: it has to look again */
    uint64_t awaited_since, now_ns, idle_since, floor_ns;
    uint32_t picks_hot, picks_all, rounds;
    int is_slow;
    int has_slept;
    uint32_t fruitless; /* as in a channel */
};

static uint64_t word_of(const nnb_worker *w, uint32_t state)
{
    return nnb_load_relaxed(&w->runs) << 16 | (uint64_t)w->number << 2 | state;
}

static void ring(nnb_a32 *bell) { nnb_event_wake((uint32_t *)(void *)bell, 1); }

static void count_up(nnb_a32 *n) { nnb_store32_relaxed(n, nnb_load32_relaxed(n) + 1); } /* under lock */
static void count_down(nnb_a32 *n) { nnb_store32_relaxed(n, nnb_load32_relaxed(n) - 1); }

/* ---- life ------------------------------------------------------------------------------------------------------ */

static int has_waitv(void)
{
    return syscall(SYS_futex_waitv, NULL, 0, 0, NULL, 0) < 0 && errno == EINVAL;
}

int nnb_group_create(nnb_group **out, uint32_t cpus, uint32_t most_words)
{
    nnb_group *g = mmap(NULL, sizeof(*g), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (g == MAP_FAILED)
        return -ENOMEM;
    if (madvise(g, sizeof(*g), MADV_WIPEONFORK) < 0) {
        munmap(g, sizeof(*g));
        return -errno;
    }
    pthread_mutex_init(&g->lock, NULL);
    g->cpus = cpus ? cpus : 1;
    g->most_turns = g->cpus < 2 ? 1 : g->cpus - 1 < MOST_TURNS ? g->cpus - 1 : MOST_TURNS;
    g->words = !has_waitv() ? 0 : most_words < WORDS ? most_words : WORDS;
    g->magic = MAGIC;
    *out = g;
    return 0;
}

void nnb_group_stir(nnb_group *g)
{
    if (g->magic != MAGIC)
        return;
    pthread_mutex_lock(&g->lock);
    watcher *first = g->watchers;
    pthread_mutex_unlock(&g->lock);
    for (watcher *x = first; x; x = x->next) { /* watchers live as long as the group */
        ring(&x->bell);
        pthread_mutex_lock(&x->lock);
        for (uint32_t i = 0; i < x->n && !g->words; i++) /* sleeps on that word alone, whose bits the client may set */
            syscall(SYS_futex, x->seats[i]->inbox->mq->event, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
        pthread_mutex_unlock(&x->lock);
    }
    nnb_store32_relaxed(&g->changed, 1);
    ring(&g->bell);
}

void nnb_group_close(nnb_group *g)
{
    if (g->magic != MAGIC)
        return;
    nnb_store32_relaxed(&g->closing, 1);
    pthread_mutex_lock(&g->lock);
    for (nnb_worker *w = g->parked; w; w = w->next_parked)
        ring(&w->bell);
    pthread_mutex_unlock(&g->lock);
    nnb_group_stir(g);
}

void nnb_group_destroy(nnb_group *g)
{
    if (!g || g->magic != MAGIC)
        return;
    while (g->watchers) {
        watcher *x = g->watchers;
        g->watchers = x->next;
        pthread_mutex_lock(&x->lock);
        x->closing = 1;
        pthread_mutex_unlock(&x->lock);
        ring(&x->bell);
        pthread_join(x->thread, NULL);
        pthread_mutex_destroy(&x->lock);
        free(x);
    }
    for (uint32_t i = 0; i < g->room; i++)
        free(g->seats[i]);
    while (g->dead) {
        seat *m = g->dead;
        g->dead = m->next;
        free(m);
    }
    while (g->shares) {
        share *s = g->shares;
        g->shares = s->next;
        free(s);
    }
    free(g->seats);
    free(g->mine);
    free(g->hot);
    free(g->ready);
    pthread_mutex_destroy(&g->lock);
    munmap(g, sizeof(*g));
}

/* Under lock. */
static share *share_of(nnb_group *g, uint64_t client)
{
    for (share *s = g->shares; s; s = s->next)
        if (s->client == client)
            return s;
    share *s = calloc(1, sizeof(*s));
    if (s) {
        s->client = client;
        s->users = 1;
        s->next = g->shares;
        g->shares = s;
    }
    return s;
}

/* Under lock: one of its users is gone. */
static void drop_share(nnb_group *g, share *s)
{
    if (--s->users)
        return;
    share **link = &g->shares;
    while (*link != s)
        link = &(*link)->next;
    *link = s->next;
    free(s);
}

void nnb_group_leave(nnb_group *g, uint64_t client)
{
    if (g->magic != MAGIC)
        return;
    pthread_mutex_lock(&g->lock);
    share *s = g->shares;
    while (s && s->client != client)
        s = s->next;
    if (s)
        drop_share(g, s);
    pthread_mutex_unlock(&g->lock);
}

/* Under lock: a worker that only looks after the others' runs, if one is needed and parked. */
static void arm(nnb_group *g)
{
    if (nnb_load32_relaxed(&g->ticking) || !g->parked)
        return;
    g->watchman = g->parked;
    g->watchman->idle_ticks = 0;
    g->watchman->seen_lead = 0;
    nnb_store32_relaxed(&g->ticking, 1);
    ring(&g->watchman->bell);
}

int nnb_group_add(nnb_group *g, nnb_server *s, uint64_t client, uint32_t priority)
{
    if (g->magic != MAGIC)
        return -ECHILD;
    seat *m = calloc(1, sizeof(*m));
    if (!m)
        return -ENOMEM;
    pthread_mutex_lock(&g->lock);
    uint32_t i = 0;
    while (i < g->room && g->seats[i])
        i++;
    int rc = nnb_load32_relaxed(&g->closing) ? -ESHUTDOWN : i >= NNB_MAX_SEATS ? -EMFILE : 0;
    if (!rc && i == g->room) {
        uint32_t room = g->room ? 2 * g->room : 16;
        seat **seats = realloc(g->seats, room * sizeof(*seats));
        if (seats) {
            memset(seats + g->room, 0, (room - g->room) * sizeof(*seats));
            g->seats = seats;
            g->room = room;
        }
        rc = seats ? 0 : -ENOMEM;
    }
    share *owner = rc ? NULL : share_of(g, client);
    if (!rc && !owner)
        rc = -ENOMEM;
    if (!rc) {
        owner->users++;
        nnb_server_share_thread(s);
        m->server = s;
        m->inbox = nnb_server_inbox(s);
        m->share = owner;
        m->number = i;
        m->window_ns = m->inbox->window_ns;
        m->priority = priority < NNB_PRIORITIES ? priority : NNB_PRIORITIES - 1;
        g->seats[i] = m;
        count_up(&g->n_live);
        count_up(&g->n_seats[m->priority]);
        nnb_store32_relaxed(&g->changed, 1);
        if (STATE(nnb_load_relaxed(&g->lead)) != FREE)
            arm(g); /* the run that is under way, or about to be, had the group to itself */
    }
    pthread_mutex_unlock(&g->lock);
    if (rc) {
        free(m);
        return rc;
    }
    ring(&g->bell);
    return (int)i;
}

/* Under lock: a number that no other worker has, for the word `lead`. */
static uint32_t next_number(nnb_group *g)
{
    const nnb_worker *w;
    do {
        g->next_worker = (g->next_worker + 1) & 0x3fff;
        for (w = g->workers; w && w->number != g->next_worker;)
            w = w->next;
    } while (w);
    return g->next_worker;
}

int nnb_worker_create(nnb_worker **out, nnb_group *g)
{
    nnb_worker *w = calloc(1, sizeof(*w));
    if (!w)
        return -ENOMEM;
    w->group = g;
    pthread_mutex_lock(&g->lock);
    w->number = next_number(g);
    w->next = g->workers;
    g->workers = w;
    g->n_workers++;
    w->is_fresh = 1;
    pthread_mutex_unlock(&g->lock);
    *out = w;
    return 0;
}

/* Under lock: it takes part no more. */
static void retire(nnb_group *g, nnb_worker *w)
{
    for (nnb_worker **link = &g->workers; *link; link = &(*link)->next)
        if (*link == w) {
            *link = w->next;
            g->n_workers--;
            return;
        }
}

int nnb_worker_ending(const nnb_worker *w) { return w->ended; }

uint32_t nnb_group_workers(nnb_group *g)
{
    pthread_mutex_lock(&g->lock);
    uint32_t n = g->n_workers;
    pthread_mutex_unlock(&g->lock);
    return n;
}

/* ---- what the leader knows -------------------------------------------------------------------------------------- */

static int grow_lists(nnb_group *g, uint32_t n)
{
    if (n <= g->mine_room)
        return 0;
    seat **mine = realloc(g->mine, n * sizeof(*mine));
    if (mine)
        g->mine = mine;
    seat **hot = realloc(g->hot, n * sizeof(*hot));
    if (hot)
        g->hot = hot;
    share **ready = realloc(g->ready, n * sizeof(*ready));
    if (ready)
        g->ready = ready;
    if (!mine || !hot || !ready)
        return -ENOMEM;
    g->mine_room = n;
    return 0;
}

static void end_turn(nnb_group *g, seat *m)
{
    if (!m->turn_until)
        return;
    m->turn_until = m->awaited_until = 0;
    m->share->n_turns--;
    g->reviewed_ns = 0;
    if (g->awaited == m)
        g->awaited = NULL;
    uint32_t i = 0;
    while (g->turns[i] != m)
        i++;
    g->turns[i] = g->turns[--g->n_turns];
}

/* Seats have come, gone, or been handed back by a watcher. */
static void refresh(nnb_group *g)
{
    pthread_mutex_lock(&g->lock);
    nnb_and32_acquire(&g->changed, 0); /* SYNC POINT: give_back <-> take_up: what was changed before it was set */
    if (grow_lists(g, g->room) < 0) {
        nnb_store32_relaxed(&g->changed, 1); /* those that came have to wait */
        pthread_mutex_unlock(&g->lock);
        return;
    }
    g->n_mine = g->n_hot = 0;
    for (uint32_t i = 0; i < g->room; i++) {
        seat *m = g->seats[i];
        if (!m || nnb_load32_acquire(&m->away)) /* SYNC POINT: give_back <-> take_up */
            continue;
        g->mine[g->n_mine++] = m;
        if (m->is_hot)
            g->hot[g->n_hot++] = m;
    }
    while (g->dead) {
        seat *m = g->dead;
        g->dead = m->next;
        free(m);
    }
    pthread_mutex_unlock(&g->lock);
}

static void make_hot(nnb_group *g, seat *m)
{
    m->used_ns = g->now_ns;
    if (!m->is_hot) {
        m->is_hot = 1;
        g->hot[g->n_hot++] = m;
    }
}

/* A hint: the server looks again, with the order that it needs. */
static int is_over(seat *m) { return nnb_load32_relaxed(&m->inbox->hung_up) != 0; }

static uint32_t share_limit(const nnb_group *g) { return g->cpus > 2 ? g->cpus : 2; }

static int top_priority(const share *s)
{
    for (int p = 0; p < NNB_PRIORITIES; p++)
        if (s->first[p])
            return p;
    return NNB_PRIORITIES;
}

/* Whether a run of a priority may begin: it does not wait for those of a lower one. */
static int has_processor(const nnb_group *g, int priority)
{
    uint32_t n = 0;
    for (int p = 0; p <= priority; p++)
        n += nnb_load32_relaxed(&g->n_runs[p]);
    return n < g->cpus;
}

/* Whether no run may begin, of any priority that a burst has. */
static int is_saturated(const nnb_group *g)
{
    int p = 0;
    while (p < NNB_PRIORITIES - 1 && !nnb_load32_relaxed(&g->n_seats[p]))
        p++;
    return !has_processor(g, p);
}

/* A client whose runs hang keeps its other requests waiting, but the bursts that it closes end. */
static int may_run(const nnb_group *g, const share *s)
{
    return has_processor(g, top_priority(s)) &&
           (nnb_load32_relaxed(&s->busy) < share_limit(g) || (s->first[0] && is_over(s->first[0])));
}

static int needs_turn(const seat *m) { return m->window_ns && !m->turnless && !m->turn_until; }

static void note_rival(nnb_group *g, const share *s)
{
    int p = top_priority(s);
    uint64_t spent = nnb_load_relaxed(&s->spent);
    if (p > g->rival_priority || (p == g->rival_priority && spent >= g->rival_spent) || !may_run(g, s))
        return;
    g->rival_priority = p;
    g->rival_spent = spent;
    g->rival_needs_turn = needs_turn(s->first[p]);
}

static void make_ready(nnb_group *g, seat *m)
{
    share *s = m->share;
    if (m->is_ready)
        return;
    m->is_ready = 1;
    int goes_first = is_over(m) || m->turn_until > g->now_ns;
    uint32_t p = is_over(m) ? 0 : m->priority;
    m->next = goes_first ? s->first[p] : NULL;
    if (!s->first[p])
        s->last[p] = m;
    if (!s->first[p] || goes_first) {
        s->first[p] = m;
    } else {
        s->last[p]->next = m;
        s->last[p] = m;
    }
    if (!s->n_ready++) {
        s->ready_at = g->n_ready;
        g->ready[g->n_ready++] = s;
        uint64_t spent = nnb_load_relaxed(&s->spent);
        if (spent + CREDIT_NS < g->floor_ns) /* it did not save what it left unused */
            nnb_add_relaxed(&s->spent, g->floor_ns - CREDIT_NS - spent);
    }
    if (!s->n_turns)
        note_rival(g, s);
    else if (!m->turn_until)
        g->reviewed_ns = 0;
}

static int is_free(seat *m) { return !m->is_ready && !nnb_load32_acquire(&m->taken); } /* give_back <-> take_up */

static int has_news(seat *m) { return nnb_mq_poll(m->inbox->mq) != 0 || is_over(m); }

/* Whether one of those whose turn it is is ready now. */
static int look_at_turns(nnb_group *g)
{
    int found = 0;
    for (uint32_t i = 0; i < g->n_turns; i++)
        if (is_free(g->turns[i]) && nnb_mq_poll(g->turns[i]->inbox->mq) != 0) {
            make_ready(g, g->turns[i]);
            found = 1;
        }
    return found;
}

static void look_at_hot(nnb_group *g)
{
    g->picks_hot = 0;
    for (uint32_t i = 0; i < g->n_hot; i++)
        if (is_free(g->hot[i]) && nnb_mq_poll(g->hot[i]->inbox->mq) != 0)
            make_ready(g, g->hot[i]);
}

static void look_at_all(nnb_group *g)
{
    g->picks_hot = g->picks_all = 0;
    g->is_slow = 0;
    for (uint32_t i = 0; i < g->n_mine; i++) {
        seat *m = g->mine[i];
        if (is_free(m) && has_news(m)) {
            make_ready(g, m);
            make_hot(g, m);
        }
    }
}

static void cool(nnb_group *g)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < g->n_hot; i++) {
        seat *m = g->hot[i];
        m->is_hot = m->is_ready || nnb_load32_relaxed(&m->taken) || g->now_ns - m->used_ns < COLD_NS;
        if (m->is_hot)
            g->hot[n++] = m;
    }
    g->n_hot = n;
}

/* ---- picking and running ---------------------------------------------------------------------------------------- */

static int may_pick(const nnb_group *g)
{
    for (uint32_t i = 0; i < g->n_ready; i++)
        if (may_run(g, g->ready[i]))
            return 1;
    return 0;
}

/* Whether there are processors for a worker and a client that poll for each other, beside so many other runs. */
static int has_two(const nnb_group *g, uint32_t others) { return !others || others + 2 <= g->cpus; }

static int may_poll(const nnb_group *g) { return has_two(g, nnb_load32_relaxed(&g->n_detached)); }

/* Whether its client sleeps, and has to be woken for the answer. */
static int is_asleep(seat *m)
{
    return !(nnb_load32_relaxed((nnb_a32 *)(void *)nnb_server_outbox(m->server)->mq->event) & NNB_EVENT_NOT_EMPTY);
}

/* It had no next request at once in its turn: the next ones are answered without one, twice as many each time. If it did
 * have some, it was perhaps interrupted. */
static void lose_turn(nnb_group *g, seat *m)
{
    end_turn(g, m);
    if (m->awake_in_turn >= MADE_USE)
        m->turnless_next = 0;
    m->turnless = m->turnless_next;
    if (m->turnless_next < MOST_TURNLESS)
        m->turnless_next = 2 * m->turnless_next + 1;
}

/* Whom the leader waits for, rather than give a turn to a client of `priority` that has had `spent`: one whose turn it is,
 * for its next request, or one whose turn is over, until it falls asleep and leaves its processor to the other. */
static seat *whom_to_await(nnb_group *g, uint32_t priority, uint64_t spent)
{
    seat *awaited = NULL;
    for (uint32_t i = g->n_turns; i-- > 0;) {
        seat *m = g->turns[i];
        if (g->now_ns < m->turn_until && nnb_load_relaxed(&m->share->spent) > spent + LEAD_NS)
            m->turn_until = g->now_ns;
        int has_ended = g->now_ns >= m->turn_until;
        if (has_ended && !m->is_to_rest) {
            m->is_to_rest = 1;
            nnb_tell_client(nnb_server_outbox(m->server), NNB_REST);
        }
        if (has_ended && (is_asleep(m) || g->now_ns - m->turn_until >= LEAVE_NS)) {
            m->turnless_next = 0;
            end_turn(g, m);
        } else if (!has_ended && !m->is_ready && g->now_ns >= m->awaited_until) {
            lose_turn(g, m);
        } else if ((has_ended || !m->is_ready) && m->priority <= priority) { /* if ready, it is behind another one */
            awaited = m;
        }
    }
    return g->n_turns == g->most_turns ? awaited : NULL;
}

/* Waiting counts as time of the client that is waited for; not longer than it lasts if the leader is not interrupted. */
static void end_waiting(nnb_group *g)
{
    uint64_t waited = g->now_ns - g->awaited_since;
    if (g->awaited)
        nnb_add_relaxed(&g->awaited->share->spent, waited < WAKE_NS ? waited : WAKE_NS);
    g->awaited = NULL;
    g->awaited_since = g->now_ns;
}

static void begin_turn(nnb_group *g, seat *m)
{
    if (m->turn_until) {
        if (g->now_ns >= m->turn_until) { /* it is the neediest all the same */
            m->turn_until = g->now_ns + TURN_NS;
            m->turnless_next = 0;
        }
        return;
    }
    if (!m->window_ns)
        return;
    if (m->turnless) {
        m->turnless--;
        return;
    }
    for (uint32_t i = 0; i < g->n_turns && g->n_turns == g->most_turns; i++)
        if (g->turns[i]->priority > m->priority)
            end_turn(g, g->turns[i]);
    if (g->n_turns == g->most_turns)
        return;
    m->turn_until = m->awaited_until = g->now_ns + TURN_NS;
    m->sleeps_in_turn = m->awake_in_turn = 0;
    m->share->n_turns++;
    g->reviewed_ns = 0;
    g->turns[g->n_turns++] = m;
}

/* Whose turn goes on as far as is known, without a look at all that are ready: one of them that is ready, or else, with
 * `g->awaited`, one to wait for. */
static seat *go_on(nnb_group *g)
{
    if (!g->n_turns || g->now_ns - g->reviewed_ns >= REVIEW_NS)
        return NULL;
    seat *best = NULL, *awaited = NULL;
    uint64_t least = 0;
    for (uint32_t i = 0; i < g->n_turns; i++) {
        seat *m = g->turns[i];
        const share *s = m->share;
        uint64_t spent = nnb_load_relaxed(&s->spent);
        int p = top_priority(s), r = (int)m->priority;
        if (g->now_ns >= m->turn_until || p < r || r > g->rival_priority ||
            (r == g->rival_priority && spent > g->rival_spent + LEAD_NS))
            return NULL;
        if (m->is_ready) {
            if (s->first[p] != m || !may_run(g, s))
                return NULL;
            if (!best || spent < least)
                best = m, least = spent;
        } else {
            if (g->now_ns >= m->awaited_until || (p == r && !needs_turn(s->first[p])))
                return NULL;
            awaited = m;
        }
    }
    if (!best && g->n_turns == g->most_turns && may_poll(g) && (g->rival_needs_turn || g->rival_priority == NNB_PRIORITIES))
        g->awaited = awaited;
    return best;
}

/* The neediest: the highest priority, then the client that had least, or one whose turn it is. NULL: those that are ready
 * may not run, or, with `g->awaited`, the leader waits. */
static seat *review(nnb_group *g)
{
    share *best = NULL, *held = NULL;
    int priority = NNB_PRIORITIES;
    uint64_t least = 0, least_held = 0;
    g->rival_priority = NNB_PRIORITIES;
    g->rival_spent = 0;
    g->reviewed_ns = g->now_ns;
    for (uint32_t i = 0; i < g->n_ready; i++) {
        share *s = g->ready[i];
        int p = top_priority(s);
        if (!s->n_turns)
            note_rival(g, s);
        if (p > priority || !may_run(g, s))
            continue;
        uint64_t spent = nnb_load_relaxed(&s->spent);
        if (p < priority || spent < least)
            best = s, least = spent;
        if (p < priority)
            held = NULL;
        priority = p;
        if (s->first[p]->turn_until > g->now_ns && (!held || spent < least_held))
            held = s, least_held = spent;
    }
    if (!best)
        return NULL;
    if (held && held != best && least_held <= least + LEAD_NS)
        best = held;
    seat *m = best->first[priority];
    if (needs_turn(m) && g->n_turns && may_poll(g))
        g->awaited = whom_to_await(g, m->priority, least);
    return g->awaited ? NULL : m;
}

/* The next request, as `review` says. NULL: there is none now. */
static seat *pick(nnb_group *g)
{
    end_waiting(g);
    seat *m = go_on(g);
    if (!m && !g->awaited)
        m = review(g);
    if (!m)
        return NULL;
    share *s = m->share;
    s->first[top_priority(s)] = m->next;
    m->is_ready = 0;
    if (!--s->n_ready) {
        g->ready[s->ready_at] = g->ready[--g->n_ready];
        g->ready[s->ready_at]->ready_at = s->ready_at;
    }
    uint64_t spent = nnb_load_relaxed(&s->spent);
    if (spent > g->floor_ns && !is_over(m)) /* a burst that ends was no client's turn */
        g->floor_ns = spent;
    begin_turn(g, m);
    return m;
}

/* Under lock. */
static nnb_worker *pop_parked(nnb_group *g)
{
    nnb_worker **link = &g->parked;
    if (*link && *link == g->watchman && (*link)->next_parked)
        link = &(*link)->next_parked; /* the watchman stays, if another one is there */
    nnb_worker *w = *link;
    if (!w)
        return NULL;
    *link = w->next_parked;
    count_down(&g->n_parked);
    if (g->watchman == w) {
        g->watchman = NULL;
        nnb_store32_relaxed(&g->ticking, 0);
    }
    return w;
}

/* Under lock, by the leader: a run is not the leader's any more, and so its seat has no turn. */
static void mark_detached(nnb_group *g, nnb_worker *w)
{
    end_turn(g, w->seat);
    w->is_detached = 1;
    w->seen_ns = 0; /* the run may have begun long ago: it is not stuck before it was watched */
    count_up(&g->n_detached);
    count_up(&g->n_runs[w->seat->priority]);
    count_up(&w->seat->share->busy);
}

static void mark_done(nnb_group *g, nnb_worker *w)
{
    uint64_t runs = nnb_load_relaxed(&w->runs);
    if (!w->is_detached)
        return;
    count_down(runs & STUCK ? &g->n_stuck : &g->n_runs[w->seat->priority]);
    nnb_store_relaxed(&w->runs, runs & ~STUCK);
    w->is_detached = 0;
    count_down(&g->n_detached);
    count_down(&w->seat->share->busy);
}

/* The run of a detached worker is over, which stays with its seat: 1, unless the run counts as stuck. */
static int stay(nnb_worker *w)
{
    uint64_t runs = nnb_load_relaxed(&w->runs);
    return !(runs & STUCK) && nnb_cas_relaxed(&w->runs, runs, runs + 1);
}

/* Under lock, by the leader: another one leads. */
static void hand_on(nnb_group *g)
{
    nnb_worker *next = pop_parked(g);
    if (next)
        next->role = LEADS;
    nnb_store_relaxed(&g->lead, next ? word_of(next, LOOKING) : FREE);
    if (next)
        ring(&next->bell); /* under the lock: it may be gone after it */
}

/* The leader goes on as a worker with a seat of its own, and another one leads. */
static void detach(nnb_worker *w)
{
    nnb_group *g = w->group;
    pthread_mutex_lock(&g->lock);
    mark_detached(g, w);
    w->role = DETACHED;
    w->has_turn = 0;
    hand_on(g);
    pthread_mutex_unlock(&g->lock);
}

/* Under lock: -EUSERS once if the group is short of workers. */
static int wants_worker(nnb_group *g)
{
    uint32_t runs = nnb_load32_relaxed(&g->n_detached);
    uint32_t enough = is_saturated(g) || runs < g->cpus ? g->cpus : runs + 1; /* held: one that leads, too */
    if (g->parked || g->n_workers >= MOST_WORKERS || (g->n_workers > enough && !nnb_load32_relaxed(&g->n_stuck)))
        return 0;
    uint64_t now = nnb_now_ns();
    if (g->asked_ns && now - g->asked_ns < GROW_NS)
        return 0;
    g->asked_ns = now;
    return -EUSERS;
}

/* Takes the request of a seat that the leader or its own worker has. >= 0: run it; -EAGAIN: there was none. */
static int take(nnb_worker *w, seat *m)
{
    int id = nnb_server_try(m->server, 1);
    if (w->seat != m) /* that of a detached worker is read by others */
        w->seat = m;
    w->ended = id < 0 && id != -EAGAIN ? id : 0;
    if (id == -EAGAIN)
        return id;
    m->futile = 0;
    w->is_new = id >= 0 && id & NNB_PLAN_NEW;
    uint32_t n_first = nnb_load32_relaxed(&m->share->n_first);
    w->is_first = !m->has_run && n_first < MOST_FIRST;
    if (w->is_first)
        nnb_store32_relaxed(&m->share->n_first, n_first + 1);
    m->has_run = 1;
    nnb_store_relaxed(&w->runs, (nnb_load_relaxed(&w->runs) + 1) | 1);
    return (int)(m->number * NNB_SEAT_PLANS) + (w->ended ? NNB_BURST_ENDED : id);
}

/* Begins the next request of the ready ones. -EAGAIN: none may run now, or the lead is gone; -EUSERS. */
static int begin(nnb_worker *w)
{
    nnb_group *g = w->group;
    int has_others = nnb_load32_relaxed(&g->n_live) > 1;
    if (has_others && (!nnb_load32_relaxed(&g->n_parked) || is_saturated(g))) {
        pthread_mutex_lock(&g->lock);
        int rc = wants_worker(g);
        if (!rc && is_saturated(g)) { /* saturated: the one that ends first leads */
            nnb_store32_relaxed(&g->waiting, 1);
            w->role = NONE;
            nnb_store_relaxed(&g->lead, FREE);
            rc = -EAGAIN;
        }
        pthread_mutex_unlock(&g->lock);
        if (rc)
            return rc;
    }
    int knows_time = g->awaited != NULL; /* a few rounds old; these count as time of the client whose turn it is, anyway */
    seat *m = pick(g);
    if (!m)
        return -EAGAIN;
    g->picks_hot++;
    g->picks_all++;
    nnb_store32_relaxed(&m->taken, 1);
    int id = take(w, m);
    if (id == -EAGAIN) { /* it was ill-formed, and has been answered */
        nnb_add_relaxed(&m->share->spent, FLOOR_NS);
        nnb_store32_relaxed(&m->taken, 0);
        w->seat = NULL;
        return id;
    }
    if (!g->has_slept)
        g->fruitless = 0;
    g->idle_since = g->has_slept = 0;
    make_hot(g, m);
    int is_long = w->ended || (has_others && (w->is_new || m->average_ns > LONG_NS));
    w->has_turn = m->turn_until != 0;
    w->started_ns = 0;
    if (has_others && (is_long || g->n_hot > 1 || nnb_load_relaxed(&w->runs) / 2 % MEASURE_EVERY == 0)) {
        if (!knows_time || !w->has_turn)
            g->now_ns = nnb_now_ns();
        w->started_ns = g->now_ns;
    }
    if (is_long) {
        detach(w);
        return id;
    }
    w->role = INLINE;
    w->busy_word = word_of(w, BUSY);
    nnb_store_release(&g->lead, w->busy_word); /* SYNC POINT: hand_over <-> take_over */
    if (has_others) {
        nnb_fence_seq_cst(); /* SYNC POINT: arm <-> rest */
        if (!nnb_load32_relaxed(&g->ticking)) {
            pthread_mutex_lock(&g->lock);
            arm(g);
            pthread_mutex_unlock(&g->lock);
        }
    }
    return id;
}

/* A run that takes much longer than usual was perhaps interrupted: the excess does not count, as far as its client has
 * credit from runs that have counted. Runs of one client that end at the same time may both use the same credit.
 * `ended_ns`: before the answer went out, if that woke a client, which may take this processor. */
static void account(nnb_worker *w, seat *m, uint64_t ended_ns)
{
    share *s = m->share;
    uint64_t counts = m->average_ns, credit = nnb_load_relaxed(&s->credit);
    if (w->started_ns) {
        uint64_t most = 4 * m->average_ns + EXCESS_NS, took = ended_ns - w->started_ns;
        uint64_t excess = took > most ? took - most : 0;
        uint64_t forgiven = excess < credit ? excess : credit;
        counts = took - forgiven;
        credit -= forgiven;
        if (!w->is_new)
            m->average_ns = m->average_ns - m->average_ns / 8 + (took - excess) / 8;
        if (w->role == LEADS)
            w->group->now_ns = ended_ns;
    }
    if (w->is_first && counts > MOST_FIRST_NS)
        counts = MOST_FIRST_NS;
    counts += FLOOR_NS;
    credit += counts / CREDIT_PART;
    nnb_store_relaxed(&s->credit, credit < MOST_CREDIT_NS ? credit : MOST_CREDIT_NS);
    nnb_add_relaxed(&s->spent, counts);
}

/* A detached run is over: the seat goes back, and its worker leads if nobody does. */
static void give_back(nnb_worker *w)
{
    nnb_group *g = w->group;
    seat *m = w->seat;
    pthread_mutex_lock(&g->lock);
    mark_done(g, w);
    w->role = STATE(nnb_load_relaxed(&g->lead)) == FREE ? LEADS : NONE;
    if (w->role == LEADS) {
        nnb_store_relaxed(&g->lead, word_of(w, LOOKING));
        nnb_store32_relaxed(&g->waiting, 0);
        g->is_slow = 1;
    }
    if (w->ended) {
        g->seats[m->number] = NULL;
        m->next = g->dead;
        g->dead = m;
        drop_share(g, m->share);
        count_down(&g->n_live);
        count_down(&g->n_seats[m->priority]);
        nnb_store32_relaxed(&g->changed, 1);
    } else {
        nnb_store32_release(&m->taken, 0); /* SYNC POINT: give_back <-> take_up */
    }
    pthread_mutex_unlock(&g->lock);
    w->seat = NULL;
    w->ended = 0;
    if (w->role == NONE)
        ring(&g->bell);
}

/* The client has its answer. From now on the leader waits for its next request. */
static void note_turn(nnb_group *g, seat *m, int was_asleep)
{
    if (!m->turn_until)
        return;
    m->awaited_until = was_asleep ? nnb_now_ns() + WAKE_NS : g->now_ns + (m->awake_in_turn < MADE_USE ? THINK_NS : BREAK_NS);
    if (!was_asleep)
        m->sleeps_in_turn = 0, m->awake_in_turn++;
    else if (m->sleeps_in_turn++ >= MOST_SLEEPS)
        lose_turn(g, m);
}

/* Whether other runs have the processors, so that neither the client nor a worker can poll. */
static int is_crowded(const nnb_worker *w)
{
    return !has_two(w->group, nnb_load32_relaxed(&w->group->n_detached) - (w->role == DETACHED));
}

/* What the client is to do when it waits the next time. One that is woken in its turn may be put on the leader's processor,
 * where neither can poll for the other. It leaves, so that the leader stays where it is and clients where it is not. If it
 * cannot, and has to be woken again, the leader does: see processor.c. While other runs have the processors that they would
 * move to, both stay, and the client does not poll. */
static void advise(const nnb_worker *w, seat *m)
{
    nnb_channel *outbox = nnb_server_outbox(m->server);
    m->is_to_rest = is_crowded(w);
    nnb_tell_client(outbox, m->is_to_rest ? NNB_REST : w->has_turn ? sched_getcpu() : NNB_NOTHING);
    outbox->is_listeners = !m->is_to_rest && (!w->has_turn || m->sleeps_in_turn);
}

/* Answers the request at hand. 0, NNB_BURST_ENDED | ..., or -ERESTART. */
static int conclude(nnb_worker *w)
{
    nnb_group *g = w->group;
    seat *m = w->seat;
    if (w->ended) { /* its burst is over, and the caller has given back what was its */
        give_back(w);
        return 0;
    }
    int was_asleep = is_asleep(m);
    if (was_asleep || m->is_to_rest || is_crowded(w))
        advise(w, m);
    uint64_t ended_ns = w->started_ns && was_asleep ? nnb_now_ns() : 0;
    int rc = nnb_server_reply(m->server);
    if (w->started_ns && !was_asleep)
        ended_ns = nnb_now_ns();
    w->ended = rc < 0 && rc != -ERESTART ? rc : 0;
    if (w->role == INLINE) {
        uint64_t was = w->busy_word;
        w->role = nnb_cas_relaxed(&g->lead, was, word_of(w, LOOKING)) ? LEADS : DETACHED; /* none led since */
    }
    account(w, m, ended_ns);
    if (w->role == LEADS) {
        if (w->ended)
            detach(w);
        g->is_slow |= m->average_ns > SLOW_NS;
    }
    if (w->ended)
        return NNB_BURST_ENDED + (int)(m->number * NNB_SEAT_PLANS);
    if (w->role == LEADS) {
        note_turn(g, m, was_asleep);
        nnb_store32_relaxed(&m->taken, 0);
        w->seat = NULL;
    } else if (m->window_ns && nnb_load32_relaxed(&g->asleep) && !nnb_load32_relaxed(&g->waiting) && stay(w)) {
        w->role = ATTACHED;
        w->poll_until = 0;
    } else {
        give_back(w);
    }
    return rc < 0 ? rc : 0;
}

/* ---- sleeping --------------------------------------------------------------------------------------------------- */

/* ns: so long at most; 0: however long it takes. */
static void wait_for_words(struct futex_waitv *words, uint32_t n, uint64_t ns)
{
    uint64_t until = n == 1 ? ns : nnb_now_ns() + ns; /* futex_waitv is told a moment */
    struct timespec t = {.tv_sec = (time_t)(until / 1000000000), .tv_nsec = (long)(until % 1000000000)};
    if (n == 1)
        syscall(SYS_futex, words[0].uaddr, FUTEX_WAIT, words[0].val, ns ? &t : NULL, NULL, 0);
    else
        syscall(SYS_futex_waitv, words, n, 0, ns ? &t : NULL, CLOCK_MONOTONIC);
}

static struct futex_waitv wait_word(const void *word, uint32_t value)
{
    return (struct futex_waitv){.val = value, .uaddr = (uint64_t)(uintptr_t)word, .flags = FUTEX_32};
}

static nnb_a32 *event_of(const seat *m) { return (nnb_a32 *)(void *)m->inbox->mq->event; }

static void clear_bits(seat *m)
{
    if (nnb_load32_relaxed(event_of(m)) & SLEEPING_BITS) /* clear already: nobody has sent since it was cleared */
        nnb_take32(event_of(m), ~SLEEPING_BITS); /* SYNC POINTS: wake <-> consume, publish <-> sleep */
}

/* After the fence. Whether the seat may be slept on. */
static int is_quiet(seat *m)
{
    m->expected = nnb_load32_relaxed(event_of(m));
    return !(m->expected & SLEEPING_BITS) && !has_news(m);
}

static void *watch(void *argument)
{
    watcher *x = argument;
    struct futex_waitv words[WORDS + 1];
    for (;;) {
        int found = 0;
        pthread_mutex_lock(&x->lock);
        int closing = x->closing;
        nnb_take32(&x->bell, 0); /* SYNC POINT: wake <-> consume */
        for (uint32_t i = 0; i < x->n; i++)
            clear_bits(x->seats[i]);
        nnb_fence_seq_cst(); /* SYNC POINT: publish <-> sleep */
        for (uint32_t i = 0; i < x->n;) {
            seat *m = x->seats[i];
            if (is_quiet(m)) {
                words[i] = wait_word(event_of(m), m->expected);
                i++;
                continue;
            }
            x->seats[i] = x->seats[--x->n];
            nnb_store32_release(&m->away, 0); /* SYNC POINT: give_back <-> take_up */
            found = 1;
        }
        uint32_t n = x->n;
        words[n] = wait_word(&x->bell, 0);
        pthread_mutex_unlock(&x->lock);
        if (found) {
            nnb_store32_release(&x->group->changed, 1);
            ring(&x->group->bell);
        }
        if (closing)
            return NULL;
        if (n && !x->group->words) /* no futex_waitv: the bell of a watcher of one queue is that queue's word */
            syscall(SYS_futex, words[0].uaddr, FUTEX_WAIT, words[0].val, NULL, NULL, 0);
        else
            wait_for_words(words, n + 1, 0);
    }
}

static watcher *new_watcher(nnb_group *g)
{
    watcher *x = calloc(1, sizeof(*x));
    if (!x)
        return NULL;
    x->group = g;
    pthread_mutex_init(&x->lock, NULL);
    pthread_attr_t attr;
    sigset_t all, before;
    sigfillset(&all); /* signals are for the threads that have handlers to run */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_attr_init(&attr);
    pthread_attr_setstacksize(&attr, PTHREAD_STACK_MIN + 65536);
    int rc = pthread_create(&x->thread, &attr, watch, x);
    pthread_attr_destroy(&attr);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (rc) {
        pthread_mutex_destroy(&x->lock);
        free(x);
        return NULL;
    }
    pthread_mutex_lock(&g->lock);
    x->next = g->watchers;
    g->watchers = x;
    pthread_mutex_unlock(&g->lock);
    return x;
}

static int leave_to(watcher *x, seat *m, uint32_t capacity)
{
    pthread_mutex_lock(&x->lock);
    int fits = x->n < capacity;
    if (fits) {
        x->seats[x->n++] = m;
        nnb_store32_relaxed(&m->away, 1);
    }
    pthread_mutex_unlock(&x->lock);
    if (fits)
        ring(&x->bell);
    return fits;
}

static int by_use(const void *a, const void *b)
{
    uint64_t x = (*(seat *const *)a)->used_ns, y = (*(seat *const *)b)->used_ns;
    return x < y ? 1 : x > y ? -1 : 0; /* the latest first */
}

/* Leaves what cannot be waited for to watchers. */
static void leave_some(nnb_group *g)
{
    if (g->n_mine <= g->words)
        return;
    uint32_t capacity = g->words ? g->words : 1, keep = g->words < KEEP_WORDS ? g->words / 2 : KEEP_WORDS;
    qsort(g->mine, g->n_mine, sizeof(*g->mine), by_use);
    uint32_t n = g->n_mine;
    g->n_mine = 0;
    for (uint32_t i = 0; i < n; i++) {
        seat *m = g->mine[i];
        watcher *x = NULL;
        if (i >= keep && is_free(m)) {
            pthread_mutex_lock(&g->lock);
            x = g->watchers;
            pthread_mutex_unlock(&g->lock);
            while (x && !leave_to(x, m, capacity))
                x = x->next;
            if (!x && (x = new_watcher(g)) && !leave_to(x, m, capacity))
                x = NULL;
        }
        if (x) {
            m->is_hot = 0;
            end_turn(g, m);
        } else
            g->mine[g->n_mine++] = m;
    }
    g->n_hot = 0;
    for (uint32_t i = 0; i < g->n_mine; i++)
        if (g->mine[i]->is_hot)
            g->hot[g->n_hot++] = g->mine[i];
}

/* Under lock: runs that have lasted for long do not count. */
static void count_stuck(nnb_group *g, uint64_t now)
{
    for (nnb_worker *w = g->workers; w; w = w->next) {
        uint64_t runs = nnb_load_relaxed(&w->runs);
        if (!w->is_detached || !(runs & 1) || runs & STUCK)
            continue;
        if (!w->seen_ns || w->seen_runs != runs) {
            w->seen_runs = runs;
            w->seen_ns = now;
        } else if (now - w->seen_ns >= STUCK_NS && nnb_cas_relaxed(&w->runs, runs, runs | STUCK)) {
            count_up(&g->n_stuck);
            count_down(&g->n_runs[w->seat->priority]);
        }
    }
}

/* The leader sleeps until any queue has news or the bell rings. */
static void sleep_on_all(nnb_group *g)
{
    struct futex_waitv words[WORDS + 1];
    leave_some(g);
    uint32_t n = 0, quiet = 1, is_held = 0;
    for (uint32_t i = 0; i < g->n_mine; i++)
        if (is_free(g->mine[i]))
            clear_bits(g->mine[i]);
    nnb_store32_relaxed(&g->waiting, g->n_ready != 0); /* for runs, which are not to stay attached */
    for (uint32_t i = 0; i < g->n_ready; i++)
        is_held |= !has_processor(g, top_priority(g->ready[i]));
    nnb_store32_relaxed(&g->asleep, 1);
    if (nnb_take32(&g->bell, 0)) /* SYNC POINT: wake <-> consume */
        quiet = 0;
    nnb_fence_seq_cst(); /* SYNC POINT: publish <-> sleep */
    for (uint32_t i = 0; quiet && i < g->n_mine; i++) {
        seat *m = g->mine[i];
        if (!is_free(m))
            continue;
        if (n == g->words || !is_quiet(m)) /* too many: there is no thread to watch them, so look again and again */
            quiet = 0;
        else
            words[n++] = wait_word(event_of(m), m->expected);
        nnb_count(m->inbox->counters, NNB_SLEEPS, 1);
    }
    words[n] = wait_word(&g->bell, 0);
    if (quiet)
        wait_for_words(words, n + 1, is_held ? TICK_NS : 0);
    nnb_store32_relaxed(&g->asleep, 0);
    nnb_store32_relaxed(&g->waiting, 0);
    g->now_ns = nnb_now_ns();
    if (is_held) {
        pthread_mutex_lock(&g->lock);
        count_stuck(g, g->now_ns);
        pthread_mutex_unlock(&g->lock);
    }
    for (uint32_t i = 0; quiet && i < g->n_mine; i++) {
        seat *m = g->mine[i];
        if (!is_free(m) || nnb_load32_relaxed(event_of(m)) == m->expected || has_news(m))
            continue;
        if (++m->futile >= FUTILE_WAKES) /* it writes into the word, and sends nothing */
            m->inbox->mq->corrupt = 1, make_ready(g, m);
    }
}

/* ---- looking ---------------------------------------------------------------------------------------------------- */

/* Whether any burst is to be polled. */
static int has_window(const nnb_group *g)
{
    for (uint32_t i = 0; i < g->n_hot; i++)
        if (g->hot[i]->window_ns && !nnb_load32_relaxed(&g->hot[i]->taken))
            return 1;
    return 0;
}

static uint64_t window_of(const nnb_group *g)
{
    uint64_t window = 0;
    for (uint32_t i = 0; i < g->n_hot; i++)
        if (g->hot[i]->window_ns > window && !nnb_load32_relaxed(&g->hot[i]->taken))
            window = g->hot[i]->window_ns;
    return window;
}

/* Nothing was found for some rounds: go on polling, or sleep. */
static void idle(nnb_group *g)
{
    g->now_ns = nnb_now_ns();
    look_at_all(g);
    if (g->n_ready && may_pick(g))
        return;
    if (!g->idle_since)
        g->idle_since = g->now_ns;
    uint64_t window = may_poll(g) ? nnb_window(window_of(g), g->fruitless) : 0;
    if (g->now_ns - g->idle_since < window)
        return;
    if (window)
        g->fruitless++;
    sleep_on_all(g);
    g->has_slept = 1;
    cool(g);
    look_at_all(g);
    g->idle_since = 0;
}

/* Leads until a request is to be run. -EAGAIN: after `limit` rounds (0: never), or the lead is gone. */
static int lead(nnb_worker *w, uint32_t limit)
{
    nnb_group *g = w->group;
    int polls = may_poll(g) && has_window(g);
    for (uint32_t round = 1;; round++) {
        if (nnb_load32_relaxed(&g->changed))
            refresh(g);
        if (g->is_slow || g->picks_all >= PICKS_BEFORE_ALL)
            look_at_all(g);
        else if (!g->n_ready || g->picks_hot >= (g->n_hot > FEW ? PICKS_BEFORE_HOT : 1))
            look_at_hot(g);
        int found = look_at_turns(g);
        if (g->n_ready && (found || !g->awaited || round % WAIT_ROUNDS == 0)) {
            if (g->awaited && !found)
                g->now_ns = nnb_now_ns();
            int rc = begin(w);
            if (rc != -EAGAIN || w->role != LEADS)
                return rc;
        }
        if (limit && round >= limit)
            return -EAGAIN;
        if (nnb_load32_relaxed(&g->closing)) {
            pthread_mutex_lock(&g->lock);
            w->role = NONE;
            nnb_store_relaxed(&g->lead, FREE);
            pthread_mutex_unlock(&g->lock);
            return -EAGAIN;
        }
        if (!limit && (!polls || round % CLOCK_EVERY == 0)) {
            idle(g);
            polls = may_poll(g) && has_window(g);
        } else {
            nnb_pause();
        }
    }
}

/* Polls the seat that this worker has just served, as long as the leader sleeps. As `lead`. */
static int follow(nnb_worker *w, uint32_t limit)
{
    nnb_group *g = w->group;
    seat *m = w->seat;
    for (uint32_t round = 1;; round++) {
        if (!nnb_load32_relaxed(&g->asleep) || nnb_load32_relaxed(&g->waiting)) {
            give_back(w);
            return -EAGAIN;
        }
        if (nnb_mq_poll(m->inbox->mq) != 0 || (round % CLOCK_EVERY == 0 && is_over(m))) {
            int id = take(w, m);
            if (id == -EAGAIN)
                continue;
            w->role = DETACHED;
            w->has_turn = 0;
            w->started_ns = nnb_load_relaxed(&w->runs) / 2 % MEASURE_EVERY ? 0 : nnb_now_ns();
            return id;
        }
        if (limit && round >= limit)
            return -EAGAIN;
        if (round % CLOCK_EVERY == 0) {
            uint64_t now = nnb_now_ns();
            if (!w->poll_until)
                w->poll_until = now + m->window_ns;
            else if (now >= w->poll_until) {
                give_back(w);
                return -EAGAIN;
            }
        }
        nnb_pause();
    }
}

/* ---- parked workers --------------------------------------------------------------------------------------------- */

/* What a worker's bell announces is read under the lock. Whether it has not rung for so long; 0: however long it takes. */
static int wait_for_bell(nnb_a32 *bell, uint64_t ns)
{
    struct timespec t = {.tv_sec = (time_t)(ns / 1000000000), .tv_nsec = (long)(ns % 1000000000)};
    if (nnb_and32_relaxed(bell, 0))
        return 0;
    int is_over = syscall(SYS_futex, bell, FUTEX_WAIT, 0, ns ? &t : NULL, NULL, 0) < 0 && errno == ETIMEDOUT;
    return !nnb_and32_relaxed(bell, 0) && is_over;
}

/* The watchman looks, under lock. 1: it leads now. */
static int tick(nnb_worker *w)
{
    nnb_group *g = w->group;
    uint64_t x = nnb_load_relaxed(&g->lead);
    if (STATE(x) == FREE) {
        count_stuck(g, nnb_now_ns());
        if (!is_saturated(g)) {
            nnb_store_relaxed(&g->lead, word_of(w, LOOKING));
            nnb_store32_relaxed(&g->waiting, 0);
            return 1;
        }
        return 0;
    }
    if (STATE(x) == BUSY && x == w->seen_lead) {
        nnb_worker *busy = g->workers;
        while (busy && busy->number != (x >> 2 & 0x3fff))
            busy = busy->next;
        if (busy && nnb_cas_acquire(&g->lead, x, word_of(w, LOOKING))) { /* SYNC POINT: hand_over <-> take_over */
            mark_detached(g, busy);
            return 1;
        }
    }
    if (STATE(x) == BUSY || x != w->seen_lead) {
        w->idle_ticks = 0;
    } else if (nnb_load32_relaxed(&g->changed)) { /* the leader may begin a run without knowing of all bursts */
        w->idle_ticks = 0;
    } else if (++w->idle_ticks >= IDLE_TICKS) {
        nnb_store32_relaxed(&g->ticking, 0);
        nnb_fence_seq_cst(); /* SYNC POINT: arm <-> rest */
        w->idle_ticks = 0;
        if (STATE(nnb_load_relaxed(&g->lead)) == BUSY)
            nnb_store32_relaxed(&g->ticking, 1);
        else
            g->watchman = NULL;
    }
    w->seen_lead = x;
    return 0;
}

static void unpark(nnb_worker *w)
{
    nnb_group *g = w->group;
    for (nnb_worker **link = &g->parked; *link; link = &(*link)->next_parked)
        if (*link == w) {
            *link = w->next_parked;
            count_down(&g->n_parked);
            break;
        }
    if (g->watchman == w) {
        g->watchman = NULL;
        nnb_store32_relaxed(&g->ticking, 0);
    }
}

/* Under lock, by one that is parked. Those that park last are called first. So one that is here for long is one of those
 * that were not needed, however much the need goes up and down meanwhile. */
static int has_too_many(const nnb_group *g)
{
    return nnb_load32_relaxed(&g->n_parked) > SPARE && g->n_workers > g->cpus + 1 + nnb_load32_relaxed(&g->n_stuck);
}

/* Waits until this worker leads: 0. -EPIPE: the group is closed; -ESHUTDOWN: it has enough others. */
static int park(nnb_worker *w)
{
    nnb_group *g = w->group;
    int rc = 1;
    pthread_mutex_lock(&g->lock);
    uint32_t state = STATE(nnb_load_relaxed(&g->lead));
    if (w->is_fresh) {
        nnb_ask_for_short_slices();
        w->is_fresh = 0;
        g->asked_ns = 0; /* one at a time: threads take a while to start */
    }
    if (nnb_load32_relaxed(&g->closing)) {
        rc = -EPIPE;
    } else if (state == FREE && !is_saturated(g)) {
        nnb_store_relaxed(&g->lead, word_of(w, LOOKING));
        nnb_store32_relaxed(&g->waiting, 0);
        w->role = LEADS;
        rc = 0;
    } else {
        w->next_parked = g->parked;
        g->parked = w;
        count_up(&g->n_parked);
        int is_shared = nnb_load32_relaxed(&g->n_live) > 1;
        if (state == FREE || (is_shared && (state == BUSY || nnb_load32_relaxed(&g->changed))))
            arm(g);
    }
    while (rc == 1) {
        uint64_t ns = g->watchman == w ? TICK_NS : has_too_many(g) ? KEEP_NS : 0;
        pthread_mutex_unlock(&g->lock);
        int is_over = wait_for_bell(&w->bell, ns);
        pthread_mutex_lock(&g->lock);
        if (w->role == LEADS) { /* handed over */
            rc = 0;
        } else if (nnb_load32_relaxed(&g->closing)) {
            unpark(w);
            rc = -EPIPE;
        } else if (g->watchman == w && tick(w)) {
            unpark(w);
            w->role = LEADS;
            rc = 0;
        } else if (is_over && ns == KEEP_NS && g->watchman != w && has_too_many(g)) {
            unpark(w);
            rc = -ESHUTDOWN;
        }
    }
    if (rc < 0)
        retire(g, w);
    pthread_mutex_unlock(&g->lock);
    return rc;
}

void nnb_worker_destroy(nnb_worker *w)
{
    nnb_group *g = w->group;
    if (g->magic != MAGIC)
        return;
    if (w->seat && w->role != ATTACHED && !w->ended) {
        nnb_server_set_result(w->seat->server, &(nnb_result){.status = -1}); /* no status: a general failure */
        if (conclude(w) >= NNB_BURST_ENDED) {
            w->ended = 0; /* the caller does not know: another worker finds it */
            nnb_server_hang_up(w->seat->server);
        }
    }
    if (w->seat)
        give_back(w);
    pthread_mutex_lock(&g->lock);
    if (w->role == LEADS)
        hand_on(g);
    retire(g, w);
    pthread_mutex_unlock(&g->lock);
    free(w);
}

/* ---- the loop's steps ------------------------------------------------------------------------------------------- */

int nnb_group_ran_long(const nnb_worker *w) { return w->role == DETACHED; }

uint32_t nnb_group_spins(const nnb_worker *w)
{
    const nnb_group *g = w->group;
    if (w->role == ATTACHED)
        return SPINS;
    return w->role == LEADS && may_poll(g) && has_window(g) ? SPINS : 0;
}

int nnb_group_answer(nnb_worker *w)
{
    if (w->group->magic != MAGIC)
        return -ECHILD;
    return w->seat && w->role != ATTACHED ? conclude(w) : 0;
}

int nnb_group_try(nnb_worker *w, uint32_t spins)
{
    return w->role == ATTACHED ? follow(w, spins) : w->role == LEADS ? lead(w, spins) : -EAGAIN;
}

int nnb_group_next(nnb_worker *w)
{
    int rc = nnb_group_answer(w);
    while (!rc) {
        if (w->role == NONE && (rc = park(w)) < 0)
            return rc;
        rc = nnb_group_try(w, 0);
        if (rc == -EAGAIN)
            rc = 0;
        else
            return rc;
    }
    return rc;
}
