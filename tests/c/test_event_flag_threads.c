/* Two threads hand a token to and fro through one word: no wake is ever lost. */
#include "check.h"

#define ROUNDS (UNDER_SANITIZER ? 2000 : 20000)

static uint32_t word;
static uint64_t token; /* plain: the event flag alone orders the two threads */

static void turn(uint32_t mine, uint32_t theirs, uint64_t expected)
{
    uint32_t state;
    int rc;
    do
        rc = nnb_event_wait_retry(&word, mine, &state, 0);
    while (rc == -ERESTART);
    CHECK_EQ(rc, 0);
    CHECK_EQ(state, mine);
    CHECK_EQ(token, expected);
    token++;
    CHECK(nnb_event_wake(&word, theirs) >= 0);
}

static void *other(void *argument)
{
    (void)argument;
    for (uint64_t i = 0; i < ROUNDS; i++)
        turn(2, 1, 2 * i + 1);
    return NULL;
}

int main(void)
{
    watchdog();
    pthread_t thread = start(other, NULL);
    nnb_event_wake(&word, 1);
    for (uint64_t i = 0; i < ROUNDS; i++)
        turn(1, 2, 2 * i);
    finish(thread);
    CHECK_EQ(token, 2 * ROUNDS);
    return 0;
}
