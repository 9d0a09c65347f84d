/* The schedule (schedule.c) on a machine that is simulated: clients that compute, sleep or wait for a timer between two
 * requests, with priorities, long runs and interruptions, on processors that a modelled kernel divides. Nothing is random
 * but what a seed says. Each constant of schedule.c has a scenario here that fails with a tenth and with ten times its value
 * (`make constants` tries it).
 *
 * Invariants, of thousands of random scenarios:
 *   fair      while a request waits, no other client of its priority or a lower one gets more than the lag bound for each
 *             slot and one, a run of each and a wait
 *   working   the leader waits only for a client in service that thinks for a short time, and not for longer than a wake
 *             may take
 *   prompt    a request of the highest priority waits for at most one run and a wake
 *   awake     clients that always have a next request are woken twice in a lag bound at most
 */
#include "check.h"
#include "schedule.h"

#define US 1000ull
#define MS 1000000ull
#define LAG (1 * MS)
#define NEVER UINT64_MAX
#define MOST 64
#define MOST_CPUS 8
#define MOST_WAIT (450 * US) /* of the leader for one client */
#define LONG (100 * US)      /* a run that is expected to last longer is detached */
#define TURNAROUND 400ull    /* of a request, beside its run */
#define WAKE_COST (3 * US)   /* of the leader */
#define WINDOW (50 * US)     /* a client polls for so long, then sleeps */
#define SLICE (100 * US)

static uint64_t seed;

static uint64_t random_below(uint64_t n)
{
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return (seed >> 33) % n;
}

enum state { PAUSES, QUEUES, RUNS }; /* of a client's thread: sleeps or waits for a timer; for a processor; has one */

typedef struct client {
    /* what it does */
    uint64_t run_ns, think_ns, pause_ns; /* a request takes; the client computes before the next one; and sleeps, too */
    uint32_t pause_every;                /* ... before each n-th, 0: never */
    uint64_t odd_ns;                     /* each `odd_every`th run takes so much longer; `is_stolen`: interrupted */
    uint32_t odd_every;
    uint64_t window_ns, ends_ns;
    /* how it is */
    nnb_flow flow;
    nnb_queue queue;
    enum state state;
    uint64_t computes_ns;                                    /* still */
    int has_sent, has_answer, is_asleep, is_served;          /* a request is in its queue; ... */
    uint64_t sent_ns, poll_until, wake_ns, due_ns, since_ns; /* since_ns: on its processor */
    uint64_t n, served_ns, got_ns; /* runs; their time and that of waiting; what it had when another request came */
    uint64_t wakes, longest_ns, charged_at;
    uint64_t ends_detached; /* 0: no run of it is detached */
    uint64_t got_at[MOST];  /* what the others had got when its request came */
    nnb_usage usage;
} client;

static client clients[MOST];
static int n_clients;
static nnb_schedule schedule;
static nnb_load load;
static uint64_t now, waited_ns, waits_since, wake_latency, total_wakes, longest_run, total_n;
static int cpus[MOST_CPUS], n_cpus; /* the clients': who has one, -1: none */
static int line[MOST + 1], n_line;
static int checks;

/* ---- the kernel ------------------------------------------------------------------------------------------------- */

static void give_processor(int i)
{
    for (int c = 0; c < n_cpus; c++)
        if (cpus[c] < 0) {
            cpus[c] = i;
            clients[i].state = RUNS;
            clients[i].since_ns = now;
            return;
        }
    clients[i].state = QUEUES;
    line[n_line++] = i;
}

static void take_processor(int i)
{
    for (int c = 0; c < n_cpus; c++)
        if (cpus[c] == i) {
            cpus[c] = -1;
            if (n_line) {
                int next = line[0];
                memmove(line, line + 1, (size_t)--n_line * sizeof(*line));
                give_processor(next);
            }
            return;
        }
}

static void send(client *c)
{
    c->has_sent = 1;
    c->sent_ns = now;
    c->poll_until = now + (c->queue.polls ? c->window_ns : 0);
    for (int k = 0; k < n_clients; k++)
        c->got_at[k] = clients[k].served_ns;
}

static void think(client *c)
{
    c->has_answer = 0;
    c->computes_ns = c->think_ns;
    if (c->pause_every && c->n % c->pause_every == 0) {
        c->state = PAUSES;
        c->due_ns = now + c->pause_ns;
        take_processor((int)(c - clients));
    }
}

