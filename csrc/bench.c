/* What a round trip between two cores costs: the bare cache line, and the message queue on top of it.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdalign.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "nnb_atomic.h"
#include "nnburst.h"

#define DATUM 24
#define RING_DATUMS 1024
#define BENCH_LIMIT_NS 5000000000u
#define SPINS_PER_CLOCK_CHECK 65536

typedef struct bench {
    alignas(NNB_CACHE_LINE) nnb_a64 ball; /* the bounced line: odd = the server's turn, even = the client's */
    alignas(NNB_CACHE_LINE) nnb_a32 result; /* 0 or the first errno; anything but 0 makes both threads leave */
    alignas(NNB_CACHE_LINE) int cpu[2];
    uint64_t warmup, count, deadline;
    uint32_t *samples;
    nnb_mq *client_tx, *client_rx, *server_tx, *server_rx;
    uint64_t datums_there, datums_back;
    pthread_barrier_t start;
} bench;

static void fail(bench *b, int rc)
{
    nnb_cas32_relaxed(&b->result, 0, (uint32_t)-rc); /* the first one counts */
}

/* Called once per unsuccessful look; true when the measurement must be given up. Pausing between looks is what makes
 * the round trip shortest: without it the line is asked for again while the owner still writes it. */
static int give_up(bench *b, uint32_t *spins)
{
    nnb_pause();
    if (++*spins % SPINS_PER_CLOCK_CHECK)
        return 0;
    if (nnb_now_ns() > b->deadline)
        fail(b, -ETIMEDOUT);
    return nnb_load32_relaxed(&b->result) != 0;
}

