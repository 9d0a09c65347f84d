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
    uint8_t packet[RING_DATUMS * DATUM]; /* the client's */
} queues;

/* The queue is never full here (one packet is under way), so the write cannot fail with -EAGAIN. */
static int send_packet(queues *q, nnb_mq *tx, const uint8_t *packet, uint64_t datums)
{
    int rc = nnb_mq_write(tx, packet, datums);
    if (rc < 0)
        fail(&q->bench, rc);
    return rc;
}

static int receive_packet(queues *q, nnb_mq *rx, uint8_t *packet, uint64_t datums)
{
    uint32_t spins = 0;
    int rc;
    while ((rc = nnb_mq_read(rx, packet, datums)) == -EAGAIN)
        if (give_up(&q->bench, &spins))
            return -1;
    if (rc < 0)
        fail(&q->bench, rc);
    return rc;
}

static int ask(bench *b, uint64_t i)
{
    queues *q = (queues *)b;
    (void)i;
    int rc = send_packet(q, q->client_tx, q->packet, q->datums_there);
    return rc < 0 ? rc : receive_packet(q, q->client_rx, q->packet, q->datums_back);
}

static void *answer(void *arg)
{
    queues *q = arg;
    uint8_t packet[RING_DATUMS * DATUM];
    memset(packet, 2, sizeof packet);
    for (uint64_t i = 0; i < q->bench.rounds; i++)
        if (receive_packet(q, q->server_rx, packet, q->datums_there) < 0 ||
            send_packet(q, q->server_tx, packet, q->datums_back) < 0)
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
    queues q = {.datums_there = datums_there, .datums_back = datums_back};
    memset(q.packet, 1, sizeof q.packet);
    int rc = new_queue(&q.client_tx, &q.server_rx);
    if (rc == 0)
        rc = new_queue(&q.server_tx, &q.client_rx);
    if (rc == 0)
        rc = measure(&q.bench, ask, answer, (int[]){client_cpu, server_cpu}, warmup, count, samples);
    nnb_mq_close(q.client_tx);
    nnb_mq_close(q.client_rx);
    nnb_mq_close(q.server_tx);
    nnb_mq_close(q.server_rx);
    return rc;
}
