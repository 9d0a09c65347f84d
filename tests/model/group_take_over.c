/* A run ends while the watchman takes the lead from it, because it lasts: one of the two leads on, and the next request
 * of the same client is run once, by one that has the seat for itself. */
#define STEP 8
#define PAGES 16
#define PAGE 1024
#include "model.h"

#include "event_flag.c"

#include "watch.c"

#include "burst_channel.c"

#include "group.h"

#include "burst_group.c"

static void run_next(nnb_worker *w)
{
    seat *m;
    for (;;) {
        look_at_all(group);
        if ((m = pick(group)))
            break;
        sleep_on_all(group);
    }
    assert(take(w, m) >= 0 && m->number == 0);
    assert(nnb_server_reply(m->server) == 0);
}

static void *end_run(void *unused)
{
    nnb_worker *w = workers[0];
    assert(nnb_group_answer(w) == 0);
    assert(w->role == LEADS || w->role == NONE);
    if (w->role == LEADS)
        run_next(w);
    return unused;
}

static void *watch_over(void *unused)
{
    nnb_worker *w = workers[1];
    pthread_mutex_lock(&group->lock);
    int leads = tick(w);
    if (leads) {
        unpark(w);
        w->role = LEADS;
    }
    pthread_mutex_unlock(&group->lock);
    if (leads)
        run_next(w);
    return unused;
}

static void *begin_and_end(void *unused)
{
    assert(begin(workers[0]) >= 0 && workers[0]->role == INLINE);
    return end_run(unused);
}

int main(void)
{
    set_up(2);
    nnb_worker *w = workers[1];
    workers[0]->role = LEADS;
    nnb_store_relaxed(&group->lead, word_of(workers[0], LOOKING));
    group->parked = group->watchman = w;
    nnb_store32_relaxed(&group->n_parked, 1);
    nnb_store32_relaxed(&group->ticking, 1);
    send(0);
    refresh(group);
    look_at_all(group);
    send(0);
    w->seen_lead = (uint64_t)1 << 16 | word_of(workers[0], BUSY); /* the first run: a tick ago it was under way */
    pthread_t a, b;
    pthread_create(&a, NULL, begin_and_end, NULL);
    pthread_create(&b, NULL, watch_over, NULL);
    pthread_join(a, NULL);
    pthread_join(b, NULL);
    assert(servers[0].answered == 2);
    return 0;
}