/* The chain of readings is never broken, so no time is lost between samples. */
static void record(bench *b, uint64_t i, uint64_t *previous)
{
    uint64_t now = nnb_now_ns();
    if (i >= b->warmup) {
        uint64_t ns = now - *previous;
        b->samples[i - b->warmup] = ns > UINT32_MAX ? UINT32_MAX : (uint32_t)ns;
    }
    *previous = now;
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

static void *line_client(void *arg)
{
    bench *b = arg;
    pthread_barrier_wait(&b->start);
    uint64_t previous = nnb_now_ns();
    for (uint64_t i = 0; i < b->warmup + b->count; i++) {
        if (pass_ball(b, 2 * i + 1, 2 * i + 2))
            return NULL;
        record(b, i, &previous);
    }
    return NULL;
}

static void *line_server(void *arg)
{
    bench *b = arg;
    pthread_barrier_wait(&b->start);
    for (uint64_t i = 0; i < b->warmup + b->count; i++)
        if (pass_ball(b, 2 * i, 2 * i + 1))
            return NULL;
    nnb_store_release(&b->ball, 2 * (b->warmup + b->count));
    return NULL;
}

/* The queue is never full here (one packet is under way), so the write cannot fail with -EAGAIN. */
static int send_packet(bench *b, nnb_mq *q, const uint8_t *packet, uint64_t datums)
{
    int rc = nnb_mq_write(q, packet, datums);
    if (rc < 0)
        fail(b, rc);
    return rc < 0;
}

static int receive_packet(bench *b, nnb_mq *q, uint8_t *packet, uint64_t datums)
{
    uint32_t spins = 0;
    int rc;
    while ((rc = nnb_mq_read(q, packet, datums)) < 0) {
        if (rc != -EAGAIN)
            fail(b, rc);
        if (rc != -EAGAIN || give_up(b, &spins))
            return 1;
    }
    return 0;
}

static void *queue_client(void *arg)
{
    bench *b = arg;
    uint8_t packet[RING_DATUMS * DATUM];
    memset(packet, 1, sizeof packet);
    pthread_barrier_wait(&b->start);
    uint64_t previous = nnb_now_ns();
    for (uint64_t i = 0; i < b->warmup + b->count; i++) {
        if (send_packet(b, b->client_tx, packet, b->datums_there) ||
            receive_packet(b, b->client_rx, packet, b->datums_back))
            return NULL;
        record(b, i, &previous);
    }
    return NULL;
}

static void *queue_server(void *arg)
{
    bench *b = arg;
    uint8_t packet[RING_DATUMS * DATUM];
    memset(packet, 2, sizeof packet);
    pthread_barrier_wait(&b->start);
    for (uint64_t i = 0; i < b->warmup + b->count; i++)
        if (receive_packet(b, b->server_rx, packet, b->datums_there) ||
            send_packet(b, b->server_tx, packet, b->datums_back))
            return NULL;
    return NULL;
}

/* The thread inherits the CPU from this one, which goes back to its own afterwards. */
static int start_thread(pthread_t *thread, int cpu, void *(*body)(void *), bench *b)
{
    cpu_set_t own, wanted;
    CPU_ZERO(&wanted);
    CPU_SET((size_t)cpu, &wanted);
    if (sched_getaffinity(0, sizeof own, &own) < 0 || sched_setaffinity(0, sizeof wanted, &wanted) < 0)
        return -errno;
    int rc = pthread_create(thread, NULL, body, b);
    sched_setaffinity(0, sizeof own, &own);
    return -rc;
}

static int run(bench *b, void *(*client)(void *), void *(*server)(void *))
{
    pthread_t threads[2];
    int rc = pthread_barrier_init(&b->start, NULL, 2);
    if (rc)
        return -rc;
    b->deadline = nnb_now_ns() + BENCH_LIMIT_NS;
    rc = start_thread(&threads[1], b->cpu[1], server, b);
    if (rc == 0) {
        rc = start_thread(&threads[0], b->cpu[0], client, b);
        if (rc) {
            fail(b, rc); /* the server leaves the barrier, finds no client and gives up */
            pthread_barrier_wait(&b->start);
        } else {
            pthread_join(threads[0], NULL);
        }
        pthread_join(threads[1], NULL);
        rc = -(int)nnb_load32_acquire(&b->result);
    }
    pthread_barrier_destroy(&b->start);
    return rc;
}

static int is_cpu(int cpu) /* whether the process may use it, sched_setaffinity says */
{
    return cpu >= 0 && cpu < CPU_SETSIZE;
}

static bench *new_bench(int client_cpu, int server_cpu, uint32_t warmup, uint32_t count, uint32_t *samples)
{
    bench *b = aligned_alloc(NNB_CACHE_LINE, sizeof *b);
    if (!b)
        return NULL;
    memset(b, 0, sizeof *b);
    b->cpu[0] = client_cpu;
    b->cpu[1] = server_cpu;
    b->warmup = warmup;
    b->count = count;
    b->samples = samples;
    return b;
}

static int check_arguments(int client_cpu, int server_cpu, uint32_t count, const uint32_t *samples)
{
    return !count || !samples || !is_cpu(client_cpu) || !is_cpu(server_cpu) ? -EINVAL : 0;
}

int nnb_bench_line(int client_cpu, int server_cpu, uint32_t warmup, uint32_t count, uint32_t *samples)
{
    int rc = check_arguments(client_cpu, server_cpu, count, samples);
    if (rc)
        return rc;
    bench *b = new_bench(client_cpu, server_cpu, warmup, count, samples);
    if (!b)
        return -ENOMEM;
    rc = run(b, line_client, line_server);
    free(b);
    return rc;
}

/* Two handles on one new queue, as the two ends of a burst channel hold them. */
static int new_queue(nnb_mq **tx, nnb_mq **rx)
{
    nnb_grantor grantors[5];
    uint64_t size;
    int n = nnb_mq_layout(RING_DATUMS, DATUM, NNB_SYNCHRONIZED, NNB_LAYOUT_LINES, 1, grantors, &size);
    if (n < 0)
        return n;
    int fd = nnb_memfd_create("nnburst-bench", size, NNB_SEALS_FIXED_SIZE);
    if (fd < 0)
        return fd;
    uint32_t options = NNB_MQ_EXCLUSIVE | NNB_MQ_SEALED;
    int rc = nnb_mq_open(tx, grantors, (uint32_t)n, &fd, 1, DATUM, NNB_SYNCHRONIZED, options | NNB_MQ_RESET);
    if (rc == 0)
        rc = nnb_mq_open(rx, grantors, (uint32_t)n, &fd, 1, DATUM, NNB_SYNCHRONIZED, options);
    close(fd);
    return rc;
}

int nnb_bench_queue(int client_cpu, int server_cpu, uint32_t datums_there, uint32_t datums_back, uint32_t warmup,
                    uint32_t count, uint32_t *samples)
{
    int rc = check_arguments(client_cpu, server_cpu, count, samples);
    if (rc)
        return rc;
    if (!datums_there || !datums_back || datums_there > RING_DATUMS || datums_back > RING_DATUMS)
        return -EINVAL;
    bench *b = new_bench(client_cpu, server_cpu, warmup, count, samples);
    if (!b)
        return -ENOMEM;
    b->datums_there = datums_there;
    b->datums_back = datums_back;
    rc = new_queue(&b->client_tx, &b->server_rx);
    if (rc == 0)
        rc = new_queue(&b->server_tx, &b->client_rx);
    if (rc == 0)
        rc = run(b, queue_client, queue_server);
    nnb_mq_close(b->client_tx);
    nnb_mq_close(b->client_rx);
    nnb_mq_close(b->server_tx);
    nnb_mq_close(b->server_rx);
    free(b);
    return rc;
}

int nnb_bench_runs(nnb_execution *e, uint32_t count, uint32_t *samples)
{
    if (!count || !samples)
        return -EINVAL;
    uint64_t previous = nnb_now_ns();
    for (uint32_t i = 0; i < count; i++) {
        int rc = nnb_execution_begin(e); /* looks without the clock first */
        while (rc == -EAGAIN || rc == -ERESTART)
            rc = nnb_execution_resume(e);
        if (rc)
            return rc < 0 ? rc : -EIO;
        uint64_t now = nnb_now_ns();
        samples[i] = (uint32_t)(now - previous);
        previous = now;
    }
    return 0;
}

int nnb_bench_clock(uint32_t count, uint32_t *samples)
{
    if (!count || !samples)
        return -EINVAL;
    uint64_t previous = nnb_now_ns();
    for (uint32_t i = 0; i < count; i++) {
        uint64_t now = nnb_now_ns();
        samples[i] = (uint32_t)(now - previous);
        previous = now;
    }
    return 0;
}
