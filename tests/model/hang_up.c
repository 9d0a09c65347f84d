/* A receiver that sleeps is woken by a packet and by a hang-up, and sees what was stored before the hang-up. */
#define STEP 8
#include "model.h"

#include "event_flag.c"

#include "watch.c"

#include "burst_channel.c"
void nnb_mq_close(nnb_mq *q) { (void)q; }

static ring shared;
static nnb_mq sending, receiving;
static nnb_channel sender, receiver;
static uint64_t sender_counters[NNB_COUNTERS], receiver_counters[NNB_COUNTERS];
static const uint8_t packet[2 * NNB_DATUM_SIZE] = {[8] = 2, [24] = 1};
static int reason;

static void *send(void *unused)
{
    assert(nnb_channel_send(&sender, packet, 2) == 0);
    return unused;
}

static void *hang_up(void *unused)
{
    reason = 7;
    nnb_channel_hang_up(&receiver);
    return unused;
}

static void *receive(void *unused)
{
    uint8_t got[4 * NNB_DATUM_SIZE];
    int rc, packets = 0;
    while ((rc = nnb_channel_wait(&receiver, got, 0)) != -EPIPE) {
        assert(rc == -ERESTART || (rc == 2 && got[NNB_DATUM_SIZE] == 1));
        packets += rc > 0;
    }
    assert(packets <= 1 && reason == 7);
    return unused;
}

int main(void)
{
    attach(&sending, &shared, NNB_DATUM_SIZE, 4, NNB_SYNCHRONIZED, NNB_MQ_EXCLUSIVE);
    attach(&receiving, &shared, NNB_DATUM_SIZE, 4, NNB_SYNCHRONIZED, NNB_MQ_EXCLUSIVE);
    assert(nnb_channel_init(&sender, &sending, 8, 0, sender_counters) == 0);
    assert(nnb_channel_init(&receiver, &receiving, 8, 0, receiver_counters) == 0);
    pthread_t a, b, c;
    pthread_create(&a, NULL, send, NULL);
    pthread_create(&b, NULL, receive, NULL);
    pthread_create(&c, NULL, hang_up, NULL);
    LET_TIME_PASS();
    return 0;
}
