/* An event loop has armed the bell for its run. A caller has begun another one and sleeps in the kernel: both
 * answers find their taker, and the loop is told, if not by the service then by the caller who took its answer along. */
#define PAGES 4
#define PAGE 768
#include "model.h"

#include "event_flag.c"

#include "message_queue.c"

#include "burst_wire.c"

#include "watch.c"

#include "burst_channel.c"

#include "burst_endpoint.c"

#define BELL 1
static ring requests, results;
static nnb_mq request, result, answering;
static nnb_channel server;
static uint64_t server_counters[NNB_COUNTERS];
static nnb_client *client;
static nnb_execution *awaited, *waited;
static const uint8_t answer[2 * NNB_DATUM_SIZE] = {[8] = 2, [24] = RES_TIMING};

static void *serve(void *unused)
{
    for (int i = 0; i < 2; i++)
        assert(nnb_channel_send(&server, answer, 2) == 0);
    return unused;
}

static void *loop(void *unused)
{
    int64_t tag;
    int rc = 0;
    while ((tag = nnb_client_land(client)) != 1) {
        assert(tag == -EAGAIN || tag == -EBUSY);
        if (tag == -EAGAIN && (rc = nnb_client_arm(client)) == 1)
            continue;
        assert(rc == 0 || rc == -EBUSY);
        AWAIT(BELL_RINGS(BELL));
        SILENCE(BELL);
    }
    return unused;
}

static void *wait_for_answer(void *unused)
{
    int rc;
    while ((rc = nnb_execution_resume(waited)) == -ERESTART)
        ;
    assert(rc == 0);
    return unused;
}

int main(void)
{
    attach(&request, &requests, NNB_DATUM_SIZE, 4, NNB_SYNCHRONIZED, NNB_MQ_EXCLUSIVE);
    attach(&result, &results, NNB_DATUM_SIZE, 4, NNB_SYNCHRONIZED, NNB_MQ_EXCLUSIVE);
    attach(&answering, &results, NNB_DATUM_SIZE, 4, NNB_SYNCHRONIZED, NNB_MQ_EXCLUSIVE);
    assert(nnb_channel_init(&server, &answering, 8, 0, server_counters) == 0);
    server.bell = BELL;
    assert(nnb_client_create(&client, &request, &result, 0) == 0);
    nnb_client_set_pipelined(client, BELL);
    nnb_request nothing = {.measure = 0};
    assert(nnb_execution_create(&awaited, client, &nothing) == 0);
    assert(nnb_execution_create(&waited, client, &nothing) == 0);
    nnb_execution_set_answer(awaited, 2);
    nnb_execution_set_answer(waited, 2);
    assert(nnb_execution_launch(awaited, 1, 0) == -EAGAIN);
    assert(nnb_client_arm(client) == 0);
    assert(nnb_execution_advance(waited, waited) == -EAGAIN);
    pthread_t a, b, c;
    pthread_create(&a, NULL, serve, NULL);
    pthread_create(&b, NULL, loop, NULL);
    pthread_create(&c, NULL, wait_for_answer, NULL);
    return 0;
}
