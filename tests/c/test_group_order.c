/* One worker of a group, step by step: which request comes next. By priority, then to the client that had least or whose
 * turn it is, a client that was idle saves nothing up, a run that was interrupted does not count against its client, but
 * many long ones do, as do those of bursts that it has closed, a client that thinks costs the others nothing, a burst that
 * has ended has no turn, and a request that came too late for the first look is not overlooked. A run does not wait for
 * those of a lower priority. The clock is the test's own (--wrap=nnb_now_ns): no run lasts so long that it seems stuck. */
#define _GNU_SOURCE
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "burst_pair.h"
#include "nnb_channel.h"

#define MOST 8

static nnb_group *group;
static nnb_worker *worker;
static burst_pair pairs[MOST];
static int is_open[MOST];
static int seats[MOST];

static void open_group(uint32_t words)
{
    CHECK_EQ(nnb_group_create(&group, 2, words), 0);
    CHECK_EQ(nnb_worker_create(&worker, group), 0);
}

static uint64_t clock_ns = 1000000000;

uint64_t __wrap_nnb_now_ns(void);
uint64_t __wrap_nnb_now_ns(void) { return __atomic_add_fetch(&clock_ns, 100, __ATOMIC_RELAXED); }

static void open_polling_burst(int i, uint64_t client, uint32_t priority, uint64_t window)
{
    pairs[i] = new_pair_as(NNB_LAYOUT_STAMPED, 1024, window, window);
    is_open[i] = 1;
    seats[i] = nnb_group_add(group, pairs[i].server, client, priority, NULL, 0);
    CHECK(seats[i] >= 0);
}

static void open_burst(int i, uint64_t client, uint32_t priority) { open_polling_burst(i, client, priority, 0); }

static int next_event(void)
{
    int event;
    do
        event = nnb_group_next(worker);
    while (event == -EUSERS);
    return event;
}

/* Whose request an event is; binds it if it is new. */
static int burst_of(int event)
{
    CHECK(event >= 0 && event < NNB_BURST_ENDED);
    int number = event % NNB_PLAN_NEW / NNB_BURST_PLANS;
    for (int i = 0; i < MOST; i++)
        if (is_open[i] && seats[i] == number) {
            if (event & NNB_PLAN_NEW) {
                nnb_server_request(pairs[i].server);
                CHECK_EQ(nnb_server_keep_plan(pairs[i].server, (uint32_t)event % NNB_BURST_PLANS), 0);
            }
            return i;
        }
    CHECK(!"a seat that was never given");
    return -1;
}

static int next_burst(void) { return burst_of(next_event()); }

/* A request whose answer nobody takes. */
static void send(int i)
{
    nnb_argument arguments[2] = {{0, 0, 0, 16, 0, 0}, {0, 0, 64, 16, 0, 0}};
    uint32_t dims[1] = {0};
    int32_t pools[1] = {7};
    nnb_request r = {1, 1, 1, 0, arguments, dims, pools, 0};
    uint8_t packet[8 * NNB_DATUM_SIZE];
    int n = nnb_wire_encode_request(&r, packet, 8);
    CHECK(n > 0);
    CHECK_EQ(nnb_mq_write(pairs[i].request, packet, (uint64_t)n), 0);
}

static void answer(void) { CHECK_EQ(nnb_group_answer(worker), 0); }

/* Its client takes its answers, and polls for the next one. */
static void take_answers(int i)
{
    uint8_t datum[NNB_DATUM_SIZE];
    while (nnb_mq_read(pairs[i].result, datum, 1) == 0)
        ;
    __atomic_fetch_or(pairs[i].result->event, NNB_EVENT_NOT_EMPTY, __ATOMIC_SEQ_CST);
}

static void close_all(void)
{
    for (int i = 0; i < MOST; i++)
        if (is_open[i])
            nnb_server_hang_up(pairs[i].server);
    nnb_group_wake_all(group);
    for (int i = 0; i < MOST; i++) {
        if (!is_open[i])
            continue;
        int event = next_event();
        CHECK(event >= NNB_BURST_ENDED);
        CHECK_EQ(nnb_worker_ending(worker), -EPIPE);
    }
    nnb_group_close(group);
    CHECK_EQ(next_event(), -EPIPE);
    nnb_worker_destroy(worker);
    nnb_group_destroy(group);
    for (int i = 0; i < MOST; i++) {
        if (!is_open[i])
            continue;
        end_pair(&pairs[i]);
        is_open[i] = 0;
    }
}

static void last_for(int ms) { clock_ns += (uint64_t)ms * 1000000; }

