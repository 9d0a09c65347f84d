/* What both ends of a burst time: the same runs, with weights that add up to all of them; nothing where a peer stamps
 * nothing, and nothing worse than wrong numbers where it stamps lies. */
#include "burst_pair.h"
#include "nnb_channel.h"

#define RUNS 5000

static nnb_row client_row, server_row;

static burst_pair watched_pair(uint32_t layout)
{
    uint32_t options = NNB_MQ_EXCLUSIVE | NNB_MQ_SEALED;
    burst_pair p;
    p.request = new_queue(32, NNB_DATUM_SIZE, NNB_SYNCHRONIZED, layout, options);
    p.result = new_queue(32, NNB_DATUM_SIZE, NNB_SYNCHRONIZED, layout, options);
    nnb_mq *request = second_handle(p.request), *result = second_handle(p.result);
    CHECK_EQ(nnb_client_create(&p.client, p.request, p.result, 50000), 0);
    CHECK_EQ(nnb_server_create(&p.server, request, result, 50000, 8), 0);
    memset(&client_row, 0, sizeof client_row);
    memset(&server_row, 0, sizeof server_row);
    nnb_client_watch(p.client, &client_row);
    nnb_server_watch(p.server, &server_row);
    return p;
}

static void run_once(burst_pair *p, nnb_execution *e)
{
    CHECK_EQ(nnb_execution_start(e), 0);
    int id = nnb_server_try(p->server, 1);
    CHECK(id >= 0);
    if (id & NNB_PLAN_NEW)
        CHECK_EQ(nnb_server_keep_plan(p->server, 0), 0);
    CHECK_EQ(nnb_server_reply(p->server), 0);
    CHECK_EQ(nnb_execution_try(e, 1), 0);
}

static uint64_t in_buckets(const nnb_histogram *h)
{
    uint64_t n = 0;
    for (uint32_t i = 0; i < NNB_BUCKETS; i++)
        n += h->buckets[i];
    return n;
}

static void check_counters(void)
{
    CHECK_EQ(client_row.counters[NNB_REQUESTS], RUNS);
    CHECK_EQ(client_row.counters[NNB_RESULTS], RUNS);
    CHECK_EQ(server_row.counters[NNB_REQUESTS], RUNS);
    CHECK_EQ(server_row.counters[NNB_PLAN_HITS], RUNS - 1);
}

static void timed_runs_stand_for_all(void)
{
    burst_pair p = watched_pair(NNB_LAYOUT_STAMPED);
    nnb_execution *e = new_execution(p.client, 1);
    for (int i = 0; i < RUNS; i++)
        run_once(&p, e);
    check_counters();
    uint64_t n = server_row.histograms[NNB_EXECUTION].count;
    CHECK(n <= RUNS && n > RUNS - 512);
    CHECK_EQ(server_row.histograms[NNB_QUEUE_WAIT].count, n);
    CHECK_EQ(client_row.histograms[NNB_ROUND_TRIP].count, n);
    CHECK_EQ(client_row.histograms[NNB_EXECUTION].count, n);
    CHECK_EQ(in_buckets(&server_row.histograms[NNB_EXECUTION]), n);
    CHECK_EQ(client_row.histograms[NNB_EXECUTION].sum, server_row.histograms[NNB_EXECUTION].sum);
    CHECK(client_row.histograms[NNB_ROUND_TRIP].sum >= client_row.histograms[NNB_EXECUTION].sum);

    /* a trace has every run from now on, in order */
    nnb_trace_entry entries[8];
    nnb_trace trace = {.room = 8, .entries = entries};
    nnb_client_trace(p.client, &trace, 1);
    for (int i = 0; i < 20; i++)
        run_once(&p, e);
    CHECK_EQ(trace.noted, 20);
    for (uint64_t i = 12; i < 20; i++) {
        const nnb_trace_entry *t = &entries[i % 8];
        CHECK_EQ(t->run, RUNS + i + 1);
        CHECK(t->sent && t->sent <= t->taken && t->taken <= t->answered && t->answered <= t->received);
    }
    nnb_execution_destroy(e);
    end_pair(&p);
}

