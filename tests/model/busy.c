/* Two threads run on one client and a third closes it: one at a time is inside, the others are told so. */
#define PAGES 3
#define PAGE 768
#include "model.h"

#include "event_flag.c"

#define nnb_mq_close free_queue
void free_queue(nnb_mq *q);
#include "message_queue.c"
#undef nnb_mq_close
void nnb_mq_close(nnb_mq *q) { q->ring = NULL; }

#include "burst_wire.c"

#include "watch.c"

#include "burst_channel.c"

#include "burst_endpoint.c"

static ring requests, results;
static nnb_mq request, result;
static nnb_client *client;
static nnb_execution *executions[2];
static int reason; /* for which the client was closed */

static void run(nnb_execution *e)
{
    int rc = nnb_execution_start(e);
    assert(rc == 0 || rc == -EBUSY || rc == -ENOTCONN || rc == -ESHUTDOWN);
    assert(rc != -ENOTCONN || reason == 1);
    if (rc < 0)
        return;
    rc = nnb_execution_try(e, 1);
    assert(rc == -EAGAIN || rc == -EPIPE || rc == -ENOTCONN);
    nnb_execution_abandon(e);
}

static void *run_first(void *unused) { return run(executions[0]), unused; }
static void *run_second(void *unused) { return run(executions[1]), unused; }

static void *close_it(void *unused)
{
    reason = 1;
    int rc = nnb_client_close(client);
    assert(rc == 0 || rc == -EBUSY);
    return unused;
}

int main(void)
{
    attach(&request, &requests, NNB_DATUM_SIZE, 6, NNB_SYNCHRONIZED, NNB_MQ_EXCLUSIVE);
    attach(&result, &results, NNB_DATUM_SIZE, 6, NNB_SYNCHRONIZED, NNB_MQ_EXCLUSIVE);
    assert(nnb_client_create(&client, &request, &result, 0) == 0);
    nnb_request nothing = {.measure = 0};
    assert(nnb_execution_create(&executions[0], client, &nothing) == 0);
    assert(nnb_execution_create(&executions[1], client, &nothing) == 0);
    pthread_t a, b, c;
    pthread_create(&a, NULL, run_first, NULL);
    pthread_create(&b, NULL, run_second, NULL);
    pthread_create(&c, NULL, close_it, NULL);
    return 0;
}
