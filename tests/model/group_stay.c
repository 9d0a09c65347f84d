/* The monitor takes the lead from a run that lasts, while the run ends: its worker leads on, or gives the burst back, or stays
 * with it while the new leader sleeps, polls its queue, and then leaves the group. The next request of that burst is run
 * once, by the worker or by the leader. */
#define BURSTS 1
#include "group.h"

static void *lead_on(void *unused)
{
    nnb_worker *w = workers[1];
    pthread_mutex_lock(&group->lock);
    int leads = tick(w);
    if (leads) {
        unpark(group, w);
        w->role = NNB_LEADS;
    }
    pthread_mutex_unlock(&group->lock);
    while (leads) {
        nnb_sleep_on_all(group);
        if (nnb_load32_relaxed(&group->closing))
            break;
        if (look(w)) {
            assert(nnb_server_reply(&servers[0]) == 0);
            break;
        }
    }
    return unused;
}

static void *end_run(void *unused)
{
    nnb_worker *w = workers[0];
    assert(nnb_group_answer(w) == 0);
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
    group->bursts[0]->queue.polls = group->bursts[0]->window_ns = 1;
    send(0);
    begin_to_lead(workers[0]);
    nnb_look_at_all(group);
    assert(begin(workers[0]) >= 0 && workers[0]->role == NNB_INLINE);
    send(0);
    nnb_worker *w = workers[1];
    group->parked = group->monitor = w;
    nnb_store32_relaxed(&group->n_parked, 1);
    nnb_store32_relaxed(&group->ticking, 1);
    w->seen_lead = nnb_load_relaxed(&group->lead);
    pthread_t a, b;
    pthread_create(&a, NULL, lead_on, NULL);
    pthread_create(&b, NULL, end_run, NULL);
    pthread_join(a, NULL);
    pthread_join(b, NULL);
    assert(servers[0].answered == 2);
    return 0;
}
