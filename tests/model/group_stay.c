/* A worker whose long run is over stays with its burst while the leader sleeps, polls its queue, and leaves the group. The
 * next request of that burst is run once, by the worker or, when it has given the burst back, by the leader. */
#define BURSTS 1
#include "group.h"

static void *lead_on(void *unused)
{
    nnb_burst *next;
    send(0);
    do {
        nnb_sleep_on_all(group);
        if (nnb_load32_relaxed(&group->closing))
            return unused;
        nnb_look_at_all(group);
    } while (!(next = pick(group)));
    assert(take(workers[0], next) >= 0 && nnb_server_reply(next->server) == 0);
    return unused;
}

static void *poll_on(void *unused)
{
    nnb_worker *w = workers[1];
    if (nnb_group_try(w, 1) >= 0) {
        assert(nnb_group_answer(w) == 0);
        nnb_group_close(group);
    }
    nnb_worker_destroy(w);
    return unused;
}

int main(void)
{
    set_up(BURSTS, 2);
    group->bursts[0]->window_ns = 1;
    send(0);
    begin_detached(workers[1]);
    begin_to_lead(workers[0]);
    nnb_store32_relaxed(&group->asleep, 1); /* as it does in a moment */
    assert(nnb_group_answer(workers[1]) == 0 && workers[1]->role == NNB_ATTACHED);
    pthread_t a, c;
    pthread_create(&a, NULL, lead_on, NULL);
    pthread_create(&c, NULL, poll_on, NULL);
    pthread_join(a, NULL);
    pthread_join(c, NULL);
    assert(servers[0].answered == 2);
    return 0;
}
