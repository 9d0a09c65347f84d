/* The races of the event flag, made to happen: the linker sends the core's futex call through the hook below
 * (--wrap=syscall), so another process can be played at the exact instruction between the look and the sleep. */
#include "check.h" /* first: asks for GNU extensions */

#include <limits.h>
#include <linux/futex.h>
#include <stdarg.h>
#include <sys/syscall.h>

static uint32_t word;
static int waits, wakes;
static void (*before_wait)(void); /* runs once, when the core is about to sleep */
static int fake_wait;             /* if not 0: do not sleep, fail with this errno; -1: pretend to be woken */

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
        CHECK_EQ(a[1] & FUTEX_PRIVATE_FLAG, 0); /* the word crosses processes */
        CHECK_EQ((int)a[2], INT_MAX);
        wakes++;
    }
    if (number == SYS_futex && (a[1] & FUTEX_CMD_MASK) == FUTEX_WAIT_BITSET) {
        CHECK_EQ(a[1] & FUTEX_PRIVATE_FLAG, 0);
        waits++;
        if (before_wait) {
            void (*hook)(void) = before_wait;
            before_wait = NULL;
            hook();
        }
        if (fake_wait) {
            int fake = fake_wait;
            fake_wait = 0;
            errno = fake;
            return fake < 0 ? 0 : -1;
        }
    }
    return __real_syscall(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}

static void set_wanted(void) { CHECK(nnb_event_wake(&word, 1) >= 0); }
static void set_and_take_back(void)
{
    set_wanted();
    word = 0;
}
static void set_other(void) { CHECK(nnb_event_wake(&word, 8) >= 0); }

static void reset(void)
{
    word = 0;
    waits = wakes = fake_wait = 0;
    before_wait = NULL;
}

#define PAST 1u
#define SOON (nnb_now_ns() + 5000000)

int main(void)
{
    watchdog();
    uint32_t state = 99;

    /* arguments */
    CHECK_EQ(nnb_event_wait(&word, 0, &state, 0), -EINVAL);
    CHECK_EQ(nnb_event_wait(&word, 1, NULL, 0), -EINVAL);
    CHECK_EQ(nnb_event_wait(NULL, 1, &state, 0), -EINVAL);
    CHECK_EQ(nnb_event_wake(NULL, 1), -EINVAL);
    CHECK_EQ(nnb_event_wake(&word, 0), 0);
    CHECK_EQ(wakes, 0);

    /* no system call when every bit was pending already; one when a single bit is new */
    nnb_event_wake(&word, 3);
    nnb_event_wake(&word, 1);
    CHECK_EQ(wakes, 1);
    nnb_event_wake(&word, 5);
    CHECK_EQ(wakes, 2);

    /* pending bits are consumed without sleeping, only those of the mask, whatever the deadline */
    CHECK_EQ(nnb_event_wait(&word, 6, &state, PAST), 0);
    CHECK_EQ(state, 6);
    CHECK_EQ(word, 1);
    CHECK_EQ(nnb_event_wait_retry(&word, 1, &state, PAST), 0);
    CHECK_EQ(waits, 0);

    /* the bit comes between the look and the sleep: not lost */
    reset();
    before_wait = set_wanted;
    CHECK_EQ(nnb_event_wait(&word, 1, &state, SOON), -EAGAIN);
    CHECK_EQ(word, 1);
    reset();
    before_wait = set_wanted;
    CHECK_EQ(nnb_event_wait_retry(&word, 1, &state, 0), 0);
    CHECK_EQ(state, 1);
    CHECK_EQ(waits, 1);

    /* another bit changes: one round ends, retry sleeps again and then times out */
    reset();
    before_wait = set_other;
    CHECK_EQ(nnb_event_wait(&word, 1, &state, SOON), -EAGAIN);
    reset();
    before_wait = set_other;
    CHECK_EQ(nnb_event_wait_retry(&word, 1, &state, SOON), -ETIMEDOUT);
    CHECK_EQ(waits, 2);
    CHECK_EQ(word, 8);

    /* woken, but another waiter has taken the bit */
    reset();
    fake_wait = -1;
    CHECK_EQ(nnb_event_wait(&word, 1, &state, SOON), -EINTR);
    CHECK_EQ(state, 0);

    /* a signal and the bit at once: the bit is delivered, not lost */
    reset();
    fake_wait = EINTR;
    before_wait = set_wanted;
    CHECK_EQ(nnb_event_wait(&word, 1, &state, SOON), 0);
    CHECK_EQ(state, 1);
    CHECK_EQ(word, 0);

    /* a signal alone: the caller may run its handler */
    reset();
    fake_wait = EINTR;
    CHECK_EQ(nnb_event_wait(&word, 1, &state, SOON), -EINTR);
    reset();
    fake_wait = EINTR;
    CHECK_EQ(nnb_event_wait_retry(&word, 1, &state, SOON), -ERESTART);

    /* a deadline is not early */
    uint64_t deadline = nnb_now_ns() + 20000000;
    CHECK_EQ(nnb_event_wait_retry(&word, 1, &state, deadline), -ETIMEDOUT);
    CHECK(nnb_now_ns() >= deadline);

    /* without a deadline, and before a later one, the caller comes back about ten times a second */
    reset();
    CHECK_EQ(nnb_event_wait_retry(&word, 1, &state, 0), -ERESTART);
    CHECK_EQ(nnb_event_wait_retry(&word, 1, &state, nnb_now_ns() + 60000000000), -ERESTART);
    CHECK_EQ(waits, 2);

    /* a bit that another process puts back to what it was, and the signal before the sleep, are found at the next look */
    reset();
    before_wait = set_and_take_back;
    CHECK_EQ(nnb_event_wait_retry(&word, 1, &state, 0), -ERESTART);
    return 0;
}
