/* A launched run is answered while the client awaits it in an event loop, which sleeps when it has armed the bell and
 * found nothing: the answer is not left behind. A first run, one step after the other, leaves the bit set. */
#define PAGES 4
#define PAGE 768
#include "model.h"

#include "event_flag.c"

#include "message_queue.c"

#include "burst_wire.c"

#include "watch.c"

#include "burst_channel.c"

#include "burst_endpoint.c"

#define RUNS 2
#define BELL 1
static ring requests, results;
static nnb_mq request, result, answering;
static nnb_channel server;
static uint64_t server_counters[NNB_COUNTERS];
static nnb_client *client;
static nnb_execution *executions[RUNS];
static const uint8_t answers[RUNS][2 * NNB_DATUM_SIZE] = {
    {[8] = 2, [24] = RES_TIMING, [32] = 1}, {[8] = 2, [24] = RES_TIMING, [32] = 2}};

static void launch(int i)
{
    assert(nnb_execution_launch(executions[i], (uint64_t)i + 1, 0) == -EAGAIN);
}

static void answer(int i) { assert(nnb_channel_send(&server, answers[i], 2) == 0); }

static void has_landed(int64_t tag, int i)
{
    assert(tag == i + 1 && nnb_execution_status(executions[i]) == 0);
    assert(nnb_execution_result(executions[i])->time_on_device == (uint64_t)tag);
}

static void *serve(void *unused)
{
    answer(1);
    return unused;
}

static void *loop(void *unused)
{
    int64_t tag;
    while ((tag = nnb_client_land(client)) == -EAGAIN) {
        int rc = nnb_client_arm(client);
        assert(rc == 0 || rc == 1);
        if (rc == 0) {
            AWAIT(BELL_RINGS(BELL));
            SILENCE(BELL);
        }
    }
    has_landed(tag, 1);
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
    nnb_client_set_pipelined(client, -1);
    nnb_request nothing = {.measure = 0};
    for (int i = 0; i < RUNS; i++) {
        assert(nnb_execution_create(&executions[i], client, &nothing) == 0);
        nnb_execution_set_answer(executions[i], 2);
    }
    launch(0);
    answer(0);
    has_landed(nnb_client_land(client), 0);
    launch(1);
    pthread_t a, b;
    pthread_create(&a, NULL, serve, NULL);
    pthread_create(&b, NULL, loop, NULL);
    return 0;
}
