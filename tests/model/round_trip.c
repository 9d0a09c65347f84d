/* Client and server of a burst, one request bound by the first run and known in the second: four packets, and both sides
 * sleep whenever they find nothing. */
#define PAGES 4
#define PAGE 640
#include "model.h"

#include "event_flag.c"

#include "message_queue.c"

#include "burst_wire.c"
#undef GENERAL_FAILURE
#undef LAST_STATUS

#include "burst_channel.c"

#define settle client_settle
#include "burst_endpoint.c"
#undef settle
#undef MAGIC
#undef GENERAL_FAILURE
#undef SPINS

#include "burst_server.c"
int nnb_uses_admit(nnb_uses *u) { return u != NULL; }
int nnb_uses_leave(nnb_uses *u, int outcome) { return u != NULL && outcome; }
nnb_uses *nnb_uses_share(nnb_uses *u) { return u; }
void nnb_uses_destroy(nnb_uses *u) { (void)u; }

#define RUNS 2
static ring requests, results;
static nnb_mq client_request, client_result, server_request, server_result;
static nnb_client *client;
static nnb_server *server;
static nnb_execution *execution;
static int argument, output; /* what a pool would hold */

static void *run(void *unused)
{
    for (int i = 1; i <= RUNS; i++) {
        argument = i;
        int rc = nnb_execution_run(execution);
        while (rc == -ERESTART)
            rc = nnb_execution_resume(execution);
        assert(rc == 0 && output == 10 * i);
    }
    return unused;
}

static void *serve(void *unused)
{
    for (int i = 1; i <= RUNS; i++) {
        int id;
        do
            id = nnb_server_next(server);
        while (id == -ERESTART);
        assert(id == (i == 1 ? NNB_PLAN_NEW : 0));
        if (id & NNB_PLAN_NEW)
            assert(nnb_server_keep_plan(server, 0) == 0);
        output = 10 * argument;
    }
    assert(nnb_server_reply(server) == 0);
    return unused;
}

int main(void)
{
    attach(&client_request, &requests, NNB_DATUM_SIZE, 4, NNB_SYNCHRONIZED, NNB_MQ_EXCLUSIVE);
    attach(&client_result, &results, NNB_DATUM_SIZE, 4, NNB_SYNCHRONIZED, NNB_MQ_EXCLUSIVE);
    attach(&server_request, &requests, NNB_DATUM_SIZE, 4, NNB_SYNCHRONIZED, NNB_MQ_EXCLUSIVE);
    attach(&server_result, &results, NNB_DATUM_SIZE, 4, NNB_SYNCHRONIZED, NNB_MQ_EXCLUSIVE);
    assert(nnb_client_create(&client, &client_request, &client_result, 0) == 0);
    assert(nnb_server_create(&server, &server_request, &server_result, 0, 1) == 0);
    nnb_request nothing = {.measure = 0};
    assert(nnb_execution_create(&execution, client, &nothing) == 0);
    pthread_t a, b;
    pthread_create(&a, NULL, run, NULL);
    pthread_create(&b, NULL, serve, NULL);
    return 0;
}
