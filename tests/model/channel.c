/* Three packets through a ring with room for two; the receiver sleeps whenever it finds nothing. */
#define STEP 8
#include "model.h"

#include "event_flag.c"

#include "watch.c"

#include "burst_channel.c"
void nnb_mq_close(nnb_mq *q) { (void)q; }

#ifndef PACKETS
#define PACKETS 3
#endif
static ring shared;
static nnb_mq sending, receiving;
static nnb_channel sender, receiver;
static uint64_t sender_counters[NNB_COUNTERS], receiver_counters[NNB_COUNTERS];

static const uint8_t packets[3][2 * NNB_DATUM_SIZE] = {
    {[8] = 2, [24] = 1}, {[8] = 2, [24] = 2}, {[8] = 2, [24] = 3}};

static void *send(void *unused)
{
    for (uint32_t i = 1; i <= PACKETS; i++) {
        int rc = nnb_channel_send(&sender, packets[i - 1], 2);
        assert(rc == 0);
    }
    return unused;
}

static void *receive(void *unused)
{
    uint8_t packet[4 * NNB_DATUM_SIZE];
    for (uint32_t i = 1; i <= PACKETS; i++) {
        int rc;
        do
            rc = nnb_channel_wait(&receiver, packet, 0);
        while (rc == -ERESTART);
        assert(rc == 2 && packet[NNB_DATUM_SIZE] == i);
    }
    return unused;
}

int main(void)
{
    attach(&sending, &shared, NNB_DATUM_SIZE, 6, NNB_SYNCHRONIZED, NNB_MQ_EXCLUSIVE);
    attach(&receiving, &shared, NNB_DATUM_SIZE, 6, NNB_SYNCHRONIZED, NNB_MQ_EXCLUSIVE);
    assert(nnb_channel_init(&sender, &sending, 8, 0, sender_counters) == 0);
    assert(nnb_channel_init(&receiver, &receiving, 8, 0, receiver_counters) == 0);
    pthread_t a, b;
    pthread_create(&a, NULL, send, NULL);
    pthread_create(&b, NULL, receive, NULL);
#ifdef INTERRUPTED
    LET_TIME_PASS();
#endif
    return 0;
}
