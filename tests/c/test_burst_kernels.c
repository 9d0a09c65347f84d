/* A plan with a kernel is run without its server's caller, by a thread of its own and by a group's: until a run fails, or the
 * plan's slot is freed during a run. A kernel may end as soon as it is said so, and is not called after that. */
#include "burst_pair.h"
#include "nnb_server.h"

#define PLANS 8 /* of a pair's server */
#define SLOTS 12
#define BURSTS 3
#define OWN 3 /* the slot of plans that the caller runs */

typedef struct test_kernel {
    nnb_kernel is;
    int number, runs;
    uint64_t deadline_ns;
} test_kernel;

typedef struct burst {
    burst_pair p;
    pthread_mutex_t lock; /* the caller's table against free_slot */
    test_kernel *kernels[PLANS], *leaving;
    int attended; /* events but new plans */
} burst;

static burst bursts[BURSTS];
static nnb_group *group;

/* What the next run does: the test meets it there. */
static int status;
static const char *reason;
static int meets;
static pthread_barrier_t inside, onward;

static int run(nnb_kernel *k, uint64_t deadline_ns)
{
    test_kernel *t = (test_kernel *)k;
    t->runs++;
    t->deadline_ns = deadline_ns;
    if (__atomic_load_n(&meets, __ATOMIC_RELAXED)) {
        pthread_barrier_wait(&inside);
        pthread_barrier_wait(&onward);
    }
    return __atomic_load_n(&status, __ATOMIC_RELAXED);
}

static const char *sentence(nnb_kernel *k)
{
    CHECK(((test_kernel *)k)->runs > 0);
    return reason;
}

static void destroy(nnb_kernel *k)
{
    if (k)
        ((test_kernel *)k)->runs = -1; /* a race with a run, if there is one */
    free(k);
}

/* ---- what a caller does ------------------------------------------------------------------------------------------ */

static void add(burst *b, uint32_t id)
{
    test_kernel *k = calloc(1, sizeof(*k));
    CHECK(k != NULL);
    k->is = (nnb_kernel){.run = run, .sentence = sentence, .destroy = destroy};
    pthread_mutex_lock(&b->lock);
    destroy((nnb_kernel *)b->kernels[id]);
    b->kernels[id] = NULL;
    if (nnb_server_keep_plan(b->p.server, id) == 0) {
        if (nnb_server_request(b->p.server)->pools[0] != OWN)
            CHECK_EQ(nnb_server_set_kernel(b->p.server, id, &k->is), 0);
        b->kernels[id] = k;
        k = NULL;
    }
    pthread_mutex_unlock(&b->lock);
    free(k);
}

static void look(burst *b)
{
    int32_t got;
    const char *why;
    pthread_mutex_lock(&b->lock); /* as long as the reason is looked at, nobody ends the kernel */
    int is_dropped = nnb_server_outcome(b->p.server, &got, &why);
    CHECK(!got || (reason ? why != NULL && !strcmp(why, reason) : why == NULL));
    if (is_dropped) {
        CHECK(b->leaving != NULL);
        destroy((nnb_kernel *)b->leaving);
        b->leaving = NULL;
    }
    pthread_mutex_unlock(&b->lock);
    if (got) {
        CHECK(got >= 1 && got <= 8);
        nnb_result result = {got, 0, 0, NULL, NULL, NNB_NO_TIME, NNB_NO_TIME};
        CHECK_EQ(nnb_server_set_result(b->p.server, &result), 0);
    }
}

static void attend(burst *b, int id)
{
    if (id & NNB_PLAN_NEW) {
        add(b, (uint32_t)id % NNB_BURST_PLANS);
    } else {
        __atomic_fetch_add(&b->attended, 1, __ATOMIC_RELAXED);
        if (id & NNB_PLAN_KERNEL) /* else it was dropped between its look-up and its run, and would be bound anew */
            look(b);
    }
}

