/* Client and server of a burst: a first run, one step after the other, binds the request and leaves both NOT_EMPTY
 * bits set; the second is run by two threads, which sleep whenever they find nothing. */
#define PAGES 4
#define PAGE 768
#include "model.h"

#include "event_flag.c"

#include "message_queue.c"

#include "burst_wire.c"

#include "watch.c"

#include "burst_channel.c"

#define settle client_settle
#include "burst_endpoint.c"
#undef settle
#undef MAGIC

#include "burst_server.c"
int nnb_uses_admit(nnb_uses *u) { return u != NULL; }
int nnb_uses_leave(nnb_uses *u, int outcome) { return u != NULL && outcome; }
nnb_uses *nnb_uses_share(nnb_uses *u) { return u; }
void nnb_uses_destroy(nnb_uses *u) { (void)u; }

static ring requests, results;
static nnb_mq client_request, client_result, server_request, server_result;
static nnb_client *client;
static nnb_server *server;
static nnb_execution *execution;
static int argument, output; /* what a pool would hold */

static void *run(void *unused)
{
    argument = 2;
    int rc = nnb_execution_run(execution);
    while (rc == -ERESTART)
        rc = nnb_execution_resume(execution);
    assert(rc == 0 && output == 20);
    return unused;
}

static void *serve(void *unused)
{
    int id;
    do
        id = nnb_server_next(server);
    while (id == -ERESTART);
    assert(id == 0); /* the plan that was kept */
    output = 10 * argument;
    assert(nnb_server_reply(server) == 0);
    return unused;
}

static void run_first(void)
{
    assert(nnb_execution_start(execution) == 0);
    assert(nnb_server_try(server, 1) == NNB_PLAN_NEW && nnb_server_keep_plan(server, 0) == 0);
    assert(nnb_server_reply(server) == 0);
    assert(nnb_execution_try(execution, 1) == 0);
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
    run_first();
    pthread_t a, b;
    pthread_create(&a, NULL, run, NULL);
    pthread_create(&b, NULL, serve, NULL);
    return 0;
}
