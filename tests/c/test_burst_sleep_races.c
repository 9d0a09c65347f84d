/* The races between a burst's ends and sleep, made to happen: the linker sends the core's futex call through the hook
 * (--wrap=syscall), which plays the other process at the instruction between the last look and the sleep. */
#define _GNU_SOURCE
#include <linux/futex.h>
#include <stdarg.h>
#include <sys/syscall.h>

#include "burst_pair.h"
#include "nnb_channel.h"
#include "nnb_server.h"

#define WINDOW 200000

static int waits, wakes, reads, read_by_poll; /* of the clock; of them those before the last wait */
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
    if (number == SYS_futex && (a[1] & FUTEX_CMD_MASK) == FUTEX_WAKE_BITSET)
        wakes++;
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

static void answer_late(void)
{
    fake_ns += WINDOW;
    answer_now();
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
    return read_by_poll > 1 ? (uint64_t)(read_by_poll - 1) * 1000 : 0;
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

    /* a window in vain is followed by 2, 4 ... 256 waits that sleep at once, and are over within the window */
    begin(WINDOW);
    e = new_execution(p.client, 1);
    CHECK_EQ(polled_for(e, answer_now), 0); /* the first one, too */
    for (int n = 1; n <= 9; n++) {
        CHECK_EQ(polled_for(e, answer_now), WINDOW);
        for (int i = 0; i < 1 << (n < 8 ? n : 8); i++)
            CHECK_EQ(polled_for(e, answer_now), 0);
    }
    /* one answer that polling finds begins anew */
    CHECK_EQ(nnb_execution_start(e), 0);
    answer_now();
    CHECK_EQ(nnb_execution_resume(e), 0);
    CHECK_EQ(polled_for(e, answer_now), WINDOW);
    /* waits that take longer do not count */
    for (int i = 0; i < 10; i++)
        CHECK_EQ(polled_for(e, answer_late), 0);
    CHECK_EQ(polled_for(e, answer_now), 0);
    CHECK_EQ(polled_for(e, answer_now), 0);
    /* a request that wakes the service gets no polling */
    __atomic_and_fetch(p.request->event, ~NNB_EVENT_NOT_EMPTY, __ATOMIC_SEQ_CST);
    CHECK_EQ(polled_for(e, answer_now), 0);
    CHECK_EQ(polled_for(e, answer_now), WINDOW);
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