/* One that runs can be told, one that waits is not run, one behind them is; and tags come again without harm. */
static void request_that_is_given_up_is_not_run(void)
{
    burst_pair p = watched_pair(NNB_LAYOUT_STAMPED);
    nnb_client_set_pipelined(p.client, -1);
    nnb_execution *e[3];
    for (int i = 0; i < 3; i++) {
        e[i] = new_execution(p.client, 1);
        nnb_execution_set_answer(e[i], 2);
    }
    run_once(&p, e[0]);
    for (int i = 0; i < 3; i++)
        CHECK_EQ(nnb_execution_launch(e[i], (uint64_t)i + 1, 0), -EAGAIN);
    CHECK_EQ(nnb_server_try(p.server, 1), 0);
    CHECK(!nnb_server_is_revoked(p.server));
    CHECK_EQ(nnb_execution_withdraw(e[0]), -EALREADY);
    CHECK(nnb_server_is_revoked(p.server));
    CHECK_EQ(nnb_execution_withdraw(e[1]), -EALREADY);
    CHECK_EQ(nnb_server_reply(p.server), 0);
    CHECK_EQ(nnb_server_try(p.server, 1), -EAGAIN); /* answered, not run */
    CHECK_EQ(nnb_server_try(p.server, 1), 0);
    CHECK(!nnb_server_is_revoked(p.server));
    CHECK_EQ(nnb_server_reply(p.server), 0);
    for (int i = 0; i < 3; i++) {
        CHECK_EQ(nnb_client_land(p.client), i + 1);
        CHECK_EQ(nnb_execution_status(e[i]), i == 1 ? 5 : 0); /* MISSED_DEADLINE */
    }
    for (int i = 0; i < (1 << 16) + 1; i++)
        run_once(&p, e[0]);

    /* long after the last deadline, the next request does not wipe one that was set behind it */
    CHECK_EQ(nnb_execution_launch(e[0], 1, 0), -EAGAIN);
    CHECK_EQ(nnb_execution_withdraw(e[0]), -EALREADY);
    CHECK_EQ(nnb_execution_launch(e[2], 3, 0), -EAGAIN);
    CHECK_EQ(nnb_server_try(p.server, 1), -EAGAIN);
    CHECK_EQ(nnb_server_try(p.server, 1), 0);
    CHECK_EQ(nnb_server_reply(p.server), 0);
    for (int i = 0; i < 3; i++)
        nnb_execution_destroy(e[i]);
    end_pair(&p);
}

/* The tags of deadlines repeat: the one that is left behind W must not be taken for that of a later request. */
static void deadline_of_an_old_request_is_no_other_ones(void)
{
    burst_pair p = watched_pair(NNB_LAYOUT_STAMPED);
    nnb_execution *e = new_execution(p.client, 1);
    run_once(&p, e);
    nnb_execution_set_timeout(e, 1);
    CHECK_EQ(nnb_execution_start(e), 0);
    CHECK_EQ(nnb_server_try(p.server, 1), -EAGAIN);
    CHECK_EQ(nnb_execution_try(e, 1), 5); /* MISSED_DEADLINE */
    nnb_execution_set_timeout(e, 0);
    for (int i = 0; i < (1 << 16) + 1; i++)
        run_once(&p, e);
    CHECK_EQ(nnb_server_deadline(p.server), 0);
    nnb_execution_destroy(e);
    end_pair(&p);
}

/* A request that did not fit and is taken back leaves no deadline to the one that is sent in its place. */
static void deadline_of_a_request_that_was_not_sent_is_no_other_ones(void)
{
    burst_pair p = watched_pair(NNB_LAYOUT_STAMPED);
    nnb_client_set_pipelined(p.client, -1);
    nnb_execution *e[32];
    int n = 0, fits = 1;
    while (fits) { /* the last one waits for room, with a deadline that is over at once */
        CHECK(n < 32);
        e[n] = new_execution(p.client, 1);
        nnb_execution_set_answer(e[n], 2);
        fits = (uint64_t)nnb_mq_available_to_write(p.request) >= 10;
        nnb_execution_set_timeout(e[n], !fits);
        CHECK_EQ(nnb_execution_launch(e[n], (uint64_t)n + 1, 0), -EAGAIN);
        n++;
    }
    CHECK_EQ(nnb_execution_withdraw(e[n - 1]), 0);
    nnb_execution_set_timeout(e[n - 1], 0);
    for (int i = 0; i < n; i++) {
        if (i == n - 1)
            CHECK_EQ(nnb_execution_launch(e[i], (uint64_t)i + 1, 0), -EAGAIN);
        int id = nnb_server_try(p.server, 1);
        CHECK(id >= 0);
        if (id & NNB_PLAN_NEW)
            CHECK_EQ(nnb_server_keep_plan(p.server, 0), 0);
        CHECK_EQ(nnb_server_reply(p.server), 0);
        CHECK_EQ(nnb_client_land(p.client), i + 1);
        CHECK_EQ(nnb_execution_status(e[i]), 0);
    }
    for (int i = 0; i < n; i++)
        nnb_execution_destroy(e[i]);
    end_pair(&p);
}

