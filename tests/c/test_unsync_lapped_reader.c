/* An unsynchronized writer laps a slow reader all the time: what the reader gets is never torn, never goes back. */
#include "check.h" /* first: asks for GNU extensions */

#include <stdatomic.h>

#define ENOUGH (UNDER_SANITIZER ? 300 : 20000) /* good reads */

typedef struct element {
    uint64_t number, copy[7];
} element;

static atomic_int stop;

static void *writer(void *argument)
{
    nnb_mq *q = argument;
    for (uint64_t number = 1; !atomic_load(&stop); number += 2) {
        element e[2];
        for (int i = 0; i < 2; i++)
            for (int k = 0; k < 8; k++)
                (&e[i].number)[k] = number + (uint64_t)i;
        CHECK_EQ(nnb_mq_write(q, e, 2), 0);
    }
    return NULL;
}

int main(void)
{
    watchdog();
    nnb_mq *q = new_queue(8, sizeof(element), NNB_UNSYNCHRONIZED, NNB_LAYOUT_LINES, 0);
    pthread_t thread = start(writer, q);
    uint64_t good = 0, lapped = 0, last = 0;
    while (good < ENOUGH || lapped < 10) {
        element e[3];
        int rc = nnb_mq_read(q, e, 3);
        if (rc == -EOVERFLOW)
            lapped++;
        if (rc != 0) {
            CHECK(rc == -EAGAIN || rc == -EOVERFLOW);
            continue;
        }
        good++;
        for (int i = 0; i < 3; i++) {
            CHECK(e[i].number > last); /* newer than everything before */
            CHECK(i == 0 || e[i].number == e[i - 1].number + 1);
            for (int k = 0; k < 7; k++)
                CHECK(e[i].copy[k] == e[i].number); /* not torn */
            last = e[i].number;
        }
    }
    atomic_store(&stop, 1);
    finish(thread);
    nnb_mq_close(q);
    return 0;
}
