/* Two clients send a request each while the leader of a group looks at both queues and sleeps on both: none is left. A
 * request before that, one step after the other, leaves the bit of one of them set. */
#include "group.h"

static void serve(int requests)
{
    while (requests--)
        assert(nnb_server_reply(next_request(workers[0])->server) == 0);
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
    set_up(BURSTS, 1);
    begin_to_lead(workers[0]);
    send(0);
    serve(1);
    pthread_t a, b, c;
    pthread_create(&a, NULL, lead_on, NULL);
    pthread_create(&b, NULL, send_first, NULL);
    pthread_create(&c, NULL, send_second, NULL);
    return 0;
}
