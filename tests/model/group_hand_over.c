/* A leader leaves the lead before it runs a request that has to be bound first, while another listener comes: the next
 * request is run by the one of the two that leads then, and who does not lead sleeps until the group is closed. */
#include "group.h"

static void run_next(nnb_worker *w)
{
    nnb_look_at_all(group);
    nnb_burst *next = pick(group);
    assert(next && next->number == 1 && take(w, next) >= 0);
    assert(nnb_server_reply(next->server) == 0);
}

static void *run_new(void *unused)
{
    nnb_worker *w = workers[0];
    assert(begin(w) >= 0 && w->role == NNB_DETACHED);
    assert(nnb_group_answer(w) == 0);
    if (w->role == NNB_LEADS) {
        run_next(w);
        nnb_group_close(group);
    }
    return unused;
}

static void *come(void *unused)
{
    int rc = nnb_worker_park(workers[1]);
    assert(rc == 0 || (rc == -EPIPE && workers[0]->role == NNB_LEADS));
    if (rc == 0)
        run_next(workers[1]);
    return unused;
}

int main(void)
{
    set_up(BURSTS, 2);
    servers[0].is_new = 1;
    begin_to_lead(workers[0]);
    send(0);
    nnb_look_at_all(group);
    send(1);
    group->asked_ns = nnb_now_ns(); /* for the one that comes */
    LET_TIME_PASS();
    pthread_t a, b;
    pthread_create(&a, NULL, run_new, NULL);
    pthread_create(&b, NULL, come, NULL);
    pthread_join(a, NULL);
    pthread_join(b, NULL);
    assert(servers[0].answered == 1 && servers[1].answered == 1);
    return 0;
}
