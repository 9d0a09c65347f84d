/* The races between a burst's ends and sleep, made to happen: the linker sends the core's futex call through the hook
 * (--wrap=syscall), which plays the other process at the instruction between the last look and the sleep. */
#define _GNU_SOURCE
#include <linux/futex.h>
#include <sched.h>
#include <stdarg.h>
#include <sys/resource.h>
#include <sys/syscall.h>

#include "burst_pair.h"
#include "nnb_channel.h"
#include "nnb_server.h"

static int waits, wakes, reads, read_by_poll; /* the clock; before the last wait, without two reads for each wake */
static uint64_t wake_takes;                   /* how far a wake moves that clock */
static int is_pushed, moves;                  /* a wake costs this thread its processor; how often its mask was set */
static long switches;
static uint64_t fake_ns; /* 0: the clock is the system's, else it goes on by 1 us each time that it is read */
static void (*before_wait)(void), (*before_each_wait)(void);

long __real_syscall(long number, ...);
long __wrap_syscall(long number, ...);

long __wrap_syscall(long number, ...)
{
    va_list list;
    va_start(list, number);
    long a[6];
    for (int i = 0; i < 6; i++)
        a[i] = va_arg(list, long);
    va_end(list);
    if (number == SYS_futex && (a[1] & FUTEX_CMD_MASK) == FUTEX_WAKE_BITSET) {
        wakes++;
        reads -= 2;
        fake_ns += wake_takes; /* 0 as long as the clock is the system's */
        switches += is_pushed;
    }
    if (number == SYS_futex && (a[1] & FUTEX_CMD_MASK) == FUTEX_WAIT_BITSET) {
        waits++;
        read_by_poll = reads;
        if (before_each_wait)
            before_each_wait();
        if (before_wait) {
            void (*hook)(void) = before_wait;
            before_wait = NULL;
            hook();
        }
    }
    return __real_syscall(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}

/* Two processors, this thread's and another one; the kernel says how often it was pushed off. */
int __wrap_getrusage(int who, struct rusage *use);
int __wrap_sched_getaffinity(pid_t pid, size_t size, cpu_set_t *set);
int __wrap_sched_setaffinity(pid_t pid, size_t size, const cpu_set_t *set);
int __wrap_sched_getcpu(void);

int __wrap_getrusage(int who, struct rusage *use)
{
    (void)who;
    *use = (struct rusage){.ru_nivcsw = switches};
    return 0;
}

int __wrap_sched_getcpu(void) { return 1; }

int __wrap_sched_getaffinity(pid_t pid, size_t size, cpu_set_t *set)
{
    (void)pid, (void)size;
    CPU_ZERO(set);
    CPU_SET(0, set);
    CPU_SET(1, set);
    return 0;
}

int __wrap_sched_setaffinity(pid_t pid, size_t size, const cpu_set_t *set)
{
    (void)pid, (void)size;
    CHECK(CPU_ISSET(0, set));
    CHECK_EQ(CPU_ISSET(1, set) != 0, moves++ % 2); /* without its processor, then with it again */
    return 0;
}

uint64_t __real_nnb_now_ns(void);
uint64_t __wrap_nnb_now_ns(void);

uint64_t __wrap_nnb_now_ns(void)
{
    reads++;
    return fake_ns ? (fake_ns += 1000) : __real_nnb_now_ns();
}

static burst_pair p;

static void answer_now(void)
{
    int id = nnb_server_try(p.server, 1);
    CHECK(id >= 0);
    CHECK_EQ(nnb_server_reply(p.server), 0);
}

static void hang_up_client(void) { nnb_client_hang_up(p.client); }
static void hang_up_server(void) { nnb_server_hang_up(p.server); }

static nnb_execution *request_from;
static void send_now(void) { CHECK_EQ(nnb_execution_start(request_from), 0); }

static void change_another_bit(void) { __atomic_xor_fetch(p.request->event, 4, __ATOMIC_SEQ_CST); }

/* Nanoseconds that a run polls for an answer that comes when it sleeps. */
static uint64_t polled_for(nnb_execution *e, void (*hook)(void))
{
    fake_ns = __real_nnb_now_ns();
    reads = 0;
    before_wait = hook;
    CHECK_EQ(nnb_execution_run(e), 0);
    fake_ns = 0;
    return (uint64_t)(read_by_poll - 1) * 1000;
}

static void begin(uint64_t window)
{
    p = new_pair(32, window, window);
    waits = wakes = 0;
    before_wait = NULL;
}

int main(void)
{
    watchdog();

    /* the answer comes after the client's last look, before it sleeps: it must not sleep the slice out */
    begin(0);
    nnb_execution *e = new_execution(p.client, 1);
    before_wait = answer_now;
    uint64_t t0 = nnb_now_ns();
    CHECK_EQ(nnb_execution_run(e), 0); /* -ERESTART would mean that the wake was lost */
    CHECK_EQ(waits, 1);
    (void)t0;

    /* a request comes after the server's last look */
    request_from = e;
    before_wait = send_now;
    int id = nnb_server_next(p.server);
    CHECK(id >= 0);
    CHECK_EQ(nnb_server_reply(p.server), 0);
    CHECK_EQ(nnb_execution_resume(e), 0);

    /* the peer dies after the client's last look */
    before_wait = hang_up_client;
    CHECK_EQ(nnb_execution_run(e), -EPIPE);
    CHECK_EQ(nnb_execution_run(e), -ENOTCONN); /* this time nothing was sent */
    nnb_execution_destroy(e);
    end_pair(&p);

    /* the client dies after the server's last look: its end is woken, and need not wait for the next tick */
    begin(0);
    before_wait = hang_up_server;
    CHECK_EQ(nnb_server_next(p.server), -EPIPE);
    CHECK_EQ(waits, 1);
    CHECK(__atomic_load_n(p.request->event, __ATOMIC_SEQ_CST) & NNB_EVENT_HANG_UP);
    hang_up_client();
    CHECK(__atomic_load_n(p.result->event, __ATOMIC_SEQ_CST) & NNB_EVENT_HANG_UP);
    end_pair(&p);

    /* a peer that keeps changing the word keeps nobody from the interpreter */
    begin(0);
    before_each_wait = change_another_bit;
    CHECK_EQ(nnb_server_next(p.server), -ERESTART);
    CHECK(waits > 1);
    before_each_wait = NULL;
    end_pair(&p);

    /* a zero window never polls: one futex wait per answer that is not there yet, and a wake from the other side */
    begin(0);
    e = new_execution(p.client, 1);
    for (int i = 1; i <= 5; i++) {
        before_wait = answer_now;
        CHECK_EQ(nnb_execution_run(e), 0);
        CHECK_EQ(waits, i);
    }
    nnb_execution_destroy(e);
    end_pair(&p);

    /* while answers are there when they are looked for, nobody enters the kernel, but for the first wakes */
    begin(1000000000);
    e = new_execution(p.client, 1);
    for (int i = 0; i < 100; i++) {
        CHECK_EQ(nnb_execution_start(e), 0);
        answer_now();
        CHECK_EQ(nnb_execution_try(e, 1), 0);
    }
    CHECK_EQ(waits, 0);
    CHECK(wakes <= 4); /* NOT_EMPTY and NOT_FULL of each queue, once */
    nnb_execution_destroy(e);
    end_pair(&p);

    /* a window that is in vain is halved the next time, down to an eighth; now and then it is tried in full */
    begin(200000);
    e = new_execution(p.client, 1);
    for (int i = 0; i < 40; i++) {
        CHECK_EQ(polled_for(e, answer_now), i % 16 == 0 ? 200000 : 200000 >> (i < 3 ? i : 3));
        CHECK_EQ(waits, i + 1);
    }
    /* one answer that polling finds makes it whole again */
    CHECK_EQ(nnb_execution_start(e), 0);
    answer_now();
    CHECK_EQ(nnb_execution_resume(e), 0);
    CHECK_EQ(polled_for(e, answer_now), 200000);
    CHECK_EQ(polled_for(e, answer_now), 100000);
    nnb_execution_destroy(e);
    end_pair(&p);

    /* an end that is pushed off its processor by the other end, which it wakes, moves to another one, now and then */
    fake_ns = __real_nnb_now_ns();
    begin(1);
    e = new_execution(p.client, 1);
    is_pushed = 1;
    wake_takes = 50000;
    CHECK_EQ(nnb_execution_start(e), 0);
    CHECK_EQ(wakes, 1);
    CHECK_EQ(moves, 2); /* a client */
    fake_ns += 9000000;
    answer_now();
    CHECK_EQ(wakes, 3); /* and one that says that there is room */
    CHECK_EQ(moves, 4); /* a listener */
    CHECK_EQ(nnb_execution_resume(e), 0);
    const struct {
        int pushed;
        uint64_t takes, later;
        int moved;
    } cases[] = {
        {1, 50000, 0, 0},       /* it has only just moved */
        {0, 50000, 9000000, 0}, /* it kept its processor */
        {1, 5000, 9000000, 0},  {1, 50000, 9000000, 2},
        {1, 50000, 300000, 2},  {1, 50000, 300000, 0}, /* that did not help: the pauses grow */
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        is_pushed = cases[i].pushed;
        wake_takes = cases[i].takes;
        fake_ns += cases[i].later;
        moves = 0;
        before_wait = answer_now;
        CHECK_EQ(nnb_execution_run(e), 0);
        CHECK_EQ(moves, cases[i].moved);
    }
    nnb_execution_destroy(e);
    end_pair(&p);

    /* ... unless neither polls: then both do best on one */
    begin(0);
    e = new_execution(p.client, 1);
    is_pushed = 1;
    fake_ns += 9000000;
    moves = 0;
    before_wait = answer_now;
    CHECK_EQ(nnb_execution_run(e), 0);
    CHECK(wakes > 0);
    CHECK_EQ(moves, 0);
    is_pushed = 0;
    wake_takes = fake_ns = 0;
    nnb_execution_destroy(e);
    end_pair(&p);

    /* a client that was woken, and polls in vain where the listener polls, leaves it the processor */
    p = new_pair_as(NNB_LAYOUT_STAMPED, 32, 200000, 200000);
    e = new_execution(p.client, 1);
    moves = 0;
    nnb_set_hint(nnb_server_outbox(p.server), 1);
    polled_for(e, answer_now);
    CHECK_EQ(moves, 0); /* it was not woken before */
    polled_for(e, answer_now);
    CHECK_EQ(moves, 2);
    const int others[] = {0, 2, NNB_NOTHING};
    for (size_t i = 0; i < sizeof(others) / sizeof(others[0]); i++) {
        nnb_set_hint(nnb_server_outbox(p.server), others[i]);
        polled_for(e, answer_now);
        CHECK_EQ(moves, 2);
    }
    /* one that is told to rest does not poll */
    CHECK(polled_for(e, answer_now) > 10000);
    nnb_set_hint(nnb_server_outbox(p.server), NNB_REST);
    CHECK(polled_for(e, answer_now) < 10000);
    nnb_execution_destroy(e);
    end_pair(&p);

    /* a writer that waits for room is told when there is some */
    begin(0);
    e = new_execution(p.client, 1);
    CHECK_EQ(nnb_execution_start(e), 0);
    answer_now();
    CHECK_EQ(nnb_execution_resume(e), 0);
    CHECK(__atomic_load_n(p.request->event, __ATOMIC_SEQ_CST) & NNB_EVENT_NOT_FULL);
    CHECK(__atomic_load_n(p.result->event, __ATOMIC_SEQ_CST) & NNB_EVENT_NOT_FULL);
    nnb_execution_destroy(e);
    end_pair(&p);

    /* also when what filled the ring answers nothing, or is no packet */
    begin(0);
    e = new_execution(p.client, 1);
    uint8_t bytes[32 * NNB_DATUM_SIZE] = {0};
    nnb_mq writer = *p.result;
    CHECK_EQ(nnb_mq_write(&writer, bytes, 32), 0);
    CHECK_EQ(nnb_execution_start(e), 0);
    CHECK_EQ(nnb_mq_available_to_write(&writer), 32);
    CHECK(__atomic_fetch_and(p.result->event, ~NNB_EVENT_NOT_FULL, __ATOMIC_SEQ_CST) & NNB_EVENT_NOT_FULL);
    CHECK_EQ(nnb_mq_write(&writer, bytes, 32), 0);
    CHECK_EQ(nnb_execution_try(e, 1), 2);
    CHECK_EQ(nnb_mq_available_to_write(&writer), 32);
    CHECK(__atomic_load_n(p.result->event, __ATOMIC_SEQ_CST) & NNB_EVENT_NOT_FULL);
    nnb_execution_destroy(e);
    end_pair(&p);
    return 0;
}
