/* Two clients send a request each while the leader of a group looks at both queues and sleeps on both: none is left. A
 * request before that, one step after the other, leaves the bit of one of them set. */
#define STEP 8
#define PAGES 10
#define PAGE 1024
#include "model.h"

#include "event_flag.c"

#include "watch.c"

#include "burst_channel.c"

#include "group.h"

static void serve(int requests)
{
    while (requests) {
        nnb_look_at_all(group);
        nnb_burst *next = pick(group);
        if (!next) {
            nnb_sleep_on_all(group);
            continue;
        }
        assert(take(workers[0], next) >= 0);
        assert(nnb_server_reply(next->server) == 0);
        requests--;
    }
}

static void *lead_on(void *unused)
{
    serve(BURSTS);
    assert(servers[0].answered == 2 && servers[1].answered == 1);
    return unused;
}

static void *send_first(void *unused) { return send(0), unused; }
static void *send_second(void *unused) { return send(1), unused; }

int main(void)
{
    set_up(1);
    workers[0]->role = NNB_LEADS;
    nnb_store_relaxed(&group->lead, nnb_lead_word(workers[0], NNB_LEAD_LOOKING));
    nnb_look_refresh(group);
    send(0);
    serve(1);
    pthread_t a, b, c;
    pthread_create(&a, NULL, lead_on, NULL);
    pthread_create(&b, NULL, send_first, NULL);
    pthread_create(&c, NULL, send_second, NULL);
    return 0;
}
