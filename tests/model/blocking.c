/* Three elements through a queue with room for two, full at the start; the handles trust only the shared
 * counters. Both sides sleep. */
#include "model.h"

#include "event_flag.c"

#include "message_queue.c"

#define ELEMENTS 3
static ring shared;
static nnb_mq sending, receiving;
static const uint8_t elements[ELEMENTS][8] = {{1}, {2}, {3}};

static int send_one(int i)
{
    int rc;
    do
        rc = nnb_mq_write_blocking(&sending, elements[i], 1, NNB_EVENT_NOT_FULL, NNB_EVENT_NOT_EMPTY, 0, NULL);
    while (rc == -ERESTART);
    return rc;
}

static void *send(void *unused)
{
    for (int i = 2; i < ELEMENTS; i++)
        assert(send_one(i) == 0);
    return unused;
}

static void *receive(void *unused)
{
    uint8_t element[8];
    for (int i = 0; i < ELEMENTS; i++) {
        int rc;
        do
            rc = nnb_mq_read_blocking(&receiving, element, 1, NNB_EVENT_NOT_FULL, NNB_EVENT_NOT_EMPTY, 0, NULL);
        while (rc == -ERESTART);
        assert(rc == 0 && element[0] == i + 1);
    }
    return unused;
}

int main(void)
{
    attach(&sending, &shared, 8, 2, NNB_SYNCHRONIZED, 0);
    attach(&receiving, &shared, 8, 2, NNB_SYNCHRONIZED, 0);
    assert(send_one(0) == 0 && send_one(1) == 0);
    pthread_t a, b;
    pthread_create(&a, NULL, send, NULL);
    pthread_create(&b, NULL, receive, NULL);
    LET_TIME_PASS();
    return 0;
}
