/* A request waits for a processor, and the leader goes to sleep, while the last of the runs that it waits for ends: it is
 * run. */
#include "group.h"

static void *lead_on(void *unused)
{
    assert(next_request(workers[0])->number == 0);
    return unused;
}

static void *end_run(void *unused)
{
    assert(nnb_group_answer(workers[1]) == 0 && workers[1]->role == NNB_NO_ROLE);
    return unused;
}

int main(void)
{
    set_up(BURSTS, 2);
    nnb_store32_relaxed(&group->ticking, 1);
    send(1);
    begin_detached(workers[1]);
    nnb_count_up(&group->n_runs[0]); /* another one, so that there is no processor */
    begin_to_lead(workers[0]);
    send(0);
    nnb_look_at_all(group);
    assert(!pick(group));
    pthread_t a, b;
    pthread_create(&a, NULL, lead_on, NULL);
    pthread_create(&b, NULL, end_run, NULL);
    return 0;
}
