/* A request waits for a processor, and the leader goes to sleep, while the last of the runs that it waits for ends: it is
 * run. */
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
    seat *m;
    while (!(m = pick(group)))
        sleep_on_all(group);
    assert(take(workers[0], m) >= 0 && m->number == 0);
    return unused;
}

static void *end_run(void *unused)
{
    assert(nnb_group_answer(workers[1]) == 0 && workers[1]->role == NONE);
    return unused;
}

int main(void)
{
    set_up(2);
    nnb_store32_relaxed(&group->ticking, 1);
    refresh(group);
    send(1);
    workers[1]->role = LEADS;
    look_at_all(group);
    nnb_store_relaxed(&group->lead, word_of(workers[1], LOOKING));
    seat *m = pick(group);
    nnb_store32_relaxed(&m->taken, 1);
    assert(m->number == 1 && take(workers[1], m) >= 0);
    detach(workers[1]);
    count_up(&group->n_runs[0]); /* another one, so that there is no processor */
    workers[0]->role = LEADS;
    nnb_store_relaxed(&group->lead, word_of(workers[0], LOOKING));
    send(0);
    look_at_all(group);
    assert(!may_pick(group));
    pthread_t a, b;
    pthread_create(&a, NULL, lead_on, NULL);
    pthread_create(&b, NULL, end_run, NULL);
    return 0;
}
