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

#include "nnb_server.h"

void nnb_mq_close(nnb_mq *q) { (void)q; }

struct nnb_server {
    nnb_channel inbox, outbox;
    int is_new;   /* its requests have to be bound first */
    int answered; /* plain memory, as all of it: whose burst it is has it for itself */
};

nnb_channel *nnb_server_inbox(nnb_server *s) { return &s->inbox; }
nnb_channel *nnb_server_outbox(nnb_server *s) { return &s->outbox; } /* without a window no queue is in service */
void nnb_ask_for_short_slices(void) {}
void nnb_server_share_thread(nnb_server *s) { (void)s; }

int nnb_server_try(nnb_server *s, uint32_t spins)
{
    uint8_t packet[4 * NNB_DATUM_SIZE];
    int rc = nnb_channel_try(&s->inbox, packet, spins);
    return rc < 0 ? rc : s->is_new ? NNB_PLAN_NEW : 0;
}

int nnb_server_reply(nnb_server *s)
{
    s->answered++;
    return 0;
}

#define BURSTS 2
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

#undef realloc
#define realloc(old, size) calloc(1, size) /* nothing grows twice here, and new members are to be zero */
#define pthread_attr_init(attr) ((void)0)
#define pthread_attr_setstacksize(attr, size) ((void)0)
#define pthread_attr_destroy(attr) ((void)0)
#define qsort(...) ((void)0)

#define _SIGNAL_H /* no signals, either */
typedef int sigset_t;
#define sigfillset(set) (*(set) = 0)
#define pthread_sigmask(how, set, old) ((void)(old))

/* A name that these files have in common with files before them. */
#define take take_request

#include "schedule.c"

#include "group_look.c"

#include "group_sleep.c"

#include "group_lead.c"

#include "group.c"

#include "group_run.c"

#define WORKERS 2
static ring rings[BURSTS], answers[BURSTS]; /* clients sleep: nobody clears their bits or looks at their answers */
static nnb_mq sending[BURSTS], receiving[BURSTS], answering[BURSTS];
static nnb_channel senders[BURSTS];
static nnb_server servers[BURSTS];
static uint64_t counters[2 * BURSTS][NNB_COUNTERS];
static const uint8_t request[2 * NNB_DATUM_SIZE] = {[8] = 2, [24] = 1};
static nnb_group *group;
static nnb_worker *workers[WORKERS];

static void send(int burst) { assert(nnb_channel_send(&senders[burst], request, 2) == 0); }

static void set_up(uint32_t n_workers)
{
    assert(nnb_group_create(&group, 2, 16) == 0);
    for (int i = 0; i < BURSTS; i++) {
        attach(&sending[i], &rings[i], NNB_DATUM_SIZE, 4, NNB_SYNCHRONIZED, NNB_MQ_EXCLUSIVE);
        attach(&receiving[i], &rings[i], NNB_DATUM_SIZE, 4, NNB_SYNCHRONIZED, NNB_MQ_EXCLUSIVE);
        assert(nnb_channel_init(&senders[i], &sending[i], 8, 0, counters[2 * i]) == 0);
        assert(nnb_channel_init(&servers[i].inbox, &receiving[i], 8, 0, counters[2 * i + 1]) == 0);
        attach(&answering[i], &answers[i], NNB_DATUM_SIZE, 4, NNB_SYNCHRONIZED, NNB_MQ_EXCLUSIVE);
        servers[i].outbox.mq = &answering[i];
        assert(nnb_group_add(group, &servers[i], (uint64_t)i + 1, 0) == i);
    }
    for (uint32_t i = 0; i < n_workers; i++)
        assert(nnb_worker_create(&workers[i], group) == 0);
}


#endif
