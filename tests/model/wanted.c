/* A caller waits for its run and holds the client, while an event loop launches another one: the loop is told when the
 * client is free. */
#define PAGES 3
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
static nnb_client *client;
static nnb_execution *waited, *launched;
static const uint8_t answer[2 * NNB_DATUM_SIZE] = {[8] = 2, [24] = RES_TIMING};

static void *run(void *unused)
{
    int rc = nnb_execution_start(waited);
    assert(rc == 0 || rc == -EBUSY);
    if (rc == 0) {
        assert(nnb_mq_put(&answering, answer, sizeof answer) == 0);
        assert(nnb_execution_try(waited, 1) == 0);
    }
    return unused;
}

static void *loop(void *unused)
{
    int rc;
    while ((rc = nnb_execution_launch(launched, 1, 0)) == -EBUSY) {
        AWAIT(BELL_RINGS(BELL));
        SILENCE(BELL);
    }
    assert(rc == -EAGAIN);
    return unused;
}

int main(void)
{
    attach(&request, &requests, NNB_DATUM_SIZE, 4, NNB_SYNCHRONIZED, NNB_MQ_EXCLUSIVE);
    attach(&result, &results, NNB_DATUM_SIZE, 4, NNB_SYNCHRONIZED, NNB_MQ_EXCLUSIVE);
    attach(&answering, &results, NNB_DATUM_SIZE, 4, NNB_SYNCHRONIZED, NNB_MQ_EXCLUSIVE);
    assert(nnb_client_create(&client, &request, &result, 0) == 0);
    nnb_client_set_pipelined(client, BELL);
    nnb_request nothing = {.measure = 0};
    assert(nnb_execution_create(&waited, client, &nothing) == 0);
    assert(nnb_execution_create(&launched, client, &nothing) == 0);
    pthread_t a, b;
    pthread_create(&a, NULL, run, NULL);
    pthread_create(&b, NULL, loop, NULL);
    return 0;
}
