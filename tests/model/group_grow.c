/* A burst joins for which all lists are too short, while the leader looks at them and begins a run: both bursts are served,
 * and what was there before is freed. One more worker is asked for if the leader knows of both, once until it comes. */
#include "group.h"

static void *lead_on(void *unused)
{
    nnb_worker *w = workers[0];
    int rc = begin(w);
    if (rc == -EUSERS) {
        assert(nnb_worker_create(&workers[1], group) == 0);
        rc = begin(w);
    }
    assert(rc >= 0 && w->burst->number == 0 && nnb_group_answer(w) == 0);
    assert(next_request(w)->number == 1 && nnb_group_answer(w) == 0);
    return unused;
}

static void *come(void *unused)
{
    join(1, 0);
    send(1);
    return unused;
}

static void *end_all(void *unused)
{
    assert(servers[0].answered == 1 && servers[1].answered == 1 && group->mine_room == 2);
    if (workers[1]) {
        assert(line_up(group, workers[1]) == 1 && !group->asked_ns);
        unpark(group, workers[1]);
        nnb_worker_destroy(workers[1]);
    }
    nnb_worker_destroy(workers[0]);
    nnb_group_destroy(group);
    return unused;
}

int main(void)
{
    set_up(1, 1);
    group->room = 1;
    send(0);
    begin_to_lead(workers[0]);
    nnb_look_at_all(group);
    pthread_t a, b;
    pthread_create(&a, NULL, lead_on, NULL);
    pthread_create(&b, NULL, come, NULL);
    pthread_join(a, NULL);
    pthread_join(b, NULL);
    pthread_create(&a, NULL, end_all, NULL);
    return 0;
}
