/* What the programs over the files of a group share: servers that only take and answer, and a group that is set up by hand.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * Time stands still here, too: a parked monitor does not tick by itself, so what only a tick would mend is an error.
 */
#ifndef GROUP_H
#define GROUP_H

#include <limits.h>
#include <linux/futex.h>

#define STEP 8
#define PAGES 1 /* the group; all else is of the heap */
#define PAGE 2048
#include "model.h"

#include "event_flag.c"

#include "watch.c"

#include "burst_channel.c"

#include "nnb_server.h"

void nnb_mq_close(nnb_mq *q) { (void)q; }

struct nnb_server {
    nnb_channel inbox, outbox;
    int is_new;   /* its requests have to be bound first */
    int is_gone;  /* nobody takes its answers */
    int answered; /* plain memory, as all of it: whose burst it is has it for itself */
};

nnb_channel *nnb_server_inbox(nnb_server *s) { return &s->inbox; }
nnb_channel *nnb_server_outbox(nnb_server *s) { return &s->outbox; } /* without a window no queue is in service */
void nnb_ask_for_short_slices(void) {}
void nnb_server_share_thread(nnb_server *s) { (void)s; }
int nnb_server_joins(const nnb_server *s) { return s == NULL; } /* none: nothing runs as a batch here */

int nnb_server_try(nnb_server *s, uint32_t spins)
{
    uint8_t packet[4 * NNB_DATUM_SIZE];
    int rc = nnb_channel_try(&s->inbox, packet, spins);
    return rc < 0 ? rc : s->is_new ? NNB_PLAN_NEW : 0;
}

int nnb_server_reply(nnb_server *s)
{
    s->answered++;
    return s->is_gone ? -EPIPE : 0;
}

int nnb_server_set_result(nnb_server *s, const nnb_result *result) { return s && result ? 0 : -EINVAL; }
void nnb_server_hang_up(nnb_server *s) { nnb_channel_hang_up(&s->inbox); }

#ifndef BURSTS
#define BURSTS 2
#endif
#ifndef WORKERS
#define WORKERS 2
#endif
#ifndef CPUS
#define CPUS 2
#endif

/* Waits for all words at once, as for one: see model_futex_wait. */
#define MOST_WORDS (BURSTS + 1)
static long model_SYS_futex_waitv(const struct futex_waitv *words, uint32_t n, int flags, const void *t, int clock)
{
    if (!n) {
        errno = EINVAL;
        return -1;
    }
    assert(n == 2 || n == MOST_WORDS);
    nnb_a32 *at[MOST_WORDS];
    uint32_t bits[MOST_WORDS], before[MOST_WORDS], last = n - 1;
    for (uint32_t i = 0; i < n; i++) {
        nnb_a32 *word = (nnb_a32 *)(uintptr_t)words[i].uaddr;
        at[i] = model_sleep(word, ~(uint32_t)words[i].val, &bits[i], &before[i]);
        if (nnb_load32_relaxed(word) != words[i].val) {
            errno = EAGAIN;
            return -1;
        }
    }
    if (model_ends_early())
        return -1;
    AWAIT(WOKEN(at[0], bits[0], before[0]) | WOKEN(at[1], bits[1], before[1]) | WOKEN(at[last], bits[last], before[last]));
    return 0;
}

/* What the heap has is zero, field by field, and gone when it is freed. (A head is never used: without one the checker does
 * not know the type that it sets to zero.) */
#define HEAD 16
static void *model_new(size_t size);
static void model_free(void *p)
{
    if (p)
        free((uint8_t *)p - HEAD);
}
static void *model_grow(uint64_t *old, size_t size)
{
    uint64_t n = size / sizeof *old, *grown = (uint64_t *)malloc(HEAD + size) + HEAD / sizeof *old;
    for (size_t i = 0; i < n; i++)
        grown[i] = old && i < n / 2 ? old[i] : 0; /* all grow to twice their size */
    model_free(old);
    return grown;
}
#undef calloc
#undef realloc
#define calloc(n, size) model_new(size)
#define realloc(old, size) model_grow((uint64_t *)(old), size)
#define free(p) model_free(p)
#define pthread_attr_init(attr) ((void)0)
#define pthread_attr_setstacksize(attr, size) ((void)0)
#define pthread_attr_destroy(attr) ((void)0)
#define qsort(...) ((void)0)

#define _SIGNAL_H /* no signals, either */
typedef int sigset_t;
#define sigfillset(set) (*(set) = 0)
#define pthread_sigmask(how, set, old) ((void)(old))

#include "nnb_group.h"
#undef NNB_LOOKS_PER_CLOCK
#define NNB_LOOKS_PER_CLOCK 1 /* where time passes, it does so in each round */

/* A name that these files have in common with files before them. */
#define take take_request