/* The clients' threads go on until `now`, which is one step of at most some hundred nanoseconds after the last time. */
static void run_clients(uint64_t step)
{
    for (int i = 0; i < n_clients; i++) {
        client *c = &clients[i];
        if (c->state == PAUSES && ((c->due_ns && now >= c->due_ns) || (c->wake_ns && now >= c->wake_ns))) {
            c->due_ns = c->wake_ns = 0;
            c->is_asleep = 0;
            if (now < c->ends_ns)
                give_processor(i);
        }
    }
    for (int k = 0; k < n_cpus; k++) {
        if (cpus[k] < 0)
            continue;
        int i = cpus[k];
        client *c = &clients[i];
        if (c->has_answer) {
            think(c);
        } else if (!c->has_sent && !c->is_served) {
            c->computes_ns -= c->computes_ns < step ? c->computes_ns : step;
            if (!c->computes_ns)
                send(c);
        } else if (now >= c->poll_until) {
            c->is_asleep = 1;
            c->state = PAUSES;
            take_processor(i);
        }
        if (cpus[k] == i && n_line && now - c->since_ns >= SLICE) { /* the next one has a slice */
            take_processor(i);
            c->state = QUEUES;
            line[n_line++] = i;
        }
    }
}

static void pass(uint64_t ns)
{
    while (ns) {
        uint64_t step = ns < 500 ? ns : 500;
        now += step;
        ns -= step;
        run_clients(step);
    }
}

/* ---- the leader and its workers ----------------------------------------------------------------------------------- */

static uint64_t run_time(client *c)
{
    c->n++;
    return c->run_ns + (c->odd_every && c->n % c->odd_every == 0 ? c->odd_ns : 0);
}

static void answer(client *c, int by_leader)
{
    int was_asleep = c->is_asleep;
    c->is_served = 0;
    c->has_answer = 1;
    if (was_asleep) {
        c->wakes++;
        total_wakes++;
        c->wake_ns = now + wake_latency;
        if (by_leader)
            pass(WAKE_COST);
    }
    if (by_leader)
        nnb_schedule_answered(&schedule, &c->queue, now, was_asleep);
}

static void end_detached(void)
{
    for (int i = 0; i < n_clients; i++) {
        client *c = &clients[i];
        if (!c->ends_detached || now < c->ends_detached)
            continue;
        c->ends_detached = 0;
        load.n_detached--;
        load.n_runs[c->queue.priority]--;
        nnb_schedule_charge(&schedule, &c->flow, &c->usage, 1);
        answer(c, 0);
    }
}

static void check_service(const client *c)
{
    int i = (int)(c - clients);
    uint64_t bound = LAG * (schedule.most_slots + 1) + c->run_ns + longest_run + MOST_WAIT;
    if (!checks)
        return;
    for (int k = 0; k < n_clients; k++)
        if (k != i && clients[k].queue.priority >= c->queue.priority && !clients[k].odd_every)
            CHECK(clients[k].served_ns - c->got_at[k] <= bound);
    if (c->queue.priority == 0)
        CHECK(now - c->sent_ns <= longest_run + 2 * WAKE_COST + 2 * US);
}

static void serve(client *c)
{
    check_service(c);
    uint64_t waited = now - c->sent_ns, lasts = run_time(c);
    c->longest_ns = waited > c->longest_ns ? waited : c->longest_ns;
    c->has_sent = 0;
    c->is_served = 1;
    total_n++;
    int is_first = nnb_queue_begin(&c->queue), is_long = c->queue.average_ns > LONG;
    nnb_queue_measure(&c->queue, lasts, 0, is_first, &c->usage);
    c->served_ns += lasts;
    if (is_long) {
        nnb_schedule_leave(&schedule, &c->queue);
        c->flow.n_busy++;
        c->ends_detached = now + lasts;
        load.n_detached++;
        load.n_runs[c->queue.priority]++;
        return;
    }
    pass(TURNAROUND + lasts);
    nnb_schedule_charge(&schedule, &c->flow, &c->usage, 0);
    answer(c, 1);
}

static client *client_of(nnb_queue *q)
{
    for (int i = 0; i < n_clients; i++)
        if (q == &clients[i].queue)
            return &clients[i];
    CHECK(!"a queue of nobody");
    return NULL;
}

static void look(void)
{
    end_detached();
    for (int i = 0; i < n_clients; i++) {
        client *c = &clients[i];
        if (c->has_sent && !c->queue.is_ready)
            nnb_schedule_enqueue(&schedule, &c->queue, now);
    }
}

