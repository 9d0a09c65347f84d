/* A burst between two threads: every request gets its own answer, whatever mix of polling and sleeping; known packets
 * come back as known plans; freeing a slot drops them while requests are running. */
#include "burst_pair.h"

#define ROUNDS (UNDER_SANITIZER ? 2000 : 30000)

static nnb_server *server;
static uint64_t served;

/* Answers with a status that only the request's own tag explains. */
static void *serve(void *unused)
{
    (void)unused;
    for (;;) {
        int id = nnb_server_next(server);
        if (id == -ERESTART)
            continue;
        if (id == -EPIPE)
            return NULL;
        CHECK(id >= 0);
        const nnb_request *r = nnb_server_request(server);
        CHECK_EQ(r->n_inputs, 2);
        CHECK_EQ(r->n_outputs, 1);
        CHECK_EQ(r->arguments[1].has_no_value, 1);
        CHECK_EQ(r->pools[1], 9);
        uint32_t tag = r->arguments[0].offset;
        if (id & NNB_PLAN_NEW) {
            int rc = nnb_server_keep_plan(server, (uint32_t)id & ~(uint32_t)NNB_PLAN_NEW);
            CHECK(rc == 0 || rc == -ESTALE);
        }
        nnb_shape shape = {1, 1, 0};
        nnb_result result = {tag % 3 ? 4 : 0, 1, 1, &shape, &tag, NNB_NO_TIME, NNB_NO_TIME};
        CHECK_EQ(nnb_server_set_result(server, &result), 0);
        served++;
    }
}

static void *free_slots(void *unused)
{
    uint32_t ids[NNB_MAX_PLANS];
    (void)unused;
    for (int i = 0; i < 200; i++)
        CHECK(nnb_server_free_slot(server, 7 + i % 4, ids) <= 8);
    return NULL;
}

static void ping_pong(uint64_t client_window, uint64_t server_window, int rounds)
{
    burst_pair p = new_pair(32, client_window, server_window);
    nnb_row rows[2] = {{0}};
    nnb_client_watch(p.client, &rows[0]);
    nnb_server_watch(p.server, &rows[1]);
    nnb_execution *e[12];
    server = p.server;
    served = 0;
    for (uint32_t i = 0; i < 12; i++)
        e[i] = new_execution(p.client, i);
    pthread_t thread = start(serve, NULL), other = start(free_slots, NULL);
    for (int i = 0; i < rounds; i++) {
        uint32_t tag = (uint32_t)i % 12;
        CHECK_EQ(run_to_end(e[tag]), tag % 3 ? 4 : 0);
        if (tag % 3 == 0)
            CHECK_EQ(nnb_execution_result(e[tag])->dims[0], tag);
    }
    finish(other);
    nnb_server_hang_up(p.server);
    finish(thread);
    const uint64_t *c = rows[0].counters, *s = rows[1].counters;
    CHECK_EQ(served, rounds);
    CHECK_EQ(c[NNB_REQUESTS], rounds);
    CHECK_EQ(c[NNB_RESULTS], rounds);
    CHECK_EQ(c[NNB_DROPPED], 0);
    CHECK_EQ(s[NNB_PLAN_HITS] + s[NNB_PLAN_MISSES], rounds);
    for (int i = 0; i < 12; i++)
        nnb_execution_destroy(e[i]);
    end_pair(&p);
}

int main(void)
{
    watchdog();
    ping_pong(0, 0, ROUNDS / 10);
    ping_pong(50000, 50000, ROUNDS);
    ping_pong(0, 1000, ROUNDS / 10);
    ping_pong(1000, 0, ROUNDS / 10);
    return 0;
}
