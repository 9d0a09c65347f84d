/* A queue is left to a sleeper thread, who sleeps on it and hands it back with its next request; the leader, who sleeps on its
 * own queues, runs it. A request before that leaves the bit of the queue set. */
#include "group.h"

static nnb_sleeper_thread *keeper;

static void *lead_on(void *unused)
{
    assert(next_request(workers[0])->number == 1);
    nnb_store32_relaxed(&group->closing, 1);
    nnb_ring(&keeper->bell);
    return unused;
}

static void *send_one(void *unused) { return send(1), unused; }

int main(void)
{
    set_up(BURSTS, 1);
    begin_to_lead(workers[0]);
    send(1);
    assert(next_request(workers[0])->number == 1);
    keeper = calloc(1, sizeof(*keeper));
    keeper->group = group;
    keeper->bursts[keeper->n++] = group->bursts[1];
    group->bursts[1]->is_away = 1;
    nnb_look_refresh(group);
    assert(group->n_mine == 1);
    nnb_store32_relaxed(&group->changed, 1); /* the leader looks again at any time, not only when the sleeper thread says so */
    pthread_t a, b, c;
    pthread_create(&a, NULL, lead_on, NULL);
    pthread_create(&b, NULL, sleep_on_some, keeper);
    pthread_create(&c, NULL, send_one, NULL);
    return 0;
}
