/* A request that was given up still waits in the ring: the next one is not put beside it, where a server that takes all
 * it finds there for one packet would take both for one. */
#include "burst_pair.h"

static burst_pair p;
static nnb_row row;

static uint64_t in_ring(void) { return nnb_mq_capacity(p.request) - (uint64_t)nnb_mq_available_to_write(p.request); }

static void serve_one(void)
{
    CHECK(nnb_server_try(p.server, 1) >= 0);
    CHECK_EQ(nnb_server_reply(p.server), 0);
}

static int run_out(nnb_execution *e)
{
    nnb_execution_set_timeout(e, 1);
    int rc = run_to_end(e);
    nnb_execution_set_timeout(e, 0);
    return rc;
}

int main(void)
{
    watchdog();
    p = new_pair(64, 0, 0);
    nnb_client_watch(p.client, &row);
    nnb_execution *first = new_execution(p.client, 1), *second = new_execution(p.client, 2);
    CHECK_EQ(run_out(first), -ETIMEDOUT);
    uint64_t one = in_ring();
    CHECK(one > 0);

    /* it is sent when the late answer has come */
    CHECK_EQ(nnb_execution_start(second), 0);
    CHECK_EQ(nnb_execution_try(second, 1), -EAGAIN);
    CHECK_EQ(in_ring(), one);
    serve_one();
    CHECK_EQ(in_ring(), 0);
    CHECK_EQ(nnb_execution_try(second, 1), -EAGAIN); /* drops the answer, sends */
    CHECK_EQ(in_ring(), one);
    serve_one();
    CHECK_EQ(nnb_execution_try(second, 1), 0);
    CHECK_EQ(row.counters[NNB_DROPPED], 1);

    /* its time is over before: nothing was sent, no answer is due for it */
    CHECK_EQ(run_out(first), -ETIMEDOUT);
    CHECK_EQ(run_out(second), -ECANCELED);
    CHECK_EQ(nnb_execution_result(second)->status, -1);
    CHECK_EQ(in_ring(), one);

    /* nor for one that is given up before it was sent */
    CHECK_EQ(nnb_execution_start(second), 0);
    nnb_execution_abandon(second);
    CHECK_EQ(in_ring(), one);
    serve_one();
    CHECK_EQ(nnb_execution_start(first), 0);
    serve_one();
    CHECK_EQ(nnb_execution_try(first, 1), -EAGAIN);
    CHECK_EQ(nnb_execution_try(first, 1), 0);
    CHECK_EQ(row.counters[NNB_DROPPED], 2);

    /* one that the server has taken, but not answered, is no obstacle */
    CHECK_EQ(run_out(first), -ETIMEDOUT);
    CHECK(nnb_server_try(p.server, 1) >= 0);
    CHECK_EQ(nnb_execution_start(second), 0);
    CHECK_EQ(in_ring(), one);
    CHECK_EQ(nnb_server_reply(p.server), 0);
    serve_one();
    CHECK_EQ(run_out(second), -EALREADY);
    CHECK_EQ(nnb_execution_try(second, 1), -EAGAIN);
    CHECK_EQ(nnb_execution_try(second, 1), 0);

    /* what does not fit is said at once, or when its turn comes */
    CHECK_EQ(row.counters[NNB_REQUESTS], row.counters[NNB_RESULTS]);
    nnb_execution_destroy(first);
    nnb_execution_destroy(second);
    end_pair(&p);

    p = new_pair(10, 0, 0);
    first = new_execution(p.client, 1); /* 10 datums */
    nnb_argument argument = {0, 0, 0, 16, 9, 0};
    uint32_t dims[9] = {0};
    nnb_request large = {1, 0, 0, 9, &argument, dims, NULL, 0}; /* 12 datums */
    CHECK_EQ(nnb_execution_create(&second, p.client, &large), 0);
    CHECK_EQ(run_out(first), -ETIMEDOUT);
    CHECK_EQ(nnb_execution_start(second), 0);
    serve_one();
    CHECK_EQ(nnb_execution_try(second, 1), -ENOBUFS);
    CHECK_EQ(nnb_execution_run(second), -ENOBUFS);
    nnb_execution_destroy(first);
    nnb_execution_destroy(second);
    end_pair(&p);
    return 0;
}
