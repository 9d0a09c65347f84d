/* A queue is left to a watcher, who sleeps on it and hands it back with its next request; the leader, who sleeps on its
 * own queues, runs it. A request before that leaves the bit of the queue set. */
#define STEP 8
#define PAGES 16
#define PAGE 1024
#include "model.h"

#include "event_flag.c"

#include "watch.c"

#include "burst_channel.c"

#include "group.h"

#include "burst_group.c"

static watcher *keeper;

static void serve_one(void)
{
    seat *m;
    for (;;) {
        if (nnb_load32_relaxed(&group->changed))
            refresh(group);
        look_at_all(group);
        if ((m = pick(group)))
            break;
        sleep_on_all(group);
    }
    assert(take(workers[0], m) >= 0 && m->number == 1);
}

static void *lead_on(void *unused)
{
    serve_one();
    pthread_mutex_lock(&keeper->lock);
    keeper->closing = 1;
    pthread_mutex_unlock(&keeper->lock);
    ring(&keeper->bell);
    return unused;
}

static void *send_one(void *unused) { return send(1), unused; }

int main(void)
{
    set_up(1);
    workers[0]->role = LEADS;
    nnb_store_relaxed(&group->lead, word_of(workers[0], LOOKING));
    send(1);
    serve_one();
    keeper = calloc(1, sizeof(*keeper));
    keeper->group = group;
    pthread_mutex_init(&keeper->lock, NULL);
    assert(leave_to(keeper, group->seats[1], WORDS));
    refresh(group);
    assert(group->n_mine == 1);
    nnb_store32_relaxed(&group->changed, 1); /* the leader looks again at any time, not only when the watcher says so */
    pthread_t a, b, c;
    pthread_create(&a, NULL, lead_on, NULL);
    pthread_create(&b, NULL, watch, keeper);
    pthread_create(&c, NULL, send_one, NULL);
    return 0;
}
