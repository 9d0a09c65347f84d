/* The round trips that `nnburst bench` measures: a bare cache line and a burst (the queue:
 * benchmarks/record/queue.c).
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#define _GNU_SOURCE
#include <sched.h>
#include <stdalign.h>

#include "nnb_internal.h"

#define BENCH_LIMIT_NS 5000000000u
#define SPINS_PER_CLOCK_CHECK 65536

typedef struct bench {
    alignas(NNB_CACHE_LINE) nnb_a64 ball;   /* the bounced line: odd = the server's turn, even = the client's */
    alignas(NNB_CACHE_LINE) nnb_a32 result; /* 0 or the first errno, which ends both threads */
    alignas(NNB_CACHE_LINE) uint64_t rounds;
    uint64_t deadline;
} bench;

static void fail(bench *b, int rc) { nnb_cas32_relaxed(&b->result, 0, (uint32_t)-rc); /* only the first counts */ }

/* Called after each look without success. Returns 1 if the measurement must end. Pauses, because a look without a
 * pause would fetch the line while its owner still writes it. */
static int give_up(bench *b, uint32_t *spins)
{
    nnb_pause();
    if (++*spins % SPINS_PER_CLOCK_CHECK)
        return 0;
    if (nnb_now_ns() > b->deadline)
        fail(b, -ETIMEDOUT);
    return nnb_load32_relaxed(&b->result) != 0;
}

static uint32_t lap(uint64_t *previous)
{
    uint64_t now = nnb_now_ns(), ns = now - *previous;
    *previous = now;
    return ns > UINT32_MAX ? UINT32_MAX : (uint32_t)ns;
}

/* SYNC POINT: the release store of one side ↔ the acquire load of the other; the ball is all that they share. */
static int pass_ball(bench *b, uint64_t mine, uint64_t theirs)
{
    uint32_t spins = 0;
    if (mine)
        nnb_store_release(&b->ball, mine);
    while (nnb_load_acquire(&b->ball) != theirs)
        if (give_up(b, &spins))
            return -1;
    return 0;
}

static int throw_ball(bench *b, uint64_t i) { return pass_ball(b, 2 * i + 1, 2 * i + 2); }

static void *return_balls(void *arg)
{
    bench *b = arg;
    for (uint64_t i = 0; i < b->rounds; i++)
        if (pass_ball(b, 2 * i, 2 * i + 1))
            return NULL;
    nnb_store_release(&b->ball, 2 * b->rounds);
    return NULL;
}

static int pin(int cpu)
{
    cpu_set_t wanted;
    CPU_ZERO(&wanted);
    CPU_SET((size_t)cpu, &wanted);
    return sched_setaffinity(0, sizeof wanted, &wanted) < 0 ? -errno : 0;
}

/* Measures round trips between this thread, which asks, and a new thread that serves. Each has its CPU. */
static int measure(bench *b, int (*ask)(bench *b, uint64_t i), void *(*serve)(void *), const int cpus[2],
                   uint32_t warmup, uint32_t count, uint32_t *samples)
{
    cpu_set_t own;
    pthread_t server;
    if (!count || !samples)
        return -EINVAL;
    if (sched_getaffinity(0, sizeof own, &own) < 0)
        return -errno;
    b->rounds = (uint64_t)warmup + count;
    b->deadline = nnb_now_ns() + BENCH_LIMIT_NS;
    int rc = pin(cpus[1]); /* the new thread inherits the CPU */
    if (!rc && !(rc = -pthread_create(&server, NULL, serve, b))) {
        if ((rc = pin(cpus[0])) < 0)
            fail(b, rc); /* the server finds no client and gives up */
        uint64_t previous = nnb_now_ns();
        for (uint64_t i = 0; !rc && i < b->rounds && !(rc = ask(b, i)); i++) {
            uint32_t ns = lap(&previous);
            if (i >= warmup)
                samples[i - warmup] = ns;
        }
        pthread_join(server, NULL);
        rc = -(int)nnb_load32_acquire(&b->result);
    }
    sched_setaffinity(0, sizeof own, &own);
    return rc;
}

int nnb_bench_line(int client_cpu, int server_cpu, uint32_t warmup, uint32_t count, uint32_t *samples)
{
    bench b = {0};
    return measure(&b, throw_ball, return_balls, (int[]){client_cpu, server_cpu}, warmup, count, samples);
}

int nnb_bench_runs(nnb_execution *e, uint32_t count, uint32_t *samples)
{
    if (!count || !samples)
        return -EINVAL;
    uint64_t previous = nnb_now_ns();
    for (uint32_t i = 0; i < count; i++) {
        int rc = e ? nnb_execution_begin(e) : 0; /* first looks without reading the clock */
        while (rc == -EAGAIN || rc == -ERESTART)
            rc = nnb_execution_resume(e);
        if (rc)
            return rc < 0 ? rc : -EIO;
        samples[i] = lap(&previous);
    }
    return 0;
}
