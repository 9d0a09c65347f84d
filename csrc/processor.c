/* A listener thread and its client on one processor: one of them moves.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * The kernel likes to run the woken thread where the waking one runs, and in a virtual machine it takes a processor that
 * is halted for one that is busy. Then each wake pushes the thread that wakes off its processor, nobody is there to poll,
 * and both ends sleep for each run. A wake that lasts long is the sign. The thread moves: the processor that it is on is
 * taken out of its mask for a moment. Nothing tells whether the others are idle, so it moves less often if that does not
 * help. Where they are busy it helps, too: a pair apart does ten runs while both ends have a processor, a pair on one does
 * one for each turn of all that want it.
 *
 * A listener that serves many clients would find others on the processor that it moves to, next time. It tells the client
 * where it polls, and the client moves, if it polls there in vain after it was woken. So the listener keeps its processor,
 * and all clients come to be elsewhere.
 */
#define _GNU_SOURCE
#include <sched.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "nnb_channel.h"

#define PUSHED_NS 15000u   /* a wake that takes longer has perhaps been interrupted */
#define SOONEST_NS 200000u /* between two moves */
#define LATEST_NS 16000000u
#define HELPED_NS 1000000u /* without being pushed again, and the move has helped */
#define SHORT_NS 100000u   /* the kernel's least slice */
#define RESET_ON_FORK 1u   /* SCHED_FLAG_RESET_ON_FORK, which not all C libraries have */

static _Thread_local struct {
    uint64_t moved_ns, pause_ns;
    long switches;
} here;

static void move_away(void)
{
    cpu_set_t all, others;
    int cpu = sched_getcpu();
    if (cpu < 0 || cpu >= CPU_SETSIZE || sched_getaffinity(0, sizeof(all), &all) < 0)
        return;
    others = all;
    CPU_CLR(cpu, &others);
    if (CPU_COUNT(&others) && sched_setaffinity(0, sizeof(others), &others) == 0)
        sched_setaffinity(0, sizeof(all), &all);
}

/* Whether another thread has taken our processor since the last look. */
static int was_pushed(void)
{
    struct rusage use;
    if (getrusage(RUSAGE_THREAD, &use) < 0)
        return 0;
    int pushed = use.ru_nivcsw != here.switches;
    here.switches = use.ru_nivcsw;
    return pushed;
}

static void move(uint64_t now)
{
    uint64_t since = now - here.moved_ns;
    if (since < here.pause_ns)
        return;
    here.pause_ns = since > HELPED_NS + here.pause_ns ? SOONEST_NS : 2 * here.pause_ns;
    if (here.pause_ns > LATEST_NS)
        here.pause_ns = LATEST_NS;
    here.moved_ns = now;
    move_away();
}

void nnb_note_wake(uint64_t began_ns)
{
    uint64_t now = nnb_now_ns();
    if (now - began_ns >= PUSHED_NS && was_pushed())
        move(now);
}

/* The kernel's struct sched_attr, which not all C libraries have. */
typedef struct attributes {
    uint32_t size, policy;
    uint64_t flags;
    int32_t nice;
    uint32_t priority;
    uint64_t runtime, deadline, period;
} attributes;

void nnb_ask_for_short_slices(void)
{
    attributes a = {.size = sizeof(a)};
    if (syscall(SYS_sched_getattr, 0, &a, sizeof(a), 0) < 0 || a.policy != SCHED_OTHER)
        return;
    a.runtime = SHORT_NS;
    if (a.nice >= 0)                      /* a better one would be lost, too */
        a.flags |= RESET_ON_FORK;         /* threads that it starts compute */
    syscall(SYS_sched_setattr, 0, &a, 0); /* not allowed: it runs as others do */
}

void nnb_set_hint(const nnb_channel *results, int what)
{
    if (results->mq->stamp)
        nnb_store_relaxed(&results->mq->stamp[NNB_HINT], NNB_HINT_WORD(what));
}

void nnb_part_from_listener(const nnb_channel *results)
{
    const nnb_a64 *stamp = results->mq->stamp;
    uint64_t told = stamp ? nnb_load_relaxed(&stamp[NNB_HINT]) : 0;
    if (told && told == NNB_HINT_WORD(sched_getcpu()))
        move(nnb_now_ns());
}
