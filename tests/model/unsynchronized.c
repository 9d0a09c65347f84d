/* A writer laps a reader: three elements through an unsynchronized queue with room for one. What is read is whole. */
#include "model.h"

#include "event_flag.c"

#include "message_queue.c"

#define ELEMENTS 3
#define QUANTUM 16
static ring shared;
static nnb_mq writing, reading;
static const uint8_t elements[ELEMENTS][QUANTUM] __attribute__((aligned(8))) = {
    {[0] = 1, [8] = 1}, {[0] = 2, [8] = 2}, {[0] = 3, [8] = 3}};

static void *write_all(void *unused)
{
    for (int i = 0; i < ELEMENTS; i++)
        assert(nnb_mq_write(&writing, elements[i], 1) == 0);
    return unused;
}

static void *read_some(void *unused)
{
    _Alignas(8) uint8_t got[QUANTUM];
    uint8_t last = 0;
    for (int i = 0; i < 3; i++) {
        int rc = nnb_mq_read(&reading, got, 1);
        assert(rc == 0 || rc == -EAGAIN || rc == -EOVERFLOW);
        if (rc == 0) {
            assert(got[0] == got[8] && got[0] > last);
            last = got[0];
        }
    }
    return unused;
}

int main(void)
{
    attach(&writing, &shared, QUANTUM, 1, NNB_UNSYNCHRONIZED, 0);
    attach(&reading, &shared, QUANTUM, 1, NNB_UNSYNCHRONIZED, 0);
    pthread_t a, b;
    pthread_create(&a, NULL, write_all, NULL);
    pthread_create(&b, NULL, read_some, NULL);
    return 0;
}