/* Field by field, as the checker sees memory. These files copy and compare nothing but loads. */
#undef memcmp
#undef memcpy
#define memcmp(a, b, n) model_differs(a, b)
#define memcpy(to, from, n) model_copy_load(to, from)
static int model_differs(const nnb_load *a, const nnb_load *b)
{
    int differs = a->cpus != b->cpus || a->n_detached != b->n_detached;
    for (int i = 0; i < NNB_PRIORITIES; i++)
        differs |= a->n_runs[i] != b->n_runs[i];
    return differs;
}
static void model_copy_load(nnb_load *to, const nnb_load *from)
{
    to->cpus = from->cpus;
    to->n_detached = from->n_detached;
    for (int i = 0; i < NNB_PRIORITIES; i++)
        to->n_runs[i] = from->n_runs[i];
}
#undef sched_yield
#define sched_yield() ((void)0) /* while it polls: no more than a pause */

#include "schedule.c"

#include "group_look.c"

#include "group_sleep.c"

#include "group_lead.c"

#include "group.c"

#include "group_run.c"

#define NEW(type)                                    \
    static void *model_new_##type(void)              \
    {                                                \
        struct {                                     \
            uint8_t head[HEAD];                      \
            type it;                                 \
        } *p = malloc(sizeof *p);                    \
        __builtin_memset(&p->it, 0, sizeof p->it);   \
        return &p->it;                               \
    }
NEW(nnb_burst)
NEW(nnb_member)
NEW(nnb_worker)
NEW(nnb_sleeper_thread)
static void *model_new(size_t size)
{
    return size == sizeof(nnb_burst)    ? model_new_nnb_burst()
           : size == sizeof(nnb_member) ? model_new_nnb_member()
           : size == sizeof(nnb_worker) ? model_new_nnb_worker()
                                        : model_new_nnb_sleeper_thread();
}

static ring rings[BURSTS], answers[BURSTS]; /* clients sleep: nobody clears their bits or looks at their answers */
static nnb_mq sending[BURSTS], receiving[BURSTS], answering[BURSTS];
static nnb_channel senders[BURSTS];
static nnb_server servers[BURSTS];
static uint64_t counters[2 * BURSTS][NNB_COUNTERS];
static const uint8_t request[2 * NNB_DATUM_SIZE] = {[8] = 2, [24] = 1};
static nnb_group *group;
static nnb_worker *workers[WORKERS];

_Static_assert(sizeof(nnb_group) <= PAGE, "a group is more than a page");

static void send(int burst) { assert(nnb_channel_send(&senders[burst], request, 2) == 0); }

/* A burst of a client of its own. */
static void join(int burst, uint32_t priority)
{
    assert(nnb_group_add(group, &servers[burst], (uint64_t)burst + 1, priority, NULL, 0) == burst);
}

/* What has changed in the group, for its leader. */
static void catch_up(void)
{
    if (nnb_load32_relaxed(&group->changed))
        nnb_look_refresh(group);
    if (nnb_load32_relaxed(&group->is_owed))
        nnb_group_settle(group);
}

static void begin_to_lead(nnb_worker *w)
{
    w->role = NNB_LEADS;
    nnb_store_relaxed(&group->lead, nnb_lead_word(w, NNB_LEAD_LOOKING));
    catch_up();
}

static void set_up(int n_bursts, uint32_t n_workers)
{
    assert(nnb_group_create(&group, CPUS, 16) == 0);
    for (int i = 0; i < BURSTS; i++) {
        attach(&sending[i], &rings[i], NNB_DATUM_SIZE, 4, NNB_SYNCHRONIZED, NNB_MQ_EXCLUSIVE);
        attach(&receiving[i], &rings[i], NNB_DATUM_SIZE, 4, NNB_SYNCHRONIZED, NNB_MQ_EXCLUSIVE);
        assert(nnb_channel_init(&senders[i], &sending[i], 8, 0, counters[2 * i]) == 0);
        assert(nnb_channel_init(&servers[i].inbox, &receiving[i], 8, 0, counters[2 * i + 1]) == 0);
        attach(&answering[i], &answers[i], NNB_DATUM_SIZE, 4, NNB_SYNCHRONIZED, NNB_MQ_EXCLUSIVE);
        servers[i].outbox.mq = &answering[i];
        if (i < n_bursts)
            join(i, 0);
    }
    for (uint32_t i = 0; i < n_workers; i++)
        assert(nnb_worker_create(&workers[i], group) == 0);
    nnb_store32_relaxed(&group->bell, 0); /* of those that have joined */
}

/* Looks as a leader does, and takes the next request. */
static nnb_burst *look(nnb_worker *w)
{
    nnb_look_at_all(group);
    nnb_burst *next = pick(group);
    assert(!next || take(w, next) >= 0);
    return next;
}

/* The same, and sleeps until there is one. */
static nnb_burst *next_request(nnb_worker *w)
{
    nnb_burst *next;
    while (!(next = look(w))) {
        nnb_sleep_on_all(group);
        catch_up();
    }
    return next;
}

/* Has a worker begin a run in a worker of its own, as if it were new. */
static void begin_detached(nnb_worker *w)
{
    begin_to_lead(w);
    nnb_store32_relaxed(&next_request(w)->taken, 1);
    nnb_lead_detach(w);
}

#endif