static int free_slot(burst *b, int32_t slot)
{
    uint32_t ids[NNB_MAX_PLANS];
    int running = 0;
    pthread_mutex_lock(&b->lock);
    for (int i = nnb_server_free_slot(b->p.server, slot, ids); i-- > 0;) {
        uint32_t id = ids[i] & ~(uint32_t)NNB_PLAN_KERNEL;
        test_kernel *k = b->kernels[id];
        CHECK(k != NULL);
        b->kernels[id] = NULL;
        if (ids[i] == id) {
            destroy(&k->is);
        } else {
            CHECK(b->leaving == NULL); /* one runs at a time */
            b->leaving = k;
            running++;
        }
    }
    pthread_mutex_unlock(&b->lock);
    return running;
}

static void *serve(void *unused)
{
    for (;;) {
        int id = nnb_server_next(bursts[0].p.server);
        if (id == -EPIPE)
            return unused;
        CHECK(id >= 0);
        attend(&bursts[0], id);
    }
}

static void *work(void *argument)
{
    nnb_worker *w = argument;
    for (;;) {
        int event = nnb_group_next(w);
        if (event == -EUSERS || event >= NNB_BURST_ENDED)
            continue;
        if (event < 0) {
            CHECK(event == -EPIPE || event == -ESHUTDOWN);
            nnb_worker_destroy(w);
            return NULL;
        }
        attend(&bursts[event % NNB_PLAN_NEW / NNB_BURST_PLANS], event);
    }
}

static pthread_t worker(void)
{
    nnb_worker *w;
    CHECK_EQ(nnb_worker_create(&w, group), 0);
    return start(work, w);
}

static nnb_execution *request_on(burst *b, int32_t slot)
{
    nnb_argument arguments[2] = {{0, 0, 0, 16, 0, 0}, {0, 0, 16, 16, 0, 0}};
    nnb_request r = {1, 1, 1, 0, arguments, NULL, &slot, 0};
    nnb_execution *e;
    CHECK_EQ(nnb_execution_create(&e, b->p.client, &r), 0);
    return e;
}

static void open_burst(burst *b, uint64_t window)
{
    memset(b, 0, sizeof(*b));
    b->p = new_pair_as(NNB_LAYOUT_STAMPED, 32, window, window);
    pthread_mutex_init(&b->lock, NULL);
}

static void close_burst(burst *b)
{
    CHECK(b->leaving == NULL);
    for (int i = 0; i < PLANS; i++)
        destroy((nnb_kernel *)b->kernels[i]);
    end_pair(&b->p);
}

/* ---- the time slices of a wait ------------------------------------------------------------------------------------ */

static int slices; /* that end before the next packet is waited for */
int __real_nnb_channel_wait(nnb_channel *ch, uint8_t *packet, uint64_t deadline_ns);
int __wrap_nnb_channel_wait(nnb_channel *ch, uint8_t *packet, uint64_t deadline_ns)
{
    if (ch == nnb_server_inbox(bursts[0].p.server) && __atomic_load_n(&slices, __ATOMIC_RELAXED) > 0) {
        __atomic_fetch_sub(&slices, 1, __ATOMIC_RELAXED);
        return -ERESTART;
    }
    return __real_nnb_channel_wait(ch, packet, deadline_ns);
}

/* ---- one at a time ------------------------------------------------------------------------------------------------- */

static void *run_in_thread(void *e) { return (void *)(intptr_t)run_to_end(e); }

/* Starts a run and returns while it is under way. */
static pthread_t begin(nnb_execution *e)
{
    __atomic_store_n(&meets, 1, __ATOMIC_RELAXED);
    pthread_t client = start(run_in_thread, e);
    pthread_barrier_wait(&inside);
    __atomic_store_n(&meets, 0, __ATOMIC_RELAXED);
    return client;
}