static void simulate(uint64_t until)
{
    until += now;
    while (now < until) {
        look();
        nnb_queue *q = nnb_schedule_next(&schedule, &load, now);
        if (q) {
            waits_since = 0;
            serve(client_of(q));
            continue;
        }
        nnb_queue *awaited = schedule.awaited;
        if (awaited) {
            client *c = client_of(awaited);
            CHECK(awaited->in_service && schedule.n_slots == schedule.most_slots);
            if (!waits_since)
                waits_since = now;
            CHECK(!checks || now - waits_since <= MOST_WAIT * schedule.n_slots);
            waited_ns += 500;
            c->served_ns += 500;
        } else {
            CHECK(!nnb_schedule_may_pick(&schedule, &load, now));
        }
        pass(500);
    }
}

static void begin(int processors)
{
    nnb_schedule_fini(&schedule);
    memset(&schedule, 0, sizeof(schedule));
    memset(clients, 0, sizeof(clients));
    memset(&load, 0, sizeof(load));
    n_clients = n_line = checks = 0;
    now = 1000 * MS;
    waited_ns = waits_since = total_wakes = longest_run = total_n = 0;
    wake_latency = 20 * US;
    load.cpus = (uint32_t)processors;
    n_cpus = processors - 1;
    for (int c = 0; c < n_cpus; c++)
        cpus[c] = -1;
    nnb_schedule_init(&schedule, load.cpus);
    CHECK_EQ(nnb_schedule_reserve(&schedule, MOST), 0);
}

static client *add(uint64_t run_ns, uint64_t think_ns, uint32_t priority)
{
    client *c = &clients[n_clients++];
    c->run_ns = run_ns;
    c->think_ns = think_ns;
    c->queue.flow = &c->flow;
    c->queue.priority = priority;
    c->queue.polls = 1;
    c->state = PAUSES;
    c->due_ns = now + 1 + random_below(100 * US);
    c->ends_ns = NEVER;
    c->window_ns = WINDOW;
    longest_run = run_ns > longest_run ? run_ns : longest_run;
    return c;
}

static void add_many(int n, uint64_t run_ns, uint64_t think_ns)
{
    while (n--)
        add(run_ns, think_ns, 1);
}

static client *pausing(client *c, uint64_t pause_ns, uint32_t every)
{
    c->pause_ns = pause_ns;
    c->pause_every = every;
    return c;
}

/* ---- random scenarios --------------------------------------------------------------------------------------------- */

static uint64_t some_ns(void)
{
    static const uint64_t choices[] = {0, 300, 2 * US, 8 * US, 15 * US, 40 * US, 70 * US};
    return choices[random_below(sizeof(choices) / sizeof(*choices))];
}

static void add_random(uint32_t priority)
{
    uint64_t lasts = random_below(12) ? some_ns() : random_below(2 * MS);
    client *c = add(lasts, random_below(5) ? some_ns() : random_below(MS), priority);
    c->queue.polls = random_below(6) != 0;
    if (random_below(4) == 0)
        pausing(c, random_below(3 * MS), 1 + (uint32_t)random_below(50));
    if (random_below(6) == 0)
        c->due_ns += random_below(10 * MS);
    if (random_below(8) == 0)
        c->ends_ns = now + random_below(20 * MS);
}

static void any_scenario_is_fair_working_and_prompt(uint64_t number)
{
    seed = number;
    begin(2 + (int)random_below(4));
    wake_latency = 1 * US + random_below(100 * US);
    checks = 1;
    int n = 1 + (int)random_below(12), has_priorities = random_below(3) == 0;
    for (int i = 0; i < n; i++)
        add_random(has_priorities ? 1 + (uint32_t)random_below(2) : 1);
    if (has_priorities)
        add_random(0);
    simulate(20 * MS);
}

/* ---- named scenarios ---------------------------------------------------------------------------------------------- */

static uint64_t least(int from, int to)
{
    uint64_t n = NEVER;
    for (int i = from; i < to; i++)
        n = clients[i].served_ns < n ? clients[i].served_ns : n;
    return n;
}

static uint64_t most(int from, int to)
{
    uint64_t n = 0;
    for (int i = from; i < to; i++)
        n = clients[i].served_ns > n ? clients[i].served_ns : n;
    return n;
}

#define REPORT(...) (getenv("NNBURST_SIM_VERBOSE") ? (void)fprintf(stderr, __VA_ARGS__) : (void)0)

