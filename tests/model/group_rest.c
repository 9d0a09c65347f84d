/* The leader of a group begins a run while the monitor, who has seen nothing for long, goes to rest: the run is not
 * without a monitor. */
#define STEP 8
#define PAGES 16
#define PAGE 1024
#include "model.h"

#include "event_flag.c"

#include "watch.c"

#include "burst_channel.c"

#include "group.h"

static void *lead_on(void *unused)
{
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

int main(void)
{
    set_up(2);
    nnb_worker *w = workers[1];
    workers[0]->role = NNB_LEADS;
    nnb_store_relaxed(&group->lead, nnb_lead_word(workers[0], NNB_LEAD_LOOKING));
    group->parked = group->monitor = w;
    nnb_store32_relaxed(&group->n_parked, 1);
    nnb_store32_relaxed(&group->ticking, 1);
    w->idle_ticks = IDLE_TICKS - 1;
    w->seen_lead = nnb_load_relaxed(&group->lead);
    send(0);
    nnb_look_refresh(group);
    nnb_look_at_all(group);
    pthread_t a, b;
    pthread_create(&a, NULL, lead_on, NULL);
    pthread_create(&b, NULL, watch_over, NULL);
    pthread_join(a, NULL);
    pthread_join(b, NULL);
    assert(nnb_load32_relaxed(&group->ticking) && group->monitor == w);
    return 0;
}
