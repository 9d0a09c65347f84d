/* A run ends while the monitor takes the lead from it, because it lasts: one of the two leads on, and the next request
 * of the same client is run once, by one that has the burst for itself. */
#include "group.h"

static void run_next(nnb_worker *w)
{
    nnb_burst *next = next_request(w);
    assert(next->number == 0 && nnb_server_reply(next->server) == 0);
}

static void *end_run(void *unused)
{
    nnb_worker *w = workers[0];
    assert(nnb_group_answer(w) == 0);
    assert(w->role == NNB_LEADS || w->role == NNB_NO_ROLE);
    if (w->role == NNB_LEADS)
        run_next(w);
    return unused;
}

static void *watch_over(void *unused)
{
    nnb_worker *w = workers[1];
    pthread_mutex_lock(&group->lock);
    int leads = tick(w);
    if (leads) {
        unpark(group, w);
        w->role = NNB_LEADS;
    }
    pthread_mutex_unlock(&group->lock);
    if (leads)
        run_next(w);
    return unused;
}

static void *begin_and_end(void *unused)
{
    assert(begin(workers[0]) >= 0 && workers[0]->role == NNB_INLINE);
    return end_run(unused);
}

int main(void)
{
    set_up(BURSTS, 2);
    nnb_worker *w = workers[1];
    begin_to_lead(workers[0]);
    group->parked = group->monitor = w;
    nnb_store32_relaxed(&group->n_parked, 1);
    nnb_store32_relaxed(&group->ticking, 1);
    send(0);
    nnb_look_at_all(group);
    send(0);
    w->seen_lead = (uint64_t)1 << 16 | nnb_lead_word(workers[0], NNB_LEAD_BUSY); /* the first run: a tick ago it was under way */
    pthread_t a, b;
    pthread_create(&a, NULL, begin_and_end, NULL);
    pthread_create(&b, NULL, watch_over, NULL);
    pthread_join(a, NULL);
    pthread_join(b, NULL);
    assert(servers[0].answered == 2);
    return 0;
}
