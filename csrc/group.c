/* The members of a group: bursts, their clients and workers.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/mman.h>

#include "nnb_group.h"

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
    nnb_schedule_init(&g->schedule, g->cpus);
    g->words = nnb_sleep_words(most_words);
    g->magic = NNB_GROUP_MAGIC;
    *out = g;
    return 0;
}

void nnb_group_wake_all(nnb_group *g)
{
    if (g->magic != NNB_GROUP_MAGIC)
        return;
    pthread_mutex_lock(&g->lock);
    for (nnb_sleeper_thread *x = g->sleepers; x; x = x->next)
        nnb_ring(&x->bell);
    nnb_store32_relaxed(&g->changed, 1);
    pthread_mutex_unlock(&g->lock);
    nnb_ring(&g->bell);
}

void nnb_group_close(nnb_group *g)
{
    if (g->magic != NNB_GROUP_MAGIC)
        return;
    nnb_store32_relaxed(&g->closing, 1);
    pthread_mutex_lock(&g->lock);
    for (nnb_worker *w = g->parked; w; w = w->next_parked)
        nnb_ring(&w->bell);
    pthread_mutex_unlock(&g->lock);
    nnb_group_wake_all(g);
}

void nnb_group_destroy(nnb_group *g)
{
    if (!g || g->magic != NNB_GROUP_MAGIC)
        return;
    nnb_group_close(g); /* so that the sleeper threads end */
    while (g->sleepers) {
        nnb_sleeper_thread *x = g->sleepers;
        g->sleepers = x->next;
        pthread_join(x->thread, NULL);
        free(x);
    }
    for (uint32_t i = 0; i < g->room; i++)
        free(g->bursts[i]);
    while (g->dead) {
        nnb_burst *b = g->dead;
        g->dead = b->next_dead;
        free(b);
    }
    while (g->members) {
        nnb_member *m = g->members;
        g->members = m->next;
        free(m);
    }
    free(g->bursts);
    free(g->mine);
    free(g->hot);
    nnb_schedule_fini(&g->schedule);
    pthread_mutex_destroy(&g->lock);
    munmap(g, sizeof(*g));
}

/* ---- clients --------------------------------------------------------------------------------------------------- */

/* Under lock: finds a client's account. NULL: there is none. */
static nnb_member *find_member(nnb_group *g, uint64_t number)
{
    nnb_member *m = g->members;
    while (m && m->number != number)
        m = m->next;
    return m;
}

static nnb_member *member(nnb_group *g, uint64_t number)
{
    nnb_member *m = find_member(g, number);
    if (!m && (m = calloc(1, sizeof(*m)))) {
        m->number = number;
        m->n_users = 1;
        m->next = g->members;
        g->members = m;
    }
    return m;
}

static void drop_member(nnb_group *g, nnb_member *m)
{
    if (--m->n_users)
        return;
    nnb_member **link = &g->members;
    while (*link != m)
        link = &(*link)->next;
    *link = m->next;
    free(m);
}

void nnb_group_leave(nnb_group *g, uint64_t client)
{
    if (g->magic != NNB_GROUP_MAGIC)
        return;
    pthread_mutex_lock(&g->lock);
    nnb_member *m = find_member(g, client);
    if (m)
        drop_member(g, m);
    pthread_mutex_unlock(&g->lock);
}

/* ---- bursts ---------------------------------------------------------------------------------------------------- */

/* Under lock: returns a free number for a burst, after making room, or an error. */
static int free_number(nnb_group *g)
{
    uint32_t i = 0;
    while (i < g->room && g->bursts[i])
        i++;
    if (nnb_load32_relaxed(&g->closing))
        return -ESHUTDOWN;
    if (i >= NNB_MAX_BURSTS)
        return -EMFILE;
    if (i == g->room) {
        uint32_t room = g->room ? 2 * g->room : 16;
        nnb_burst **bursts = realloc(g->bursts, room * sizeof(*bursts));
        if (!bursts)
            return -ENOMEM;
        memset(bursts + g->room, 0, (room - g->room) * sizeof(*bursts));
        g->bursts = bursts;
        g->room = room;
    }
    return (int)i;
}

static int join_group(nnb_group *g, nnb_burst *b, uint64_t client, uint32_t priority)
{
    int number = free_number(g);
    nnb_member *m = number < 0 ? NULL : member(g, client);
    if (!m)
        return number < 0 ? number : -ENOMEM;
    m->n_users++;
    nnb_server_share_thread(b->server);
    b->inbox = nnb_server_inbox(b->server);
    b->number = (uint32_t)number;
    b->queue.flow = &m->flow;
    b->queue.polls = b->inbox->window_ns != 0;
    b->queue.priority = priority < NNB_PRIORITIES ? priority : NNB_PRIORITIES - 1;
    g->bursts[number] = b;
    nnb_count_up(&g->n_live);
    nnb_count_up(&g->n_bursts[b->queue.priority]);
    nnb_store32_relaxed(&g->changed, 1);
    if (NNB_LEAD_STATE(nnb_load_relaxed(&g->lead)) != NNB_LEAD_FREE)
        nnb_group_arm(g); /* a present run may have begun without a monitor, as its burst was the only one */
    return number;
}

int nnb_group_add(nnb_group *g, nnb_server *s, uint64_t client, uint32_t priority, nnb_batcher *batcher,
                  uint64_t batch_wait_ns)
{
    if (g->magic != NNB_GROUP_MAGIC)
        return -ECHILD;
    nnb_burst *b = calloc(1, sizeof(*b));
    if (!b)
        return -ENOMEM;
    b->server = s;
    b->queue.batcher = batcher;
    b->queue.batch_wait_ns = batch_wait_ns;
    b->queue.left_ns = nnb_now_ns();
    pthread_mutex_lock(&g->lock);
    int rc = join_group(g, b, client, priority);
    pthread_mutex_unlock(&g->lock);
    if (rc < 0)
        free(b);
    else
        nnb_ring(&g->bell);
    return rc;
}

void nnb_group_bury(nnb_group *g, nnb_burst *b)
{
    g->bursts[b->number] = NULL;
    b->next_dead = g->dead;
    g->dead = b;
    nnb_count_down(&g->n_live);
    nnb_count_down(&g->n_bursts[b->queue.priority]);
    nnb_store32_relaxed(&g->changed, 1);
    drop_member(g, nnb_member_of(b));
}

/* ---- workers --------------------------------------------------------------------------------------------------- */

/* Under lock: returns a free number for a worker, to be used in the word `lead`. */
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

void nnb_worker_retire(nnb_worker *w)
{
    nnb_group *g = w->group;
    for (nnb_worker **link = &g->workers; *link; link = &(*link)->next)
        if (*link == w) {
            *link = w->next;
            g->n_workers--;
            return;
        }
}

uint32_t nnb_group_workers(nnb_group *g)
{
    pthread_mutex_lock(&g->lock);
    uint32_t n = g->n_workers;
    pthread_mutex_unlock(&g->lock);
    return n;
}
