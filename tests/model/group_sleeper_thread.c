/* A queue is left to a sleeper thread, who sleeps on it and hands it back with its next request; the leader, who sleeps on its
 * own queues, runs it. A request before that leaves the bit of the queue set. */
#define STEP 8
#define PAGES 16
#define PAGE 1024
#include "model.h"

#include "event_flag.c"

#include "watch.c"

#include "burst_channel.c"

#include "group.h"

static nnb_sleeper_thread *keeper;

static void serve_one(void)
{
    nnb_burst *next;
    for (;;) {
        if (nnb_load32_relaxed(&group->changed))
            nnb_look_refresh(group);
        nnb_look_at_all(group);
        if ((next = pick(group)))
            break;
        nnb_sleep_on_all(group);
    }
    assert(take(workers[0], next) >= 0 && next->number == 1);
}

static void *lead_on(void *unused)
{
    serve_one();
    pthread_mutex_lock(&keeper->lock);
    keeper->closing = 1;
    pthread_mutex_unlock(&keeper->lock);
    nnb_ring(&keeper->bell);
    return unused;
}

static void *send_one(void *unused) { return send(1), unused; }

int main(void)
{
    set_up(1);
    workers[0]->role = NNB_LEADS;
    nnb_store_relaxed(&group->lead, nnb_lead_word(workers[0], NNB_LEAD_LOOKING));
    send(1);
    serve_one();
    keeper = calloc(1, sizeof(*keeper));
    keeper->group = group;
    pthread_mutex_init(&keeper->lock, NULL);
    assert(leave_to(keeper, group->bursts[1], NNB_WAITV_WORDS));
    nnb_look_refresh(group);
    assert(group->n_mine == 1);
    nnb_store32_relaxed(&group->changed, 1); /* the leader looks again at any time, not only when the sleeper thread says so */
    pthread_t a, b, c;
    pthread_create(&a, NULL, lead_on, NULL);
    pthread_create(&b, NULL, sleep_on_some, keeper);
    pthread_create(&c, NULL, send_one, NULL);
    return 0;
}
