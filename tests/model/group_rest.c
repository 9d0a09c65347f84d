/* The leader of a group begins a run while the watchman, who has seen nothing for long, goes to rest: the run is not
 * without a watchman. */
#define STEP 8
#define PAGES 16
#define PAGE 1024
#include "model.h"

#include "event_flag.c"

#include "watch.c"

#include "burst_channel.c"

#include "group.h"

#include "burst_group.c"

static void *lead_on(void *unused)
{
    assert(begin(workers[0]) >= 0 && workers[0]->role == INLINE);
    return unused;
}

static void *watch_over(void *unused)
{
    pthread_mutex_lock(&group->lock);
    assert(tick(workers[1]) == 0);
    pthread_mutex_unlock(&group->lock);
    return unused;
}

int main(void)
{
    set_up(2);
    nnb_worker *w = workers[1];
    workers[0]->role = LEADS;
    nnb_store_relaxed(&group->lead, word_of(workers[0], LOOKING));
    group->parked = group->watchman = w;
    nnb_store32_relaxed(&group->n_parked, 1);
    nnb_store32_relaxed(&group->ticking, 1);
    w->idle_ticks = IDLE_TICKS - 1;
    w->seen_lead = nnb_load_relaxed(&group->lead);
    send(0);
    refresh(group);
    look_at_all(group);
    pthread_t a, b;
    pthread_create(&a, NULL, lead_on, NULL);
    pthread_create(&b, NULL, watch_over, NULL);
    pthread_join(a, NULL);
    pthread_join(b, NULL);
    assert(nnb_load32_relaxed(&group->ticking) && group->watchman == w);
    return 0;
}