/* Its client does not poll any more: it has to be woken. */
static void fall_asleep(int i) { __atomic_fetch_and(pairs[i].result->event, ~NNB_EVENT_NOT_EMPTY, __ATOMIC_SEQ_CST); }

static void highest_priority_first(void)
{
    open_group(127);
    for (uint32_t i = 0; i < 3; i++)
        open_burst((int)i, i, 2 - i); /* 0 is LOW, 2 is HIGH */
    for (int i = 0; i < 3; i++) {
        send(i); /* all are known afterwards */
        CHECK_EQ(next_burst(), i);
    }
    for (int i = 2; i > 0; i--) { /* the higher its priority, the more it has had: that counts for nothing */
        send(i);
        CHECK_EQ(next_burst(), i);
        last_for(10 * i);
    }
    for (int i = 0; i < 3; i++)
        send(i);
    CHECK_EQ(next_burst(), 2);
    CHECK_EQ(next_burst(), 1);
    CHECK_EQ(next_burst(), 0);
    close_all();
}

static void least_served_client_first(void)
{
    open_group(127);
    open_burst(0, 7, 1);
    open_burst(1, 7, 1);
    open_burst(2, 8, 1);
    for (int i = 0; i < 3; i++) {
        send(i);
        CHECK_EQ(next_burst(), i);
    }
    answer();
    /* Client 7 has two bursts and runs of 20 ms, client 8 has one of which nothing lasts. */
    send(0);
    CHECK_EQ(next_burst(), 0);
    last_for(20);
    send(0);
    send(1);
    for (int i = 0; i < 5; i++)
        send(2);
    for (int i = 0; i < 5; i++)
        CHECK_EQ(next_burst(), 2);
    CHECK(next_burst() < 2);
    CHECK(next_burst() < 2);
    close_all();
}

static void idle_client_saves_nothing_up(void)
{
    open_group(127);
    open_burst(0, 1, 1);
    open_burst(1, 2, 1);
    send(1); /* client 2 is known, and then idle while client 1 has 200 ms */
    CHECK_EQ(next_burst(), 1);
    for (int i = 0; i < 10; i++) {
        send(0);
        CHECK_EQ(next_burst(), 0);
        last_for(20);
    }
    /* It has no 200 ms to catch up on: after few runs of as long the other one's turn has come. */
    send(0);
    int before = 0;
    for (; send(1), next_burst() == 1; before++)
        last_for(20);
    CHECK(before <= 4);
    CHECK_EQ(next_burst(), 1);
    close_all();
}

static void open_two_with_short_runs(void)
{
    open_group(127);
    open_burst(0, 1, 1);
    open_burst(1, 2, 1);
    for (int i = 0; i < 2 * 400; i++) { /* 200 ms each, and then short ones */
        send(i % 2);
        CHECK_EQ(next_burst(), i % 2);
        if (i < 2 * 200)
            last_for(1);
        answer();
        take_answers(i % 2);
    }
}

static void interrupted_run_counts_in_part(void)
{
    open_two_with_short_runs();
    send(0);
    CHECK_EQ(next_burst(), 0);
    last_for(12); /* another process had the processor */
    send(0);
    int before = 0;
    for (; send(1), next_burst() == 1; before++)
        CHECK(before < 400);
    CHECK_EQ(next_burst(), 1);
    close_all();
}

/* A client whose every fourth run takes 50 ms, the others nothing, beside one whose runs take 1 ms. */
static void many_long_runs_count(void)
{
    open_two_with_short_runs();
    uint64_t total_ms[2] = {0, 0}, n[2] = {0, 0};
    send(0);
    send(1);
    for (int i = 0; i < 8000; i++) {
        int next = next_burst(), ms = next ? 1 : n[0] % 4 ? 0 : 50;
        last_for(ms);
        total_ms[next] += (uint64_t)ms;
        n[next]++;
        answer();
        take_answers(next);
        send(next);
    }
    CHECK(total_ms[0] > 5000 && total_ms[0] < total_ms[1] * 5 / 4 && total_ms[1] < total_ms[0] * 5 / 4);
    close_all();
}

static void open_two_that_poll(void)
{
    open_group(127); /* two processors: one client has a turn */
    for (int i = 0; i < 2; i++)
        open_polling_burst(i, (uint64_t)i, 1, 50000);
    for (int i = 0; i < 4; i++) {
        send(i % 2);
        CHECK_EQ(next_burst(), i % 2);
    }
    answer();
    last_for(10); /* no turn is left */
}

