/* The leader's looks at the queues of a group, and when it sleeps.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * The leader looks at queues in service in every round. It looks at hot queues, which were used lately, before each
 * request, or less often if there are many. It looks at the others still less often.
 */
#include <stdlib.h>

#include "nnb_group.h"

#define COLD_NS 2000000u /* a queue without packets for so long is no longer hot */
#define HOT_LOOKS 8u     /* looks at hot queues for each served request */
#define COLD_LOOKS 2u    /* looks at all queues for each served request */
#define MOST_DOUBTS 16u  /* enough halvings for a window of milliseconds */

static int grow_lists(nnb_group *g, uint32_t n)
{
    if (nnb_schedule_reserve(&g->schedule, n) < 0)
        return -ENOMEM;
    if (n <= g->mine_room)
        return 0;
    nnb_burst **mine = realloc(g->mine, n * sizeof(*mine));
    if (mine)
        g->mine = mine;
    nnb_burst **hot = realloc(g->hot, n * sizeof(*hot));
    if (hot)
        g->hot = hot;
    if (!mine || !hot)
        return -ENOMEM;
    g->mine_room = n;
    return 0;
}

void nnb_look_refresh(nnb_group *g)
{
    pthread_mutex_lock(&g->lock);
    nnb_store32_relaxed(&g->changed, 0);
    if (grow_lists(g, g->room) < 0) {
        nnb_store32_relaxed(&g->changed, 1); /* out of memory: new bursts must wait */
        pthread_mutex_unlock(&g->lock);
        return;
    }
    g->n_mine = g->n_hot = 0;
    for (uint32_t i = 0; i < g->room; i++)
        if (g->bursts[i] && g->bursts[i]->queue.batcher)
            nnb_batcher_clear(g->bursts[i]->queue.batcher);
    while (g->dead) {
        nnb_burst *b = g->dead;
        g->dead = b->next_dead;
        if (b->queue.batcher)
            nnb_batcher_clear(b->queue.batcher);
        free(b);
    }
    for (uint32_t i = 0; i < g->room; i++) {
        nnb_burst *b = g->bursts[i];
        if (b && b->queue.batcher)
            nnb_batcher_add(b->queue.batcher, &b->queue);
        if (!b || b->is_away)
            continue;
        g->mine[g->n_mine++] = b;
        if (b->is_hot)
            g->hot[g->n_hot++] = b;
    }
    pthread_mutex_unlock(&g->lock);
}

void nnb_look_heat(nnb_group *g, nnb_burst *b)
{
    b->used_ns = g->now_ns;
    if (!b->is_hot) {
        b->is_hot = 1;
        g->hot[g->n_hot++] = b;
    }
}

static void cool(nnb_group *g)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < g->n_hot; i++) {
        nnb_burst *b = g->hot[i];
        b->is_hot = b->queue.is_ready || nnb_load32_relaxed(&b->taken) || g->now_ns - b->used_ns < COLD_NS;
        if (b->is_hot)
            g->hot[n++] = b;
    }
    g->n_hot = n;
}

int nnb_burst_is_free(const nnb_burst *b)
{
    return !b->queue.is_ready && !nnb_load32_acquire(&b->taken); /* SYNC POINT: give_back <-> take_up */
}

int nnb_burst_has_news(nnb_burst *b) { return nnb_mq_poll(b->inbox->mq) != 0 || nnb_burst_is_over(b); }

void nnb_group_enqueue(nnb_group *g, nnb_burst *b)
{
    b->queue.is_over = nnb_burst_is_over(b);
    b->queue.joins = nnb_server_joins(b->server);
    nnb_schedule_enqueue(&g->schedule, &b->queue, g->now_ns);
}

static int look_at(nnb_group *g, nnb_burst *b)
{
    if (!nnb_burst_is_free(b) || nnb_mq_poll(b->inbox->mq) == 0)
        return 0;
    nnb_group_enqueue(g, b);
    return 1;
}

/* Looks at the queues in service. Returns 1 if one is ready. */
int nnb_look_at_slots(nnb_group *g)
{
    int found = 0;
    for (uint32_t i = 0; i < g->schedule.n_slots; i++)
        found |= look_at(g, (nnb_burst *)g->schedule.slots[i]);
    return found;
}

void nnb_look_at_all(nnb_group *g)
{
    g->picks_hot = g->picks_all = 0;
    g->is_slow = 0;
    for (uint32_t i = 0; i < g->n_mine; i++) {
        nnb_burst *b = g->mine[i];
        if (nnb_burst_is_free(b) && nnb_burst_has_news(b)) {
            nnb_group_enqueue(g, b);
            nnb_look_heat(g, b);
        } else if (b->queue.is_ready) {
            b->queue.is_over = nnb_burst_is_over(b);
        }
    }
}

/* Looks at all queues, or at the hot ones, as often as they are due. */
void nnb_look_around(nnb_group *g)
{
    if (g->is_slow || g->picks_all * COLD_LOOKS >= g->n_mine) {
        nnb_look_at_all(g);
    } else if (!g->schedule.n_ready || g->picks_hot * HOT_LOOKS >= g->n_hot) {
        g->picks_hot = 0;
        for (uint32_t i = 0; i < g->n_hot; i++)
            look_at(g, g->hot[i]);
    }
}

uint64_t nnb_look_window(const nnb_group *g)
{
    for (uint32_t i = 0; i < g->n_hot; i++) {
        const nnb_burst *b = g->hot[i];
        if (!nnb_load32_relaxed(&b->taken) && b->inbox->window_ns) /* a burst that is over stays taken */
            return b->inbox->window_ns >> g->doubts;
    }
    return 0;
}

void nnb_look_found(nnb_group *g, const nnb_burst *b)
{
    int is_late = g->slept_ns && g->now_ns - g->slept_ns >= b->inbox->window_ns;
    g->doubts = is_late ? g->doubts + (g->doubts < MOST_DOUBTS) : 0;
    g->idle_since = g->slept_ns = 0;
}

void nnb_look_idle(nnb_group *g)
{
    g->now_ns = nnb_now_ns();
    nnb_look_at_all(g);
    nnb_load load;
    nnb_group_load(g, &load);
    if (nnb_schedule_may_pick(&g->schedule, &load, g->now_ns))
        return;
    if (!g->idle_since)
        g->idle_since = g->now_ns;
    if (g->now_ns - g->idle_since < nnb_look_window(g))
        return;
    if (!g->slept_ns)
        g->slept_ns = g->idle_since;
    nnb_sleep_on_all(g);
    cool(g);
    nnb_look_at_all(g);
    g->idle_since = 0;
}