static void report(const char *name)
{
    REPORT("%-46s %7.1f k/s, waited %4.1f %%, wakes/ms %5.2f, most/least %.2f, last waits %.0f us\n", name,
           (double)total_n * 1e6 / (double)(now - 1000 * MS), (double)waited_ns * 100 / (double)(now - 1000 * MS),
           (double)total_wakes * 1e6 / (double)(now - 1000 * MS),
           (double)most(0, n_clients) / (double)(least(0, n_clients) + 1),
           (double)clients[n_clients - 1].longest_ns / 1000);
}

/* LAG_NS: as many wakes as the bound allows, and no more; and equal time. */
static void quick_clients_take_turns(int n)
{
    begin(2);
    checks = 1;
    add_many(n, 1 * US, 300);
    simulate(200 * MS);
    report("quick clients");
    CHECK(total_wakes <= 2 * 200 + (uint64_t)n);
    CHECK(most(0, n) - least(0, n) <= 2 * LAG + 2 * US);
}

/* SHORT_THINK_NS: one that sleeps between its requests costs the others nothing, and is answered soon. */
static uint64_t rate_beside(uint64_t pause_ns)
{
    begin(2);
    add_many(4, 1 * US, 300);
    if (pause_ns != NEVER)
        pausing(add(1 * US, 300, 1), pause_ns, 1);
    simulate(100 * MS);
    report("beside one that sleeps");
    uint64_t n = 0;
    for (int i = 0; i < 4; i++)
        n += clients[i].n;
    return n;
}

static void client_that_thinks_costs_the_others_nothing(void)
{
    uint64_t alone = rate_beside(NEVER);
    static const uint64_t pauses[] = {15 * US, 30 * US, 60 * US, 300 * US, 1000 * US};
    for (size_t i = 0; i < sizeof(pauses) / sizeof(*pauses); i++) {
        uint64_t beside = rate_beside(pauses[i]);
        CHECK(beside > alone * 85 / 100);
        CHECK(clients[4].n > 100 * MS / (pauses[i] + 300 * US));
    }
}

/* SHORT_THINK_NS: clients that compute for some microseconds keep their slots. */
static void short_thinkers_are_waited_for(void)
{
    begin(2);
    add_many(4, 1 * US, 6 * US);
    simulate(100 * MS);
    report("compute for 6 us");
    CHECK(total_wakes <= 2 * 100 + 4);
}

/* IDLE_NS: a client in service that is interrupted for a short time keeps its slot; */
static void short_pauses_keep_the_slot(void)
{
    begin(2);
    for (int i = 0; i < 4; i++)
        pausing(add(1 * US, 300, 1), 20 * US, 20);
    simulate(100 * MS);
    report("sleep for 20 us at times");
    CHECK(total_wakes <= 3 * 100);
}

/* ... for a long time does not. */
static void long_pauses_lose_the_slot(void)
{
    begin(2);
    for (int i = 0; i < 8; i++)
        pausing(add(1 * US, 300, 1), 2 * MS, 100);
    simulate(100 * MS);
    report("sleep for 2 ms at times");
    CHECK(total_n > 100 * MS / (5 * US));
}

/* Clients that never poll are not waited for, and those that do, do not suffer. */
static void clients_that_do_not_poll_have_no_slot(void)
{
    begin(2);
    add_many(8, 1 * US, 300);
    for (int i = 0; i < 4; i++)
        clients[i].window_ns = 0;
    simulate(100 * MS);
    report("half of them never poll");
    CHECK(total_n > 100 * MS / (4 * US));
}

/* WAKE_NS: one that was woken late is waited for; one that then has nothing to send is not waited for long. */
static void woken_clients_are_waited_for(void)
{
    begin(2);
    wake_latency = 150 * US;
    add_many(4, 1 * US, 300);
    simulate(100 * MS);
    report("woken late");
    CHECK(total_wakes <= 2 * 100 + 4);
}

static void clients_that_stop_hold_up_nobody(void)
{
    begin(2);
    add_many(2, 1 * US, 300);
    for (int i = 0; i < 16; i++)
        pausing(add(1 * US, 300, 1), 2 * MS, 1);
    simulate(100 * MS);
    report("sixteen that sleep after each run");
    CHECK(clients[0].n + clients[1].n > 100 * MS / (5 * US));
}

/* What a client gets beside an equal one, of which each `every`th run takes so much longer, in thousandths of the runs. */
static uint64_t share_of_odd(uint64_t run_ns, uint64_t odd_ns, uint32_t every)
{
    begin(2);
    client *c = add(run_ns, 300, 1);
    c->odd_ns = odd_ns;
    c->odd_every = every;
    add(run_ns, 300, 1);
    simulate(400 * MS);
    report("odd runs");
    return clients[0].n * 1000 / (clients[0].n + clients[1].n);
}