static void peer_without_stamps_is_served(void)
{
    burst_pair p = watched_pair(NNB_LAYOUT_LINES);
    nnb_execution *e = new_execution(p.client, 1);
    for (int i = 0; i < RUNS; i++)
        run_once(&p, e);
    check_counters();
    CHECK_EQ(server_row.histograms[NNB_EXECUTION].count, 0);
    CHECK(client_row.histograms[NNB_ROUND_TRIP].count > RUNS - 512);
    CHECK_EQ(client_row.histograms[NNB_QUEUE_WAIT].count, 0);
    nnb_execution_destroy(e);
    end_pair(&p);
}

static void lies_are_not_believed(void)
{
    burst_pair p = watched_pair(NNB_LAYOUT_STAMPED);
    nnb_execution *e = new_execution(p.client, 1);
    nnb_trace_entry entry;
    nnb_trace trace = {.room = 1, .entries = &entry};
    nnb_client_trace(p.client, &trace, 1);
    for (uint64_t i = 0; i < RUNS; i++) {
        CHECK_EQ(nnb_execution_start(e), 0);
        uint64_t tag = nnb_load_relaxed(&p.request->stamp[0]) >> 48 << 48, lie = i * 0x9e3779b97f4a7c15u;
        nnb_store_relaxed(&p.request->stamp[i % 2], i % 3 ? tag | lie >> 16 : lie);
        int id = nnb_server_try(p.server, 1);
        CHECK(id >= 0);
        if (id & NNB_PLAN_NEW)
            CHECK_EQ(nnb_server_keep_plan(p.server, 0), 0);
        CHECK_EQ(nnb_server_reply(p.server), 0);
        tag = nnb_load_relaxed(&p.result->stamp[0]) >> 48 << 48;
        nnb_store_relaxed(&p.result->stamp[i % 2], i % 5 ? tag | lie >> 16 : lie);
        CHECK_EQ(nnb_execution_try(e, 1), 0);
        if (entry.taken) /* what is told as known is possible */
            CHECK(entry.sent <= entry.taken && entry.taken <= entry.answered && entry.answered <= entry.received);
    }
    check_counters();
    CHECK(server_row.histograms[NNB_QUEUE_WAIT].max <= 3600ull * 1000000000u);
    CHECK_EQ(trace.noted, RUNS);
    nnb_execution_destroy(e);
    end_pair(&p);
}

static void time_before_the_machine_started_is_none(void)
{
    nnb_a64 stamp[2] = {0};
    nnb_mq q = {.stamp = stamp};
    nnb_channel ch = {.mq = &q};
    uint64_t time, lasted;
    uint32_t together;
    q.own_r = 0xffffull << 3;                                              /* of which the tag is made */
    nnb_store_relaxed(&stamp[0], 0xffffull << 48 | ((1ull << 48) - 1000)); /* 1000 ns before 0 */
    nnb_store_relaxed(&stamp[1], 0xffffull << 48);
    CHECK(!nnb_channel_stamp_of(&ch, 5000, &time, &lasted, &together));
    nnb_store_relaxed(&stamp[0], 0xffffull << 48 | 1000);
    CHECK(nnb_channel_stamp_of(&ch, 5000, &time, &lasted, &together));
    CHECK_EQ(time, 1000);
    q.own_w = q.own_r - 2 * NNB_DATUM_SIZE;
    for (uint32_t n = 0; n <= 128; n = 2 * n + 1) {
        nnb_channel_stamp(&ch, 2, 1000, 3000, n);
        CHECK(nnb_channel_stamp_of(&ch, 5000, &time, &lasted, &together));
        CHECK(time == 1000 && lasted == 3000 && together == (n < 63 ? n : 63));
    }
}

int main(void)
{
    watchdog();
    time_before_the_machine_started_is_none();
    timed_runs_stand_for_all();
    request_that_is_given_up_is_not_run();
    deadline_of_an_old_request_is_no_other_ones();
    deadline_of_a_request_that_was_not_sent_is_no_other_ones();
    peer_without_stamps_is_served();
    lies_are_not_believed();
    return 0;
}