static void begin_turn_beside_a_sleeper(void)
{
    open_two_that_poll();
    send(0);
    CHECK_EQ(next_burst(), 0);
    fall_asleep(1);
    send(1);
    for (int i = 0; i < 20; i++) { /* the other one has had less each time */
        send(0);
        CHECK_EQ(next_burst(), 0);
    }
}

static void client_that_polls_has_a_turn(void)
{
    begin_turn_beside_a_sleeper();
    last_for(2);
    fall_asleep(0);
    send(0);
    CHECK_EQ(next_burst(), 1);
    for (int i = 0; i < 20; i++) { /* now it is the other one's */
        send(1);
        CHECK_EQ(next_burst(), 1);
    }
    last_for(2);
    CHECK_EQ(next_burst(), 0);
    close_all();
}

/* With all that it has taken it would be the other one's turn. */
static void first_run_counts_little(void)
{
    open_group(127);
    open_burst(0, 1, 1);
    for (int i = 2; i > 0; i--) {
        open_burst(i, (uint64_t)i + 1, 1);
        send(i);
        CHECK_EQ(next_burst(), i);
        answer();
    }
    for (int i = 0; i < 2; i++) {
        send(1);
        CHECK_EQ(next_burst(), 1);
        last_for(10);
        answer();
    }
    send(0);
    CHECK_EQ(next_burst(), 0);
    last_for(50);
    answer();
    send(1);
    send(0);
    CHECK_EQ(next_burst(), 0);
    CHECK_EQ(next_burst(), 1);
    close_all();
}

static void turns_wait_for_nobody_long(void)
{
    begin_turn_beside_a_sleeper();
    last_for(2);
    CHECK_EQ(next_burst(), 1);
    uint64_t before = clock_ns;
    send(0);
    CHECK_EQ(next_burst(), 0);
    CHECK(clock_ns > before + 10000); /* it was waited for */
    close_all();
}

static void turn_gives_way_to_priority(void)
{
    begin_turn_beside_a_sleeper();
    open_burst(2, 2, 0);
    send(2);
    int before = 0;
    for (; send(0), next_burst() == 0; before++)
        CHECK(before < 40); /* a queue that was not used is looked at now and then only */
    CHECK_EQ(next_burst(), 0);
    send(0);
    send(2);
    CHECK_EQ(next_burst(), 2);
    CHECK_EQ(next_burst(), 0);
    last_for(2);
    CHECK_EQ(next_burst(), 1);
    close_all();
}

/* How many runs of a client that always has a next request end in 50 ms, beside one that thinks for a while first. Both
 * poll for 50 us, and sleep then. */
static uint64_t runs_beside(uint64_t think_ns)
{
    open_group(127);
    for (int i = 0; i < 2; i++)
        open_polling_burst(i, (uint64_t)i, 1, 50000);
    for (int i = 0; i < 8; i++) {
        send(i % 2);
        CHECK_EQ(next_burst(), i % 2);
    }
    answer();
    uint64_t start = clock_ns, due[2] = {start, start}, waits_since[2] = {start, start}, n[2] = {0, 0};
    int is_sent[2] = {0, 0};
    while (clock_ns < start + 50000000) {
        clock_ns += 100;
        for (int i = 0; i < 2; i++) {
            if (!is_sent[i] && clock_ns >= due[i]) {
                send(i);
                is_sent[i] = 1;
                waits_since[i] = clock_ns;
            }
            if (is_sent[i] && clock_ns - waits_since[i] > 50000)
                fall_asleep(i);
        }
        int event = nnb_group_try(worker, 8);
        if (event == -EAGAIN)
            continue;
        int next = burst_of(event);
        clock_ns += 1000;
        answer();
        take_answers(next);
        is_sent[next] = 0;
        due[next] = clock_ns + (next ? think_ns : 0);
        n[next]++;
    }
    CHECK(n[1] >= 50000000 / (think_ns + 200000)); /* it does not starve either */
    close_all();
    return n[0];
}

static void client_that_thinks_costs_the_others_nothing(void)
{
    uint64_t alone = runs_beside(1000000000);
    CHECK(alone > 20000);
    static const uint64_t think_us[] = {20, 50, 100, 300, 1000};
    for (size_t i = 0; i < sizeof(think_us) / sizeof(*think_us); i++)
        CHECK(runs_beside(1000 * think_us[i]) >= alone * 8 / 10);
}

