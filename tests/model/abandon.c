/* Two threads run one execution in turn and abandon it, also when it is not theirs any more, as those do who clean up
 * after an error: that ends a run of their own only. */
#define PAGES 2
#define PAGE 768
#include "model.h"

#include "event_flag.c"

#include "message_queue.c"

#include "burst_wire.c"

#include "watch.c"

#include "burst_channel.c"

#include "burst_endpoint.c"

static ring requests, results;
static nnb_mq request, result;
static nnb_client *client;
static nnb_execution *execution;
static int arguments; /* plain memory: whose run touches it has the execution for itself */

static void *run(void *unused)
{
    int rc = nnb_execution_start(execution);
    assert(rc == 0 || rc == -EALREADY || rc == -EBUSY);
    if (rc == 0) {
        arguments++;
        nnb_execution_abandon(execution);
    }
    nnb_execution_abandon(execution);
    return unused;
}

int main(void)
{
    attach(&request, &requests, NNB_DATUM_SIZE, 4, NNB_SYNCHRONIZED, NNB_MQ_EXCLUSIVE);
    attach(&result, &results, NNB_DATUM_SIZE, 4, NNB_SYNCHRONIZED, NNB_MQ_EXCLUSIVE);
    assert(nnb_client_create(&client, &request, &result, 0) == 0);
    nnb_request nothing = {.measure = 0};
    assert(nnb_execution_create(&execution, client, &nothing) == 0);
    pthread_t a, b;
    pthread_create(&a, NULL, run, NULL);
    pthread_create(&b, NULL, run, NULL);
    return 0;
}
