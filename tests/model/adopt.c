/* Handles that are opened while the others are at work take over what is there: bytes to read, and room to write. */
#include "model.h"

#include "event_flag.c"

#include "message_queue.c"

static ring shared;
static nnb_mq writing, reading, later;
static const uint8_t elements[2][8] = {{1}, {2}};

static void *write_two(void *unused)
{
    assert(nnb_mq_write(&writing, elements[0], 1) == 0);
    attach(&later, &shared, 8, 1, NNB_SYNCHRONIZED, NNB_MQ_EXCLUSIVE);
    adopt_w(&later);
    adopt_r(&later);
    int rc = nnb_mq_write(&later, elements[1], 1);
    assert(rc == 0 || rc == -EAGAIN);
    return unused;
}

static void *read_two(void *unused)
{
    uint8_t got[8];
    attach(&reading, &shared, 8, 1, NNB_SYNCHRONIZED, NNB_MQ_EXCLUSIVE);
    adopt_w(&reading);
    adopt_r(&reading);
    int n = 0;
    for (int i = 0; i < 2; i++)
        if (nnb_mq_read(&reading, got, 1) == 0)
            assert(got[0] == ++n);
    return unused;
}

int main(void)
{
    attach(&writing, &shared, 8, 1, NNB_SYNCHRONIZED, NNB_MQ_EXCLUSIVE);
    pthread_t a, b;
    pthread_create(&a, NULL, write_two, NULL);
    pthread_create(&b, NULL, read_two, NULL);
    return 0;
}
