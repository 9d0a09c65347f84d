/* Who is in: readers together, writers alone, a request as a whole; waiting ends; a closed buffer is freed by the last
 * one out. The bytes that the buffers stand for are plain memory, so ThreadSanitizer sees any gap in the exclusion. */
#include "check.h"

#include <time.h>

#define ROUNDS (UNDER_SANITIZER ? 2000 : 40000)
#define BUFFERS 3
#define THREADS 6

static nnb_buffer *buffers[BUFFERS];
static long contents[BUFFERS][2]; /* both halves are the same, but for whoever writes */
static long busy, written;

static uint64_t soon(uint64_t ns)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec + ns;
}

static nnb_buffer_state look(nnb_buffer *b)
{
    nnb_buffer_state state;
    nnb_buffer_look(b, &state);
    return state;
}

/* Reads one buffer and writes the next, as a step of a recurrent network does. */
static void *step(void *argument)
{
    long k = (long)argument;
    int from = (int)(k % BUFFERS), to = (int)((k + 1 + k / BUFFERS) % BUFFERS);
    nnb_uses *u;
    if (from == to)
        to = (from + 1) % BUFFERS;
    CHECK_EQ(nnb_uses_create(&u, &buffers[from], 1, &buffers[to], 1), 0);
    for (int i = 0; i < ROUNDS; i++) {
        if (!nnb_uses_admit(u)) {
            int rc = nnb_uses_enter(u, soon(i % 3 ? 5000000000u : 20000));
            if (rc == -EAGAIN) {
                __atomic_fetch_add(&busy, 1, __ATOMIC_RELAXED);
                continue;
            }
            CHECK_EQ(rc, 0);
            nnb_uses_settle(u, nnb_gate_moves(0));
        }
        CHECK_EQ(contents[from][0], contents[from][1]);
        contents[to][0] = contents[from][0] + 1;
        contents[to][1] = contents[to][0];
        __atomic_fetch_add(&written, 1, __ATOMIC_RELAXED);
        CHECK_EQ(nnb_uses_leave(u, NNB_COMMITTED), 0);
        if (i % 64 == 0)
            nnb_gate_moves(1);
    }
    nnb_uses_destroy(u);
    return NULL;
}

static void threads_exclude_each_other(void)
{
    pthread_t threads[THREADS];
    uint64_t generations = 0;
    for (long i = 0; i < THREADS; i++)
        threads[i] = start(step, (void *)i);
    for (int i = 0; i < THREADS; i++)
        finish(threads[i]);
    for (int i = 0; i < BUFFERS; i++) {
        CHECK_EQ(look(buffers[i]).is_idle, 1);
        generations += look(buffers[i]).generation;
    }
    CHECK_EQ(generations, written);
    CHECK_EQ(written + busy, (long)THREADS * ROUNDS);
}

static void all_or_none(void)
{
    nnb_uses *first, *both;
    CHECK_EQ(nnb_uses_create(&first, NULL, 0, buffers, 1), 0);
    CHECK_EQ(nnb_uses_create(&both, &buffers[1], 1, buffers, 1), 0);
    CHECK_EQ(nnb_uses_enter(first, 0), 0);
    CHECK_EQ(nnb_uses_enter(both, 0), -EAGAIN);
    CHECK_EQ(look(buffers[1]).is_idle, 1);
    CHECK_EQ(nnb_uses_leave(first, NNB_LOST), 0);
    CHECK_EQ(look(buffers[0]).is_initialised, 0);
    CHECK_EQ(nnb_uses_enter(both, 0), 0);
    CHECK_EQ(nnb_uses_leave(both, NNB_UNCHANGED), 0);
    CHECK_EQ(look(buffers[0]).is_initialised, 0);
    nnb_uses_destroy(first);
    nnb_uses_destroy(both);
}

static void quick_way_in(void)
{
    nnb_uses *reading, *writing;
    CHECK_EQ(nnb_uses_create(&reading, buffers, 1, NULL, 0), 0);
    CHECK_EQ(nnb_uses_create(&writing, NULL, 0, buffers, 1), 0);
    nnb_uses_settle(reading, nnb_gate_moves(0));
    nnb_uses_settle(writing, nnb_gate_moves(0));
    CHECK_EQ(nnb_uses_admit(reading), 0); /* without contents */
    CHECK_EQ(nnb_uses_admit(writing), 1);
    CHECK_EQ(nnb_uses_admit(writing), 0);
    CHECK_EQ(nnb_uses_leave(writing, NNB_COMMITTED), 0);
    CHECK_EQ(nnb_uses_admit(reading), 1);
    CHECK_EQ(nnb_uses_admit(reading), 1);
    CHECK_EQ(nnb_uses_admit(writing), 0);
    CHECK_EQ(nnb_uses_leave(reading, NNB_COMMITTED), 0);
    CHECK_EQ(nnb_uses_leave(reading, NNB_COMMITTED), 0);
    nnb_gate_moves(1);
    CHECK_EQ(nnb_uses_admit(reading), 0);
    nnb_uses_destroy(reading);
    nnb_uses_destroy(writing);
}

/* Whether the main thread sleeps. */
static int is_waited_for(void)
{
    char state = 0;
    FILE *stat = fopen("/proc/self/stat", "r");
    CHECK(stat && fscanf(stat, "%*d %*s %c", &state) == 1);
    fclose(stat);
    return state == 'S';
}

static void *close_first(void *unused)
{
    (void)unused;
    while (!is_waited_for())
        sched_yield();
    nnb_buffer_close(buffers[0]);
    return NULL;
}

static void closing(void)
{
    nnb_uses *u, *other;
    CHECK_EQ(nnb_uses_create(&u, buffers, 1, NULL, 0), 0);
    CHECK_EQ(nnb_uses_create(&other, NULL, 0, buffers, 1), 0);
    CHECK_EQ(nnb_uses_enter(u, 0), 0);
    pthread_t thread = start(close_first, NULL);
    CHECK_EQ(nnb_uses_enter(other, soon(50000000000u)), -ESHUTDOWN); /* told at once, not at the deadline */
    finish(thread);
    nnb_buffer_close(buffers[0]);
    CHECK_EQ(look(buffers[0]).is_closed, 1);
    CHECK_EQ(look(buffers[0]).is_idle, 0);
    nnb_uses_settle(other, nnb_gate_moves(0));
    CHECK_EQ(nnb_uses_admit(other), 0);
    nnb_buffer_destroy(buffers[0]); /* the requests keep it */
    CHECK_EQ(nnb_uses_leave(u, NNB_UNCHANGED), 1);
    CHECK_EQ(look(buffers[0]).is_idle, 1);
    nnb_uses_destroy(u);
    nnb_uses_destroy(other);
}

int main(void)
{
    watchdog();
    for (int i = 0; i < BUFFERS; i++)
        CHECK_EQ(nnb_buffer_create(&buffers[i]), 0);
    threads_exclude_each_other();
    all_or_none();
    quick_way_in();
    closing();
    for (int i = 1; i < BUFFERS; i++)
        nnb_buffer_destroy(buffers[i]);
    return 0;
}
