/* The client of a burst drops two late results, which fill the ring; the third needs the whole of it. A server that
 * waits for room (with a blocking write) is woken in vain by the first and in time by the second. */
#define PAGES 2
#define PAGE 768
#include "model.h"

#include "event_flag.c"

#include "message_queue.c"

#include "burst_wire.c"

#include "watch.c"

#include "burst_channel.c"

#include "burst_endpoint.c"

static ring requests, results;
static nnb_mq request, result, served, answering;
static nnb_client *client;
static nnb_execution *execution;
static uint8_t short_answer[2 * NNB_DATUM_SIZE], long_answer[4 * NNB_DATUM_SIZE];

static int answer(const uint8_t *packet, uint64_t n)
{
    int rc;
    do
        rc = nnb_mq_write_blocking(&answering, packet, n, NNB_EVENT_NOT_FULL, NNB_EVENT_NOT_EMPTY, 0, NULL);
    while (rc == -ERESTART);
    return rc;
}

static void *serve(void *unused)
{
    assert(answer(long_answer, 4) == 0);
    return unused;
}

static void *drop_two(void *unused)
{
    for (int i = 0; i < 2; i++)
        assert(nnb_execution_try(execution, 1) == -EAGAIN);
    return unused;
}

int main(void)
{
    attach(&request, &requests, NNB_DATUM_SIZE, 4, NNB_SYNCHRONIZED, NNB_MQ_EXCLUSIVE);
    attach(&result, &results, NNB_DATUM_SIZE, 4, NNB_SYNCHRONIZED, NNB_MQ_EXCLUSIVE);
    attach(&served, &requests, NNB_DATUM_SIZE, 4, NNB_SYNCHRONIZED, NNB_MQ_EXCLUSIVE);
    attach(&answering, &results, NNB_DATUM_SIZE, 4, NNB_SYNCHRONIZED, NNB_MQ_EXCLUSIVE);
    assert(nnb_client_create(&client, &request, &result, 0) == 0);
    nnb_request nothing = {.measure = 0};
    assert(nnb_execution_create(&execution, client, &nothing) == 0);
    nnb_shape shapes[2] = {{0, 0, 0}, {0, 0, 0}};
    nnb_result none = {.status = 0}, two = {.status = 0, .n_shapes = 2, .shapes = shapes};
    assert(nnb_wire_encode_result(&none, short_answer, 2) == 2 && nnb_wire_encode_result(&two, long_answer, 4) == 4);
    for (int i = 0; i < 3; i++) {
        assert(nnb_execution_start(execution) == 0);
        assert(nnb_mq_consume(&served, 2 * NNB_DATUM_SIZE) == 0);
        if (i < 2) {
            assert(answer(short_answer, 2) == 0);
            nnb_execution_abandon(execution);
        }
    }
    pthread_t a, b;
    pthread_create(&a, NULL, serve, NULL);
    pthread_create(&b, NULL, drop_two, NULL);
    return 0;
}