static void *send_to_sleeper(void *after_ns)
{
    while (__atomic_load_n(pairs[0].request->event, __ATOMIC_SEQ_CST) & NNB_EVENT_NOT_EMPTY)
        sched_yield();
    __atomic_fetch_add(&clock_ns, *(uint64_t *)after_ns, __ATOMIC_RELAXED);
    send(0);
    CHECK(nnb_event_wake(pairs[0].request->event, NNB_EVENT_NOT_EMPTY) >= 0);
    return NULL;
}

/* How long the leader polls before it sleeps; the request comes when it has slept for so long. */
static uint64_t polls_before_sleep(uint64_t for_ns)
{
    pthread_t sender;
    __atomic_fetch_or(pairs[0].request->event, NNB_EVENT_NOT_EMPTY, __ATOMIC_SEQ_CST);
    uint64_t start = clock_ns;
    CHECK_EQ(pthread_create(&sender, NULL, send_to_sleeper, &for_ns), 0);
    CHECK_EQ(next_burst(), 0);
    uint64_t polled = clock_ns - start - for_ns;
    CHECK_EQ(pthread_join(sender, NULL), 0);
    answer();
    return polled;
}

static void leader_polls_where_that_has_paid_lately(void)
{
    open_group(127);
    open_polling_burst(0, 1, 1, 48000);
    send(0);
    CHECK_EQ(next_burst(), 0);
    take_answers(0); /* it polls for them */
    answer();
    CHECK(polls_before_sleep(1000000) >= 48000); /* a first sleep ends at once: the bell has told of the burst */
    for (int i = 0; i < 20; i++)
        polls_before_sleep(1000000);
    CHECK(polls_before_sleep(1000000) < 5000);
    CHECK(polls_before_sleep(0) < 5000); /* a request that comes within the window, though it sleeps */
    CHECK(polls_before_sleep(1000000) >= 48000);
    close_all();
}

/* Its server is gone before the worker that has ended it comes back, and another one leads meanwhile. */
static void ended_burst_has_no_turn(void)
{
    CHECK_EQ(nnb_group_create(&group, 4, 127), 0);
    CHECK_EQ(nnb_worker_create(&worker, group), 0);
    for (int i = 0; i < 2; i++) {
        open_polling_burst(i, (uint64_t)i, 1, i ? 0 : 50000);
        send(i);
        CHECK_EQ(next_burst(), i);
    }
    answer();
    nnb_server_hang_up(pairs[0].server);
    nnb_group_wake_all(group);
    CHECK_EQ(next_event(), NNB_BURST_ENDED + seats[0] * NNB_BURST_PLANS);
    is_open[0] = 0;
    end_pair(&pairs[0]);
    nnb_worker *first = worker;
    CHECK_EQ(nnb_worker_create(&worker, group), 0);
    for (int i = 0; i < 4; i++) {
        last_for(2);
        send(1);
        CHECK_EQ(next_burst(), 1);
    }
    CHECK_EQ(nnb_group_answer(first), 0);
    send(1);
    CHECK_EQ(next_burst(), 1);
    nnb_worker_destroy(first);
    close_all();
}

static void ended_burst_leaves_the_others(void)
{
    open_group(127);
    open_burst(0, 1, 1);
    open_burst(1, 2, 1);
    send(0);
    send(1);
    nnb_server_hang_up(pairs[0].server);
    nnb_group_wake_all(group);
    int event = next_event();
    CHECK_EQ(event, NNB_BURST_ENDED + seats[0] * NNB_BURST_PLANS);
    CHECK_EQ(next_burst(), 1);
    is_open[0] = 0;
    end_pair(&pairs[0]);
    open_burst(2, 3, 1); /* takes the seat that is free again */
    CHECK_EQ(seats[2], seats[0]);
    send(2);
    CHECK_EQ(next_burst(), 2);
    close_all();
}

static void end_burst(int i)
{
    nnb_server_hang_up(pairs[i].server);
    nnb_group_wake_all(group);
    CHECK_EQ(next_event(), NNB_BURST_ENDED + seats[i] * NNB_BURST_PLANS);
    is_open[i] = 0;
    CHECK_EQ(nnb_group_answer(worker), 0);
    end_pair(&pairs[i]);
}

/* How many runs of a millisecond another client has before one that opens a burst for each of its runs has its next one. */
static int runs_before_it(void)
{
    open_burst(0, 1, 1);
    send(0);
    for (int n = 0;; n++) {
        send(1);
        if (next_burst() == 0)
            return n;
        last_for(1);
        answer();
    }
}

