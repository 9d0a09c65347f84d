/* Which plan gives way to a new one: a dead one if there is any, else each in turn, but never the one that ran last. */
#include "burst_pair.h"

#include <sys/wait.h>

#define PLANS 8

static nnb_execution *request_on(nnb_client *c, int32_t slot)
{
    nnb_argument arguments[2] = {{0, 0, 0, 16, 0, 0}, {0, 0, 16, 16, 0, 0}};
    nnb_request r = {1, 1, 1, 0, arguments, NULL, &slot, 0};
    nnb_execution *e;
    CHECK_EQ(nnb_execution_create(&e, c, &r), 0);
    return e;
}

/* Runs a request and returns whether its plan was known. */
static int is_known(burst_pair *p, nnb_execution *e)
{
    CHECK_EQ(nnb_execution_start(e), 0);
    int id = nnb_server_try(p->server, 1);
    CHECK(id >= 0);
    if (id & NNB_PLAN_NEW)
        CHECK_EQ(nnb_server_keep_plan(p->server, (uint32_t)id & (NNB_PLAN_NEW - 1)), 0);
    CHECK_EQ(nnb_server_reply(p->server), 0);
    CHECK_EQ(nnb_execution_resume(e), 0);
    return !(id & NNB_PLAN_NEW);
}

int main(void)
{
    watchdog();
    burst_pair p = new_pair(32, 0, 0);
    nnb_execution *e[3 * PLANS];
    for (int i = 0; i < 3 * PLANS; i++)
        e[i] = request_on(p.client, i);
    for (int i = 0; i < PLANS; i++)
        CHECK_EQ(is_known(&p, e[i]), 0);
    for (int i = 0; i < PLANS; i++)
        CHECK_EQ(is_known(&p, e[i]), 1);

    uint32_t ids[NNB_MAX_PLANS];
    CHECK_EQ(nnb_server_free_slot(p.server, 3, ids), 1);
    CHECK_EQ(is_known(&p, e[PLANS]), 0); /* takes the place of the dead one */
    for (int i = 0; i < PLANS; i++)
        if (i != 3)
            CHECK_EQ(is_known(&p, e[i]), 1);
    CHECK_EQ(is_known(&p, e[PLANS]), 1);

    for (int i = PLANS + 1; i < 3 * PLANS; i++) { /* one that is used all the time stays */
        CHECK_EQ(is_known(&p, e[0]), 1);
        CHECK_EQ(is_known(&p, e[i]), 0);
    }

    /* a forked child has inherited no plan, nor anything else that could be used or given back */
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        CHECK_EQ(nnb_server_free_slot(p.server, 0, ids), 0);
        CHECK_EQ(nnb_server_next(p.server), -ECHILD);
        CHECK_EQ(nnb_execution_start(e[0]), -ECHILD);
        nnb_server_hang_up(p.server);
        nnb_server_destroy(p.server);
        _exit(0);
    }
    int status;
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK_EQ(status, 0);
    CHECK_EQ(is_known(&p, e[0]), 1);

    for (int i = 0; i < 3 * PLANS; i++)
        nnb_execution_destroy(e[i]);
    end_pair(&p);
    return 0;
}
