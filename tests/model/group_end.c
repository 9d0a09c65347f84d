/* A burst's run ends because its client is gone, whose connection leaves the group at that time, while another client's
 * burst joins and the leader looks: what both clients had is freed, once, when nobody looks at it any more. */
#include "group.h"

static void *lead_on(void *unused)
{
    catch_up();
    assert(!look(workers[0]));
    return unused;
}

static void *end_run(void *unused)
{
    nnb_worker *w = workers[1];
    servers[0].is_gone = 1;
    assert(nnb_group_answer(w) >= NNB_BURST_ENDED);
    assert(nnb_group_answer(w) == 0 && w->role == NNB_NO_ROLE);
    nnb_worker_destroy(w);
    return unused;
}

static void *leave_and_come(void *unused)
{
    nnb_group_leave(group, 1);
    assert(nnb_group_add(group, &servers[1], 2, 0, NULL, 0) >= 0);
    return unused;
}

static void *end_all(void *unused)
{
    send(1);
    catch_up();
    assert(look(workers[0])->server == &servers[1] && !group->dead);
    nnb_worker_destroy(workers[0]);
    nnb_group_destroy(group);
    return unused;
}

int main(void)
{
    set_up(1, 2);
    send(0);
    begin_detached(workers[1]);
    begin_to_lead(workers[0]);
    pthread_t a, b, c;
    pthread_create(&a, NULL, lead_on, NULL);
    pthread_create(&b, NULL, end_run, NULL);
    pthread_create(&c, NULL, leave_and_come, NULL);
    pthread_join(a, NULL);
    pthread_join(b, NULL);
    pthread_join(c, NULL);
    pthread_create(&a, NULL, end_all, NULL);
    return 0;
}
