/* One thread runs an execution and is answered, another one runs in between, and a third moves the first execution to
 * another burst: it never runs on both, and what its run left is seen where it runs next. */
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
static nnb_mq request, result, answering;
static nnb_client *client;
static nnb_execution *execution, *other;
static const uint8_t answer[2 * NNB_DATUM_SIZE] = {[8] = 2, [24] = RES_TIMING};
static int arguments; /* plain memory: whose run touches it has the execution for itself */

static void be_answered(nnb_execution *e)
{
    assert(nnb_mq_put(&answering, answer, sizeof answer) == 0);
    assert(nnb_execution_try(e, 1) == 0);
}

static void *run_here(void *unused)
{
    int rc = nnb_execution_start(execution);
    assert(rc == 0 || rc == -ESTALE || rc == -EBUSY);
    if (rc == 0) {
        arguments++;
        be_answered(execution);
    }
    return unused;
}

static void *run_other(void *unused)
{
    int rc = nnb_execution_advance(other, other);
    assert(rc == -EAGAIN || rc == -EBUSY);
    if (rc == -EAGAIN)
        be_answered(other);
    return unused;
}

static void *move(void *unused)
{
    int rc = nnb_execution_leave(execution);
    assert(rc == 0 || rc == -EALREADY);
    if (rc == 0)
        arguments++; /* it runs on another burst */
    return unused;
}

int main(void)
{
    attach(&request, &requests, NNB_DATUM_SIZE, 6, NNB_SYNCHRONIZED, NNB_MQ_EXCLUSIVE);
    attach(&result, &results, NNB_DATUM_SIZE, 6, NNB_SYNCHRONIZED, NNB_MQ_EXCLUSIVE);
    attach(&answering, &results, NNB_DATUM_SIZE, 6, NNB_SYNCHRONIZED, NNB_MQ_EXCLUSIVE);
    assert(nnb_client_create(&client, &request, &result, 0) == 0);
    nnb_request nothing = {.measure = 0};
    assert(nnb_execution_create(&execution, client, &nothing) == 0);
    assert(nnb_execution_create(&other, client, &nothing) == 0);
    pthread_t a, b, c;
    pthread_create(&a, NULL, run_here, NULL);
    pthread_create(&b, NULL, run_other, NULL);
    pthread_create(&c, NULL, move, NULL);
    return 0;
}
