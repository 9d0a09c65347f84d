/* What a round trip through two message queues costs, as csrc/bench.c measures that of a cache line.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include "../../csrc/bench.c"

#include <string.h>
#include <unistd.h>

#define DATUM 24
#define RING_DATUMS 1024

typedef struct queues {
    bench bench; /* the first, so that either is the other */
    nnb_mq *client_tx, *client_rx, *server_tx, *server_rx;
    uint64_t datums_there, datums_back;
} queues;

/* The queue is never full here (one packet is under way), so the write cannot fail with -EAGAIN. */
static int send_packet(queues *q, nnb_mq *tx, const uint8_t *packet, uint64_t datums)
{
    int rc = nnb_mq_write(tx, packet, datums);
    if (rc < 0)
        fail(&q->bench, rc);
    return rc < 0;
}

static int receive_packet(queues *q, nnb_mq *rx, uint8_t *packet, uint64_t datums)
{
    uint32_t spins = 0;
    int rc;
    while ((rc = nnb_mq_read(rx, packet, datums)) < 0) {
        if (rc != -EAGAIN)
            fail(&q->bench, rc);
        if (rc != -EAGAIN || give_up(&q->bench, &spins))
            return 1;
    }
    return 0;
}

static void *queue_client(void *arg)
{
    queues *q = arg;
    uint8_t packet[RING_DATUMS * DATUM];
    memset(packet, 1, sizeof packet);
    pthread_barrier_wait(&q->bench.start);
    uint64_t previous = nnb_now_ns();
    for (uint64_t i = 0; i < q->bench.warmup + q->bench.count; i++) {
        if (send_packet(q, q->client_tx, packet, q->datums_there) ||
            receive_packet(q, q->client_rx, packet, q->datums_back))
            return NULL;
        record(&q->bench, i, &previous);
    }
    return NULL;
}

static void *queue_server(void *arg)
{
    queues *q = arg;
    uint8_t packet[RING_DATUMS * DATUM];
    memset(packet, 2, sizeof packet);
    pthread_barrier_wait(&q->bench.start);
    for (uint64_t i = 0; i < q->bench.warmup + q->bench.count; i++)
        if (receive_packet(q, q->server_rx, packet, q->datums_there) ||
            send_packet(q, q->server_tx, packet, q->datums_back))
            return NULL;
    return NULL;
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

/* A packet of 24-byte datums through one queue and another one back through a second queue, both attached as a burst
 * attaches them (exclusive, sealed) and polled. As nnb_bench_line otherwise. */
int bench_queue(int client_cpu, int server_cpu, uint32_t datums_there, uint32_t datums_back, uint32_t warmup,
                uint32_t count, uint32_t *samples)
{
    queues q = {.bench = {.cpu = {client_cpu, server_cpu}, .warmup = warmup, .count = count, .samples = samples},
                .datums_there = datums_there,
                .datums_back = datums_back};
    int rc = new_queue(&q.client_tx, &q.server_rx);
    if (rc == 0)
        rc = new_queue(&q.server_tx, &q.client_rx);
    if (rc == 0)
        rc = run(&q.bench, queue_client, queue_server);
    nnb_mq_close(q.client_tx);
    nnb_mq_close(q.client_rx);
    nnb_mq_close(q.server_tx);
    nnb_mq_close(q.server_rx);
    return rc;
}