static int finish_run(pthread_t client)
{
    void *rc;
    pthread_barrier_wait(&onward);
    CHECK_EQ(pthread_join(client, &rc), 0);
    return (int)(intptr_t)rc;
}

static void every_way_to_end(int in_group)
{
    burst *b = &bursts[0];
    open_burst(b, 0);
    pthread_t thread;
    if (in_group) {
        CHECK_EQ(nnb_group_create(&group, 1, 127), 0);
        CHECK_EQ(nnb_group_add(group, b->p.server, 0, 1, NULL, 0), 0);
        thread = worker();
    } else {
        thread = start(serve, NULL);
    }
    nnb_execution *e = request_on(b, 1), *other = request_on(b, 2);

    CHECK_EQ(run_to_end(e), 0);                                    /* new: the caller has run it */
    __atomic_store_n(&slices, in_group ? 0 : 5, __ATOMIC_RELAXED); /* from the second wait on: the first has begun */
    for (int i = 0; i < 100; i++)
        CHECK_EQ(run_to_end(e), 0);
    CHECK_EQ(__atomic_load_n(&slices, __ATOMIC_RELAXED), 0);
    CHECK_EQ(b->attended, 0);
    CHECK_EQ(b->kernels[0]->runs, 100);
    CHECK_EQ(b->kernels[0]->deadline_ns, 0);

    /* a failure, with the sentence of the run, and one without */
    status = 4, reason = "a cat sat on it";
    CHECK_EQ(run_to_end(e), 4);
    CHECK_EQ(b->attended, 1);
    status = 1000, reason = NULL; /* no status */
    CHECK_EQ(run_to_end(e), 2);
    status = 0;
    CHECK_EQ(run_to_end(e), 0);
    CHECK_EQ(b->attended, 2);

    /* its slot is freed in a run: it goes on, and ends when the listener says so */
    CHECK_EQ(run_to_end(other), 0);
    CHECK_EQ(run_to_end(other), 0);
    test_kernel *k = b->kernels[1];
    pthread_t client = begin(other);
    CHECK_EQ(free_slot(b, 2), 1);
    CHECK_EQ(free_slot(b, 2), 0); /* it is dropped already */
    CHECK(b->leaving == k && k->runs == 2);
    CHECK_EQ(finish_run(client), 0);
    CHECK(b->leaving == NULL);
    CHECK_EQ(b->attended, 3);
    CHECK_EQ(run_to_end(other), 0); /* bound anew */
    CHECK_EQ(b->attended, 3);
    CHECK_EQ(b->kernels[1]->runs, 0);

    /* likewise, in a run that fails */
    CHECK_EQ(run_to_end(other), 0);
    status = 2, reason = "gone";
    client = begin(other);
    CHECK_EQ(free_slot(b, NNB_ANY_SLOT), 1); /* the other plan has ended at once */
    CHECK_EQ(finish_run(client), 2);
    CHECK(b->leaving == NULL && b->kernels[0] == NULL);
    status = 0, reason = NULL;
    CHECK_EQ(b->attended, 4);

    /* a deadline is the kernel's; a request that comes too late is not run */
    CHECK_EQ(run_to_end(e), 0);
    nnb_execution_set_timeout(e, 60ull * 1000000000);
    uint64_t before = nnb_now_ns();
    CHECK_EQ(run_to_end(e), 0);
    CHECK(b->kernels[0]->deadline_ns > before && b->kernels[0]->runs == 1);
    nnb_execution_set_timeout(e, 0);
    CHECK_EQ(run_to_end(e), 0);
    CHECK_EQ(b->kernels[0]->deadline_ns, 0);
    nnb_server_limit_runs(b->p.server, 1000000000);
    CHECK_EQ(run_to_end(e), 0);
    CHECK(b->kernels[0]->deadline_ns > before);
    CHECK_EQ(b->attended, 4);
    status = 5; /* it has ended itself */
    CHECK_EQ(run_to_end(e), 5);
    CHECK_EQ(b->attended, 5);
    status = 0;

    /* a plan of the caller's takes the place of one with a kernel */
    nnb_execution *own = request_on(b, OWN);
    CHECK_EQ(free_slot(b, 1), 0);
    for (int i = 0; i < 3; i++)
        CHECK_EQ(run_to_end(own), 0);
    CHECK_EQ(b->attended, 7);
    CHECK_EQ(b->kernels[0]->runs, 0);
    CHECK_EQ(run_to_end(e), 0);

    /* the burst is over in a run: the run goes on, and its listener ends after it */
    client = begin(e);
    nnb_server_hang_up(b->p.server);
    if (in_group)
        nnb_group_wake_all(group);
    CHECK_EQ(finish_run(client), 0);
    if (in_group)
        nnb_group_close(group);
    finish(thread);
    CHECK_EQ(b->attended, 7);
    nnb_execution_destroy(own);
    nnb_execution_destroy(e);
    nnb_execution_destroy(other);
    if (in_group)
        nnb_group_destroy(group);
    close_burst(b);
}

