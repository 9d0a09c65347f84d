/* The leader of a group begins a run while the monitor, who has seen nothing for long, goes to rest, and another client's
 * burst joins, of which the leader knows or not: the run is not without a monitor. */
#include "group.h"

static void *lead_on(void *unused)
{
    catch_up();
    assert(begin(workers[0]) >= 0 && workers[0]->role == NNB_INLINE);
    return unused;
}

static void *watch_over(void *unused)
{
    pthread_mutex_lock(&group->lock);
    assert(tick(workers[1]) == 0);
    pthread_mutex_unlock(&group->lock);
    return unused;
}

static void *come(void *unused) { return join(1, 0), unused; }

int main(void)
{
    set_up(1, 2);
    nnb_worker *w = workers[1];
    begin_to_lead(workers[0]);
    group->parked = group->monitor = w;
    nnb_store32_relaxed(&group->n_parked, 1);
    nnb_store32_relaxed(&group->ticking, 1);
    w->idle_ticks = IDLE_TICKS - 1;
    w->seen_lead = nnb_load_relaxed(&group->lead);
    send(0);
    nnb_look_at_all(group);
    pthread_t a, b, c;
    pthread_create(&a, NULL, lead_on, NULL);
    pthread_create(&b, NULL, watch_over, NULL);
    pthread_create(&c, NULL, come, NULL);
    pthread_join(a, NULL);
    pthread_join(b, NULL);
    pthread_join(c, NULL);
    assert(nnb_load32_relaxed(&group->ticking) && group->monitor == w);
    return 0;
}
