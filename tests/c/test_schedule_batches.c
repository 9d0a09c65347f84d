/* The schedule (schedule.c) with requests that wait for others, to run together: clients with several bursts, priorities,
 * models that have a batcher and models that have none, runs of any length, on processors that do nothing else. Nothing is
 * random but what a seed says. What may run is said here once more, one request at a time; whatever the seed,
 *
 *   none waits     for others that wants a fast answer, goes before those that run together, is to end, or could not join
 *                  anyway, nor for those that had no answer lately: if it has a processor it is served at once, and what
 *                  waits, when its time has come
 *   order          the next one is of the highest priority among those that may run, and of its client's the first
 *   none is lost   each request is served once, and the leader sleeps no longer than until one may run
 *   batches        have one batcher, `most` requests at most, and run one at a time
 */
#include "check.h"
#include "schedule.h"

#define US 1000ull
#define FLOWS 8
#define QUEUES 24
#define BATCHERS 2
#define SHORT (20 * US)
#define NEVER UINT64_MAX

typedef struct source {
    nnb_queue queue;
    uint64_t next_ns, ends_ns, first_ns; /* its next request comes; its run ends, 0: none; when its request came */
    uint64_t run_ns, pause_ns, left_ns;  /* ... its last request was taken, or had its answer */
    uint32_t sent, served, leads; /* ... requests that run together with it are counted by the one that was picked */
} source;

static nnb_schedule schedule;
static nnb_load load;
static nnb_flow flows[FLOWS];
static source sources[QUEUES];
static nnb_batcher batchers[BATCHERS];
static uint64_t seed, now, since[BATCHERS]; /* the first request has waited there, or the batch before it has ended */
static int n_sources, n_together, n_beside, n_waited;

static uint64_t random_below(uint64_t n)
{
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return (seed >> 33) % n;
}

static uint64_t sooner(uint64_t a, uint64_t b) { return a < b ? a : b; }

static int n_ready(const nnb_batcher *b)
{
    int n = 0;
    for (int i = 0; i < n_sources; i++)
        n += sources[i].queue.is_ready && sources[i].queue.batcher == b;
    return n;
}

/* When it may run as far as others of its kind go. */
static uint64_t due(const nnb_queue *q)
{
    const nnb_batcher *b = q->batcher;
    uint32_t together = 0, priority = 0, expected = 0;
    if (!b || !q->batch_wait_ns || !q->joins || q->is_over)
        return 0;
    for (int i = 0; i < n_sources; i++) {
        const source *s = &sources[i];
        if (s->queue.batcher == b)
            expected += s->queue.is_ready || s->left_ns + b->wait_ns >= since[b - batchers];
        if (s->leads && s->ends_ns && s->queue.batcher == b) {
            together = 1;
            priority = s->queue.priority;
        }
    }
    if (together)
        return q->priority < priority ? 0 : NEVER;
    uint32_t ready = (uint32_t)n_ready(b);
    int is_enough = ready >= b->most || (3 * ready > expected && (ready > 1 || expected == 1));
    return is_enough ? 0 : since[b - batchers] + q->batch_wait_ns;
}

static int may_run(const nnb_queue *q)
{
    uint32_t most = load.cpus > 2 ? load.cpus : 2, priority = q->is_over ? 0 : q->priority;
    return q->is_ready && due(q) <= now &&
           (!load.n_detached ||
            (nnb_load_has_processor(&load, (int)priority) && (q->flow->n_busy < most || q->is_over)));
}

static int goes_before(const source *s, const source *t)
{
    int is_after = s->queue.flow != t->queue.flow || t->queue.polls || s->first_ns >= t->first_ns;
    if (s->queue.is_over || t->queue.is_over)
        return 0;
    return s->queue.priority < t->queue.priority || (s->queue.priority == t->queue.priority && !is_after);
}

static source *source_of(nnb_queue *q) { return (source *)q; }