/* EXCESS_NS, CREDIT_PART, MOST_CREDIT_NS: what interruptions take does not count against a client, */
static void interruptions_do_not_count(void) { CHECK(share_of_odd(5 * US, 300 * US, 1200) > 494); }

/* ... but what it takes itself does, */
static void runs_that_differ_count(void)
{
    begin(2);
    client *c = add(1 * US, 300, 1);
    c->odd_ns = 40 * US;
    c->odd_every = 10;
    add(5 * US, 300, 1);
    simulate(400 * MS);
    report("runs that differ");
    CHECK(c->served_ns < clients[1].served_ns * 103 / 100);
}

/* ... and is not saved up. */
static void many_long_runs_count(void)
{
    begin(2);
    client *c = add(1 * US, 300, 1);
    c->odd_ns = 500 * US;
    c->odd_every = 20;
    add(5 * US, 300, 1);
    simulate(400 * MS);
    report("many long runs");
    CHECK(c->served_ns < clients[1].served_ns * 115 / 100);
}

/* How much less than the other one a client gets in 100 ms after one run that took so much longer than ever. */
static int64_t costs_after(uint64_t ms, uint64_t odd_ns)
{
    begin(2);
    client *c = add(20 * US, 300, 1);
    add(20 * US, 300, 1);
    simulate(ms * MS);
    c->odd_ns = odd_ns;
    c->odd_every = (uint32_t)c->n + 1;
    uint64_t n = c->n, others = clients[1].n;
    simulate(100 * MS + odd_ns);
    report("one run that was interrupted");
    return (int64_t)(clients[1].n - others - (c->n - n)) * 20 * (int64_t)US;
}

static void credit_is_limited(void)
{
    CHECK(costs_after(1000, 15 * MS) < 4 * (int64_t)MS);
    CHECK(costs_after(3000, 70 * MS) > 30 * (int64_t)MS);
}

/* MOST_FIRST_NS, MOST_FIRST: what the first run of a burst counts, for a client's first bursts. */
static uint64_t counts_first(uint64_t lasts, int bursts)
{
    begin(2);
    nnb_flow *f = &clients[0].flow;
    for (int i = 0; i < bursts; i++) {
        nnb_queue q = {.flow = f};
        nnb_usage usage = {0, 0, 0};
        nnb_queue_measure(&q, lasts, 1, nnb_queue_begin(&q), &usage);
        nnb_schedule_charge(&schedule, f, &usage, 0);
    }
    return f->spent;
}

static void first_runs_count_little_at_first(void)
{
    CHECK(counts_first(1500 * US, 1) >= 1500 * US); /* one that is not long counts in full */
    CHECK(counts_first(500 * MS, 1) <= 5 * MS);
    CHECK(counts_first(10 * MS, 10) <= 50 * MS);  /* a program may open some */
    CHECK(counts_first(10 * MS, 50) >= 250 * MS); /* not one for each run */
}

/* NNB_REQUEST_NS: a request costs what it takes beside its run, and no more. */
static void requests_cost_something(void)
{
    begin(2);
    client *c = add(0, 300, 1);
    add(30 * US, 300, 1);
    simulate(200 * MS);
    report("runs of nothing");
    uint64_t all = c->served_ns + c->n * TURNAROUND, others = clients[1].served_ns + clients[1].n * TURNAROUND;
    CHECK(all < others * 13 / 10 && others < all * 13 / 10);
}

int main(void)
{
    watchdog();
    quick_clients_take_turns(2);
    quick_clients_take_turns(8);
    quick_clients_take_turns(64);
    client_that_thinks_costs_the_others_nothing();
    short_thinkers_are_waited_for();
    short_pauses_keep_the_slot();
    long_pauses_lose_the_slot();
    clients_that_do_not_poll_have_no_slot();
    woken_clients_are_waited_for();
    clients_that_stop_hold_up_nobody();
    interruptions_do_not_count();
    runs_that_differ_count();
    many_long_runs_count();
    credit_is_limited();
    first_runs_count_little_at_first();
    requests_cost_something();
    for (uint64_t i = 0; i < (UNDER_SANITIZER ? 100 : 4000); i++)
        any_scenario_is_fair_working_and_prompt(i);
    return 0;
}
