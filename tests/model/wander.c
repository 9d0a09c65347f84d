/* Three elements through a ring with room for one, polled, through handles that trust only the shared counters, whole
 * elements and in place. */
#include "model.h"

#include "event_flag.c"

#include "message_queue.c"

#define ELEMENTS 3
#ifndef OPTIONS
#define OPTIONS 0
#endif
static ring shared;
static nnb_mq writing, reading;

static void *write_all(void *unused)
{
    for (uint8_t i = 1; i <= ELEMENTS; i++) {
        nnb_mq_region room;
        if (nnb_mq_available_to_write(&writing) != 1 || nnb_mq_begin_write(&writing, 1, &room) < 0)
            break;
        room.first[0] = i;
        nnb_mq_commit_write(&writing, 1);
    }
    return unused;
}

static void *read_all(void *unused)
{
    for (uint8_t i = 1; i <= ELEMENTS; i++) {
        nnb_mq_region there;
        if (nnb_mq_available_to_read(&reading) != 1 || nnb_mq_begin_read(&reading, 1, &there) < 0)
            break;
        assert(there.first[0] == i);
        nnb_mq_commit_read(&reading, 1);
    }
    return unused;
}

int main(void)
{
    attach(&writing, &shared, 8, 1, NNB_SYNCHRONIZED, OPTIONS);
    attach(&reading, &shared, 8, 1, NNB_SYNCHRONIZED, OPTIONS);
    pthread_t a, b;
    pthread_create(&a, NULL, write_all, NULL);
    pthread_create(&b, NULL, read_all, NULL);
    return 0;
}