/* A request is there, or its burst is over: then with its last one, if it has not been served. */
static void arrive(source *s)
{
    const nnb_batcher *b = s->queue.batcher;
    if (b && !n_ready(b))
        since[b - batchers] = now;
    s->queue.is_over = random_below(40) == 0;
    s->first_ns = now;
    s->sent++;
    s->next_ns = NEVER;
    nnb_schedule_enqueue(&schedule, &s->queue, now);
}

static void begin(nnb_queue *q, uint64_t ends_ns)
{
    source *s = source_of(q);
    CHECK(!q->is_ready && s->sent == s->served + 1 && !s->ends_ns);
    s->ends_ns = ends_ns;
    s->left_ns = now;
    s->leads = 0;
    n_waited += s->first_ns < now;
}

/* A short run is the leader's, which then does nothing else. */
static void run(nnb_queue *q)
{
    source *s = source_of(q);
    nnb_batcher *b = q->batcher;
    begin(q, now + 1 + random_below(s->run_ns));
    if (s->run_ns > SHORT) {
        nnb_schedule_leave(&schedule, q);
        q->flow->n_busy++;
        load.n_detached++;
        load.n_runs[q->priority]++;
    }
    if (!b || q->is_over || !q->joins)
        return;
    if (b->held) {
        n_beside++;
        return;
    }
    uint32_t n = 1;
    for (nnb_queue *rider; n < b->most && (rider = nnb_schedule_rider(&schedule, b)); n++) {
        CHECK(rider->batcher == b && rider->joins && !rider->is_over);
        begin(rider, s->ends_ns);
    }
    for (int i = 0; i < n_sources && n < b->most; i++) /* all that there were came along */
        CHECK(!sources[i].queue.is_ready || sources[i].queue.batcher != b || !sources[i].queue.joins ||
              sources[i].queue.is_over);
    s->leads = n;
    if (n > 1)
        nnb_batcher_hold(b, q->priority, now);
    else
        s->leads = 0;
    n_together += n > 1;
    CHECK(n <= b->most);
}

static void end_runs(void)
{
    for (int i = 0; i < n_sources; i++) {
        source *s = &sources[i];
        nnb_usage usage = {0, 0, 0};
        if (!s->ends_ns || s->ends_ns > now)
            continue;
        if (s->leads) {
            uint64_t began = s->left_ns, wait = s->queue.batcher->wait_ns;
            nnb_batcher_free(s->queue.batcher, now);
            since[s->queue.batcher - batchers] = now - wait + sooner(wait, now - began);
            for (int k = 0; k < n_sources; k++)
                if (sources[k].queue.batcher == s->queue.batcher && sources[k].left_ns >= began)
                    sources[k].left_ns = now;
        }
        s->served++;
        nnb_queue_measure(&s->queue, 1 + random_below(s->run_ns), 0, nnb_queue_begin(&s->queue), &usage);
        nnb_schedule_charge(&schedule, s->queue.flow, &usage, 0);
        s->leads = 0;
        s->ends_ns = 0;
        if (s->run_ns <= SHORT)
            nnb_schedule_answered(&schedule, &s->queue, now, 0);
        s->next_ns = now + random_below(s->pause_ns);
        s->queue.joins = random_below(10) != 0;
        s->queue.is_over = 0;
    }
    uint32_t n = 0;
    for (int i = 0; i < n_sources; i++)
        n += sources[i].ends_ns != 0;
    if (!n)
        CHECK_EQ(batchers[0].held + batchers[1].held, 0);
}

/* Runs that were picked occupy a processor each, with all that runs together with it. */
static void count_runs(const source *picked[], int *n)
{
    for (int k = 0; k < *n;) {
        const source *s = picked[k];
        if (s->ends_ns > now) {
            k++;
            continue;
        }
        nnb_schedule_charge(&schedule, s->queue.flow, &(nnb_usage){0, 0, 0}, 1);
        load.n_detached--;
        load.n_runs[s->queue.priority]--;
        picked[k] = picked[--*n];
    }
}