/* ---- all at once --------------------------------------------------------------------------------------------------- */

static int over;

static void *run_all(void *argument)
{
    burst *b = argument;
    nnb_execution *e[SLOTS];
    for (int i = 0; i < SLOTS; i++)
        e[i] = request_on(b, i);
    for (int i = 0; i < (UNDER_SANITIZER ? 2000 : 20000); i++)
        CHECK_EQ(run_to_end(e[i % 7 ? i % 3 : i % SLOTS]), 0);
    for (int i = 0; i < SLOTS; i++)
        nnb_execution_destroy(e[i]);
    __atomic_fetch_add(&over, 1, __ATOMIC_RELAXED);
    return NULL;
}

static void *free_all(void *argument)
{
    int n = (int)(intptr_t)argument;
    for (int i = 0; __atomic_load_n(&over, __ATOMIC_RELAXED) < n; i++)
        free_slot(&bursts[i % n], i % 31 ? i / n % SLOTS : NNB_ANY_SLOT);
    return NULL;
}

static void slots_are_freed_all_the_time(int n, uint64_t window)
{
    pthread_t clients[BURSTS], listeners[2];
    over = 0;
    if (n > 1)
        CHECK_EQ(nnb_group_create(&group, 2, 127), 0);
    for (int i = 0; i < n; i++) {
        open_burst(&bursts[i], window);
        if (n > 1)
            CHECK_EQ(nnb_group_add(group, bursts[i].p.server, (uint64_t)i, 1, NULL, 0), i);
    }
    listeners[0] = n > 1 ? worker() : start(serve, NULL);
    if (n > 1)
        listeners[1] = worker();
    for (int i = 0; i < n; i++)
        clients[i] = start(run_all, &bursts[i]);
    pthread_t freeing = start(free_all, (void *)(intptr_t)n);
    for (int i = 0; i < n; i++)
        finish(clients[i]);
    finish(freeing);
    for (int i = 0; i < n; i++)
        nnb_server_hang_up(bursts[i].p.server);
    if (n > 1)
        nnb_group_close(group);
    for (int i = 0; i < 1 + (n > 1); i++)
        finish(listeners[i]);
    if (n > 1)
        nnb_group_destroy(group);
    for (int i = 0; i < n; i++)
        close_burst(&bursts[i]);
}

int main(void)
{
    watchdog();
    pthread_barrier_init(&inside, NULL, 2);
    pthread_barrier_init(&onward, NULL, 2);
    every_way_to_end(0);
    every_way_to_end(1);
    slots_are_freed_all_the_time(1, 0);
    slots_are_freed_all_the_time(1, 50000);
    slots_are_freed_all_the_time(BURSTS, 0);
    slots_are_freed_all_the_time(BURSTS, 50000);
    CHECK_EQ(nnb_kernel_run(nnb_kernel_noop(), 1), 0);
    return 0;
}
