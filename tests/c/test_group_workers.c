/* Workers of a group that come and go: one that is destroyed while it leads leaves the lead to another one, and a request
 * that it had fails; a run that was stuck, and is over, asks for no more workers; those that were needed stay for
 * the next time, and leave when that does not come; a ring wakes a sleeper once. The clock is the test's own (--wrap=nnb_now_ns), and so is how long a
 * sleep lasts (--wrap=syscall). */
#define _GNU_SOURCE
#include <linux/futex.h>
#include <stdarg.h>
#include <sys/syscall.h>
#include <time.h>

#include "burst_pair.h"
#include "nnb_group.h"

#ifndef SYS_futex_waitv
#define SYS_futex_waitv 449
#endif

#define SECOND 1000000000ull
#define MOST 12

static _Atomic uint64_t clock_ns;
static _Atomic uint64_t quiet_ns; /* a sleep that may last as long as that ends at once, with nothing heard */
static _Atomic uint32_t leader_sleeps, long_sleeps, asked;

uint64_t __wrap_nnb_now_ns(void);
uint64_t __wrap_nnb_now_ns(void) { return clock_ns += 100; }

long __real_syscall(long number, ...);
long __wrap_syscall(long number, ...);

long __wrap_syscall(long number, ...)
{
    va_list list;
    va_start(list, number);
    long a[6] = {0};
    for (int i = 0; i < (number == SYS_futex ? 6 : number == SYS_futex_waitv ? 5 : 3); i++)
        a[i] = va_arg(list, long);
    va_end(list);
    if (number == SYS_futex_waitv && a[1])
        leader_sleeps++;
    if (number == SYS_futex && a[1] == FUTEX_WAIT && (!a[3] || ((struct timespec *)a[3])->tv_sec)) {
        long_sleeps++;
        const struct timespec *t = (struct timespec *)a[3];
        if (t && (uint64_t)t->tv_sec * SECOND <= quiet_ns) {
            errno = ETIMEDOUT;
            return -1;
        }
    }
    return __real_syscall(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}

static void rest(void) { clock_nanosleep(CLOCK_MONOTONIC, 0, &(struct timespec){.tv_nsec = 100000}, NULL); }

static nnb_group *group;
static burst_pair pairs[3];

static void open_group(int n, uint64_t window)
{
    clock_ns = SECOND;
    leader_sleeps = long_sleeps = asked = 0;
    CHECK_EQ(nnb_group_create(&group, 2, 127), 0);
    for (int i = 0; i < n; i++) {
        pairs[i] = new_pair(16, window, i ? 0 : window);
        CHECK_EQ(nnb_group_add(group, pairs[i].server, (uint64_t)i, 1, NULL, 0), i);
    }
}

static nnb_worker *new_worker(void)
{
    nnb_worker *w;
    CHECK_EQ(nnb_worker_create(&w, group), 0);
    return w;
}

/* Whose request comes next. */
static int next_burst(nnb_worker *w)
{
    int event;
    while ((event = nnb_group_next(w)) == -EUSERS)
        asked++;
    if (event < 0 || event >= NNB_BURST_ENDED)
        return event;
    int i = event % NNB_PLAN_NEW / NNB_BURST_PLANS;
    if (event & NNB_PLAN_NEW) {
        nnb_server_request(pairs[i].server);
        CHECK_EQ(nnb_server_keep_plan(pairs[i].server, (uint32_t)event % NNB_BURST_PLANS), 0);
    }
    return i;
}

static nnb_execution *send(int i)
{
    nnb_execution *e = new_execution(pairs[i].client, 0);
    CHECK_EQ(nnb_execution_start(e), 0);
    return e;
}

static void end(nnb_execution *e, int want)
{
    int rc;
    while ((rc = nnb_execution_resume(e)) == -ERESTART)
        ;
    CHECK_EQ(rc, want);
    nnb_execution_destroy(e);
}

static void end_all(nnb_worker *w, int n)
{
    for (int i = 0; i < n; i++)
        nnb_server_hang_up(pairs[i].server);
    nnb_group_wake_all(group);
    for (int i = 0; i < n; i++)
        CHECK(next_burst(w) >= NNB_BURST_ENDED);
    CHECK_EQ(nnb_group_answer(w), 0);
}

static void close_group(int n)
{
    nnb_group_destroy(group);
    for (int i = 0; i < n; i++)
        end_pair(&pairs[i]);
}

/* Between two runs, and with a run of its own (short ones are the leader's). */
static void leader_that_is_destroyed_leaves_the_lead(int with_run)
{
    open_group(2, 0);
    nnb_worker *w = new_worker();
    for (int k = 0; k < 2; k++)
        for (int i = 0; i < 2; i++) {
            nnb_execution *e = send(i);
            CHECK_EQ(next_burst(w), i);
            CHECK_EQ(nnb_group_answer(w), 0);
            end(e, 0);
        }
    nnb_execution *first = send(0);
    if (with_run)
        CHECK_EQ(next_burst(w), 0);
    nnb_worker_destroy(w);
    CHECK_EQ(nnb_group_workers(group), 0);
    if (with_run)
        end(first, 2);
    w = new_worker();
    nnb_execution *e[2] = {with_run ? send(0) : first, send(1)};
    CHECK_EQ(next_burst(w) + next_burst(w), 1); /* one after the other */
    CHECK_EQ(nnb_group_answer(w), 0);
    for (int i = 0; i < 2; i++)
        end(e[i], 0);
    end_all(w, 2);
    nnb_group_close(group);
    CHECK_EQ(next_burst(w), -EPIPE);
    nnb_worker_destroy(w);
    close_group(2);
}

/* Answers what comes, until the group is closed. */
static void *serve(void *argument)
{
    nnb_worker *w = argument;
    int event;
    while ((event = next_burst(w)) >= 0)
        ;
    CHECK(event == -EPIPE || event == -ESHUTDOWN);
    nnb_worker_destroy(w);
    return NULL;
}

static void run_that_was_stuck_is_over(void)
{
    open_group(3, 50000);
    nnb_worker *workers[2] = {new_worker(), new_worker()};
    nnb_execution *e[3];
    for (int i = 0; i < 2; i++) {
        e[i] = send(i);
        CHECK_EQ(next_burst(workers[i]), i); /* new: beside the others */
    }
    e[2] = send(2); /* waits for a processor, until the two are stuck */
    pthread_t third = start(serve, new_worker());
    while (!leader_sleeps) {
        clock_ns += 3000000;
        rest();
    }
    end(e[2], 0);
    for (int i = 1; i >= 0; i--) {
        CHECK_EQ(nnb_group_answer(workers[i]), 0);
        end(e[i], 0);
    }
    clock_ns += 2 * SECOND; /* long enough to ask again */
    uint32_t before = asked;
    end(send(1), 0);
    CHECK_EQ(asked, before);
    nnb_group_close(group);
    finish(third);
    for (int i = 0; i < 2; i++)
        nnb_worker_destroy(workers[i]);
    close_group(3);
}

static void worker_that_is_not_needed_stays_for(uint64_t seconds, int stays)
{
    pthread_t threads[MOST];
    open_group(0, 0);
    quiet_ns = seconds * SECOND;
    for (int i = 0; i < MOST; i++)
        threads[i] = start(serve, new_worker());
    if (stays) {
        while (long_sleeps < MOST)
            rest();
        CHECK_EQ(nnb_group_workers(group), MOST);
    } else {
        while (nnb_group_workers(group) > 5) /* the leader, and four more stay */
            rest();
    }
    quiet_ns = 0;
    nnb_group_close(group);
    for (int i = 0; i < MOST; i++)
        finish(threads[i]);
    nnb_group_destroy(group);
}

static void *ring(void *bell)
{
    rest();
    nnb_ring(bell);
    return NULL;
}

static void bell_that_ended_a_sleep_does_not_end_the_next_one(void)
{
    static nnb_a32 bell;
    pthread_t thread;
    CHECK_EQ(pthread_create(&thread, NULL, ring, &bell), 0);
    CHECK_EQ(nnb_sleep_on_bell(&bell, 0), 0);
    CHECK_EQ(pthread_join(thread, NULL), 0);
    CHECK_EQ(nnb_sleep_on_bell(&bell, 1000000), 1);
}

int main(void)
{
    watchdog();
    bell_that_ended_a_sleep_does_not_end_the_next_one();
    leader_that_is_destroyed_leaves_the_lead(0);
    leader_that_is_destroyed_leaves_the_lead(1);
    worker_that_is_not_needed_stays_for(2, 1);
    worker_that_is_not_needed_stays_for(60, 0);
    if (__real_syscall(SYS_futex_waitv, NULL, 0, 0, NULL, 0) == -1 && errno == ENOSYS)
        SKIP("without futex_waitv a leader's sleeps look like any other's");
    run_that_was_stuck_is_over();
    return 0;
}
