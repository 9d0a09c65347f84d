/* Three requests in flight, the first of them given up: two threads launch one each, one of which waits in the queue for
 * room for its answer, and one of them looks for answers meanwhile. The late answer is dropped, and each other one is
 * that of its execution. */
#define PAGES 4
#define PAGE 768
#include "model.h"

#include "event_flag.c"

#include "message_queue.c"

#include "burst_wire.c"

#include "watch.c"

#include "burst_channel.c"

#include "burst_endpoint.c"

#define REQUEST 3 /* datums: the slot of a pool tells who sent it */
static ring requests, results;
static nnb_mq request, result, served, answering;
static nnb_channel inbox, outbox;
static uint64_t server_counters[NNB_COUNTERS];
static nnb_client *client;
static nnb_execution *executions[3];
static nnb_a32 landed[3];

/* The server looks once; 0: it found nothing. */
static int serve_one(void)
{
    uint8_t packet[3 * REQUEST * NNB_DATUM_SIZE], answer[2 * NNB_DATUM_SIZE] = {[8] = 2, [24] = RES_TIMING};
    int rc = nnb_channel_try(&inbox, packet, 1);
    if (rc == -EAGAIN)
        return 0;
    assert(rc == REQUEST);
    answer[32] = packet[NNB_DATUM_SIZE + 4];
    assert(nnb_channel_send(&outbox, answer, 2) == 0);
    return 1;
}

static int land_one(void)
{
    int64_t tag = nnb_client_land(client);
    if (tag < 0) {
        assert(tag == -EAGAIN);
        return 0;
    }
    assert(tag == 1 || tag == 2);
    assert(nnb_execution_status(executions[tag]) == 0);
    assert(nnb_execution_result(executions[tag])->time_on_device == (uint64_t)tag);
    assert(nnb_or32_release(&landed[tag], 1) == 0);
    return 1;
}

static void launch(uint64_t tag) { assert(nnb_execution_launch(executions[tag], tag, 0) == -EAGAIN); }

static void *launch_first(void *unused) { return launch(1), land_one(), unused; }
static void *launch_second(void *unused) { return launch(2), unused; }

static void *land_all(void *unused)
{
    while (land_one() || serve_one())
        ;
    assert(nnb_load32_relaxed(&landed[1]) && nnb_load32_relaxed(&landed[2]));
    return unused;
}

int main(void)
{
    attach(&request, &requests, NNB_DATUM_SIZE, 3 * REQUEST, NNB_SYNCHRONIZED, NNB_MQ_EXCLUSIVE);
    attach(&result, &results, NNB_DATUM_SIZE, 4, NNB_SYNCHRONIZED, NNB_MQ_EXCLUSIVE);
    attach(&served, &requests, NNB_DATUM_SIZE, 3 * REQUEST, NNB_SYNCHRONIZED, NNB_MQ_EXCLUSIVE);
    attach(&answering, &results, NNB_DATUM_SIZE, 4, NNB_SYNCHRONIZED, NNB_MQ_EXCLUSIVE);
    assert(nnb_channel_init(&inbox, &served, 4, 0, server_counters) == 0);
    assert(nnb_channel_init(&outbox, &answering, 8, 0, server_counters) == 0);
    assert(nnb_client_create(&client, &request, &result, 0) == 0);
    nnb_client_set_pipelined(client, -1);
    for (int32_t i = 0; i < 3; i++) {
        nnb_request q = {.n_pools = 1, .pools = &i};
        assert(nnb_execution_create(&executions[i], client, &q) == 0);
        nnb_execution_set_answer(executions[i], 3); /* a ring with room for one and a half */
    }
    assert(nnb_execution_start(executions[0]) == 0);
    nnb_execution_abandon(executions[0]);
    assert(serve_one());
    pthread_t threads[2];
    pthread_create(&threads[0], NULL, launch_first, NULL);
    pthread_create(&threads[1], NULL, launch_second, NULL);
    for (int i = 0; i < 2; i++)
        pthread_join(threads[i], NULL);
    pthread_create(&threads[0], NULL, land_all, NULL);
    return 0;
}
