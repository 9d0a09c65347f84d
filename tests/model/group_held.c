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

static void *lead_on(void *unused)
{
    nnb_burst *next;
    while (!(next = pick(group)))
        nnb_sleep_on_all(group);
    assert(take(workers[0], next) >= 0 && next->number == 0);
    return unused;
}

static void *end_run(void *unused)
{
    assert(nnb_group_answer(workers[1]) == 0 && workers[1]->role == NNB_NO_ROLE);
    return unused;
}

int main(void)
{
    set_up(2);
    nnb_store32_relaxed(&group->ticking, 1);
    nnb_look_refresh(group);
    send(1);
    workers[1]->role = NNB_LEADS;
    nnb_look_at_all(group);
    nnb_store_relaxed(&group->lead, nnb_lead_word(workers[1], NNB_LEAD_LOOKING));
    nnb_burst *next = pick(group);
    nnb_store32_relaxed(&next->taken, 1);
    assert(next->number == 1 && take(workers[1], next) >= 0);
    nnb_lead_detach(workers[1]);
    nnb_count_up(&group->n_runs[0]); /* another one, so that there is no processor */
    workers[0]->role = NNB_LEADS;
    nnb_store_relaxed(&group->lead, nnb_lead_word(workers[0], NNB_LEAD_LOOKING));
    send(0);
    nnb_look_at_all(group);
    assert(!pick(group));
    pthread_t a, b;
    pthread_create(&a, NULL, lead_on, NULL);
    pthread_create(&b, NULL, end_run, NULL);
    return 0;
}