static void any_scenario_keeps_what_it_promises(uint64_t number)
{
    const source *picked[QUEUES];
    int n_picked = 0;
    seed = number;
    now = 1000 * US;
    nnb_schedule_fini(&schedule);
    memset(&schedule, 0, sizeof(schedule));
    memset(flows, 0, sizeof(flows));
    memset(sources, 0, sizeof(sources));
    memset(batchers, 0, sizeof(batchers));
    load = (nnb_load){.cpus = 1 + (uint32_t)random_below(4)};
    nnb_schedule_init(&schedule, load.cpus);
    CHECK_EQ(nnb_schedule_reserve(&schedule, FLOWS), 0);
    n_sources = 1 + (int)random_below(QUEUES);
    for (int k = 0; k < BATCHERS; k++) {
        batchers[k].most = 2 + (uint32_t)random_below(6);
        batchers[k].wait_ns = 1 + random_below(200 * US);
    }
    for (int i = 0; i < n_sources; i++) {
        source *s = &sources[i];
        uint64_t which = random_below(BATCHERS + 1);
        s->queue.flow = &flows[random_below(FLOWS)];
        s->queue.priority = (uint32_t)random_below(NNB_PRIORITIES);
        s->queue.batcher = which < BATCHERS ? &batchers[which] : NULL;
        s->queue.batch_wait_ns = s->queue.batcher && random_below(3) ? s->queue.batcher->wait_ns : 0;
        s->queue.joins = 1;
        s->queue.polls = random_below(2) == 0;
        s->run_ns = 1 + random_below(random_below(3) ? SHORT : 2000 * US);
        s->pause_ns = 1 + random_below(random_below(2) ? 5 * US : 300 * US);
        s->next_ns = now + random_below(100 * US);
        if (s->queue.batcher)
            nnb_batcher_add(s->queue.batcher, &s->queue);
    }
    for (uint64_t until = now + 20000 * US; now < until;) {
        end_runs();
        count_runs(picked, &n_picked);
        for (int i = 0; i < n_sources; i++)
            if (sources[i].next_ns <= now)
                arrive(&sources[i]);
        nnb_queue *q = nnb_schedule_next(&schedule, &load, now);
        if (q) {
            q->is_ready = 1; /* as it was */
            CHECK(may_run(q));
            q->is_ready = 0;
            for (int i = 0; i < n_sources; i++)
                CHECK(!may_run(&sources[i].queue) || !goes_before(&sources[i], source_of(q)));
            run(q);
            if (source_of(q)->run_ns > SHORT)
                picked[n_picked++] = source_of(q);
            else
                now = source_of(q)->ends_ns;
            continue;
        }
        uint64_t next = until;
        if (schedule.awaited) {
            next = now + 500;
        } else {
            for (int i = 0; i < n_sources; i++)
                CHECK(!may_run(&sources[i].queue));
            CHECK(!nnb_schedule_may_pick(&schedule, &load, now));
            uint64_t wait = nnb_schedule_wait_ns(&schedule, now);
            next = sooner(next, wait ? now + wait : NEVER);
            for (int i = 0; i < n_sources; i++) {
                uint64_t at = due(&sources[i].queue);
                CHECK(!sources[i].queue.is_ready || at <= now || at >= next); /* it does not oversleep */
            }
        }
        for (int i = 0; i < n_sources; i++)
            next = sooner(next, sooner(sources[i].next_ns, sources[i].ends_ns ? sources[i].ends_ns : NEVER));
        CHECK(next > now);
        now = next;
    }
    for (int i = 0; i < n_sources; i++)
        CHECK_EQ(sources[i].sent - sources[i].served, sources[i].queue.is_ready || sources[i].ends_ns != 0);
}

int main(void)
{
    watchdog();
    for (uint64_t i = 0; i < (UNDER_SANITIZER ? 100 : 2000); i++)
        any_scenario_keeps_what_it_promises(i);
    CHECK(n_together > 1000 && n_beside > 1000 && n_waited > 1000);
    nnb_schedule_fini(&schedule);
    return 0;
}
