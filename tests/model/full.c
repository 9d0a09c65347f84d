/* Three packets through a ring with room for two, which is full at the start; the third fills the ring. The sender
 * sleeps until there is room (NOT_FULL): a first packet less wakes it in vain. */
#define STEP 8
#include "model.h"

#include "event_flag.c"

#include "message_queue.c"

#include "watch.c"

#include "burst_channel.c"

#define PACKETS 3
#define DATUMS 2
static ring shared;
static nnb_mq sending, receiving;
static nnb_channel receiver;
static uint64_t receiver_counters[NNB_COUNTERS];
static const uint8_t packets[PACKETS][2 * DATUMS * NNB_DATUM_SIZE] = {
    {[8] = 2, [24] = 1}, {[8] = 2, [24] = 2}, {[8] = 4, [24] = 3}};

static int send_one(int i)
{
    int rc;
    do
        rc = nnb_mq_write_blocking(&sending, packets[i], packets[i][8], NNB_EVENT_NOT_FULL, NNB_EVENT_NOT_EMPTY, 0,
                                   NULL);
    while (rc == -ERESTART);
    return rc;
}

static void *send(void *unused)
{
    assert(send_one(PACKETS - 1) == 0);
    return unused;
}

static void receive_one(int i)
{
    uint8_t packet[2 * DATUMS * NNB_DATUM_SIZE];
    assert(nnb_channel_try(&receiver, packet, 1) == packets[i][8] && packet[NNB_DATUM_SIZE] == i + 1);
    nnb_fence_seq_cst();
    nnb_channel_notify_not_full(&receiver);
}

static void *receive(void *unused)
{
    receive_one(0);
    receive_one(1);
    return unused;
}

int main(void)
{
    attach(&sending, &shared, NNB_DATUM_SIZE, 2 * DATUMS, NNB_SYNCHRONIZED, NNB_MQ_EXCLUSIVE);
    attach(&receiving, &shared, NNB_DATUM_SIZE, 2 * DATUMS, NNB_SYNCHRONIZED, NNB_MQ_EXCLUSIVE);
    assert(nnb_channel_init(&receiver, &receiving, 8, 0, receiver_counters) == 0);
    for (int i = 0; i < PACKETS - 1; i++)
        assert(send_one(i) == 0);
    LET_TIME_PASS();
    pthread_t a, b;
    pthread_create(&a, NULL, send, NULL);
    pthread_create(&b, NULL, receive, NULL);
    pthread_join(a, NULL);
    pthread_join(b, NULL);
    receive_one(2);
    return 0;
}