static void client_that_closes_its_bursts_has_had_their_runs(void)
{
    open_group(127);
    open_burst(0, 1, 1);
    open_burst(1, 2, 1);
    send(1);
    CHECK_EQ(next_burst(), 1);
    answer();
    send(0);
    CHECK_EQ(next_burst(), 0);
    for (int i = 0; i < 20; i++) {
        last_for(10);
        answer();
        end_burst(0);
        int n = runs_before_it();
        CHECK(n >= (i < 16 ? 2 : 9) && n <= (i < 16 ? 3 : 10)); /* its first bursts may load what all need */
    }
    answer();
    end_burst(0);
    nnb_group_leave(group, 1); /* another one has its number now */
    open_burst(0, 1, 1);
    send(0);
    while (next_burst() != 0)
        answer();
    last_for(10);
    answer();
    end_burst(0);
    CHECK(runs_before_it() <= 3);
    answer();
    nnb_group_leave(group, 2);
    nnb_group_leave(group, 3); /* never there */
    close_all();
}

/* Two runs of LOW have the processors. One worker each; the third one is `worker`. */
static nnb_worker *ran_low[2];

static void begin_low_beside_high(void)
{
    open_group(127);
    open_burst(0, 10, 0);
    send(0);
    CHECK_EQ(next_burst(), 0); /* known from now on, so that its runs are the leader's own */
    for (int i = 1; i <= 3; i++)
        open_burst(i, (uint64_t)i, 2);
    for (int i = 0; i < 2; i++) {
        send(i + 1);
        CHECK_EQ(next_burst(), i + 1);
        ran_low[i] = worker;
        CHECK_EQ(nnb_worker_create(&worker, group), 0);
    }
    send(3);
}

static void end_low_beside_high(void)
{
    for (int i = 0; i < 2; i++) {
        CHECK_EQ(nnb_group_answer(ran_low[i]), 0);
        nnb_worker_destroy(ran_low[i]);
    }
}

static void run_waits_for_none_of_lower_priority(void)
{
    begin_low_beside_high();
    for (int i = 0; i < 3; i++) {
        send(0);
        CHECK_EQ(next_burst(), 0);
    }
    answer();
    CHECK_EQ(nnb_group_try(worker, 64), -EAGAIN); /* the third one of LOW waits */
    end_low_beside_high();
    CHECK_EQ(next_burst(), 3);
    close_all();
}

/* The leader has none left that may run beside the two. */
static void worker_whose_run_ends_first_leads(void)
{
    begin_low_beside_high();
    send(0);
    CHECK_EQ(next_burst(), 0);
    answer();
    end_burst(0);
    CHECK_EQ(nnb_group_try(worker, 64), -EAGAIN);
    CHECK_EQ(nnb_group_answer(ran_low[0]), 0);
    CHECK_EQ(burst_of(nnb_group_try(ran_low[0], 64)), 3);
    end_low_beside_high();
    close_all();
}

/* struct sched_attr up to the slice of a thread that is scheduled as usual: 0 before Linux 6.12. */
static uint64_t slice_ns(void)
{
    struct {
        uint32_t size, policy;
        uint64_t flags;
        int32_t nice;
        uint32_t priority;
        uint64_t runtime, deadline, period;
    } a = {.size = sizeof(a)};
    return syscall(SYS_sched_getattr, 0, &a, sizeof(a), 0) == 0 && a.policy == SCHED_OTHER ? a.runtime : 0;
}

static void *has_slice(void *before)
{
    CHECK_EQ(slice_ns(), *(uint64_t *)before);
    return NULL;
}

static void workers_have_short_slices(void)
{
    uint64_t before = slice_ns();
    open_group(127);
    open_burst(0, 1, 1);
    send(0);
    CHECK_EQ(next_burst(), 0);
    CHECK(!before || (slice_ns() && slice_ns() <= 100000));
    pthread_t started;
    CHECK_EQ(pthread_create(&started, NULL, has_slice, &before), 0); /* which may compute: it has its slice */
    CHECK_EQ(pthread_join(started, NULL), 0);
    close_all();
}

int main(void)
{
    watchdog();
    workers_have_short_slices();
    highest_priority_first();
    run_waits_for_none_of_lower_priority();
    worker_whose_run_ends_first_leads();
    least_served_client_first();
    idle_client_saves_nothing_up();
    interrupted_run_counts_in_part();
    many_long_runs_count();
    first_run_counts_little();
    client_that_polls_has_a_turn();
    turns_wait_for_nobody_long();
    turn_gives_way_to_priority();
    client_that_thinks_costs_the_others_nothing();
    leader_polls_where_that_has_paid_lately();
    ended_burst_has_no_turn();
    ended_burst_leaves_the_others();
    client_that_closes_its_bursts_has_had_their_runs();
    return 0;
}
