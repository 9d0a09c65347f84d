/* Two packets with times and deadlines, of which the second is sent while the first is read: times are those of the
 * packet that was taken, both or none, and its deadline is its own. */
#define STEP 8
#include "model.h"

#include "event_flag.c"

#include "watch.c"

#include "burst_channel.c"
void nnb_mq_close(nnb_mq *q) { (void)q; }

#define PACKETS 2
#define NOW 1000
static ring shared;
static nnb_a64 words[2 + DEADLINES];
static nnb_mq sending, receiving;
static nnb_channel sender, receiver;
static uint64_t sender_counters[NNB_COUNTERS], receiver_counters[NNB_COUNTERS];

static const uint8_t packets[PACKETS][2 * NNB_DATUM_SIZE] = {{[8] = 2, [24] = 1}, {[8] = 2, [24] = 2}};

static void *send(void *unused)
{
    for (uint32_t i = 1; i <= PACKETS; i++) {
        nnb_channel_stamp(&sender, 2, 100 * i, i, i);
        nnb_channel_set_deadline(&sender, 2, NOW + i);
        assert(nnb_channel_send(&sender, packets[i - 1], 2) == 0);
    }
    return unused;
}

static void *receive(void *unused)
{
    uint8_t packet[4 * NNB_DATUM_SIZE];
    for (uint32_t i = 1; i <= PACKETS; i++) {
        int rc = nnb_channel_try(&receiver, packet, 1);
        assert(rc == -EAGAIN || (rc == 2 && packet[NNB_DATUM_SIZE] == i));
        if (rc < 0)
            break;
        assert(nnb_channel_deadline(&receiver) == NOW + i);
        uint64_t time, lasted;
        uint32_t together;
        if (nnb_channel_is_stamped(&receiver) && nnb_channel_stamp_of(&receiver, NOW, &time, &lasted, &together))
            assert(time == 100 * i && lasted == i && together == i);
        else
            assert(i < PACKETS); /* those of the next one took their place */
    }
    return unused;
}

int main(void)
{
    attach(&sending, &shared, NNB_DATUM_SIZE, 4, NNB_SYNCHRONIZED, NNB_MQ_EXCLUSIVE);
    attach(&receiving, &shared, NNB_DATUM_SIZE, 4, NNB_SYNCHRONIZED, NNB_MQ_EXCLUSIVE);
    sending.stamp = receiving.stamp = words;
    assert(nnb_channel_init(&sender, &sending, 8, 0, sender_counters) == 0);
    assert(nnb_channel_init(&receiver, &receiving, 8, 0, receiver_counters) == 0);
    pthread_t a, b;
    pthread_create(&a, NULL, send, NULL);
    pthread_create(&b, NULL, receive, NULL);
    return 0;
}
