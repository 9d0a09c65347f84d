/* A group of bursts between threads: every request is answered once, whatever sleeps, polls or hangs; a run that hangs
 * holds up its own burst only; queues beyond what the kernel waits for at a time, or all if it cannot, are watched too. */
#include "burst_pair.h"

#define MOST_WORKERS (UNDER_SANITIZER ? 8192 : 256) /* in all: on a slow machine some come and go */

static nnb_group *group;
static burst_pair *pairs;
static int n_pairs, n_workers;
static pthread_t threads[MOST_WORKERS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static int hanging, released;

static void *work(void *argument);

static void add_worker(void)
{
    nnb_worker *w;
    pthread_mutex_lock(&lock);
    CHECK(n_workers < MOST_WORKERS);
    CHECK_EQ(nnb_worker_create(&w, group), 0);
    threads[n_workers++] = start(work, w);
    pthread_mutex_unlock(&lock);
}

/* A request with tag 1 hangs until it is released. */
static void run(int number, int is_new, uint32_t plan)
{
    nnb_server *s = pairs[number].server;
    uint32_t tag = nnb_server_request(s)->arguments[0].offset;
    if (is_new)
        CHECK_EQ(nnb_server_keep_plan(s, plan), 0);
    if (tag != 1)
        return;
    pthread_mutex_lock(&lock);
    hanging++;
    pthread_cond_broadcast(&changed);
    while (!released)
        pthread_cond_wait(&changed, &lock);
    pthread_mutex_unlock(&lock);
}

static void *work(void *argument)
{
    nnb_worker *w = argument;
    for (;;) {
        int event = nnb_group_next(w);
        if (event == -EUSERS) {
            add_worker();
        } else if (event < 0) {
            CHECK(event == -EPIPE || event == -ESHUTDOWN);
            nnb_worker_destroy(w);
            return NULL;
        } else if (event < NNB_BURST_ENDED) {
            run(event % NNB_PLAN_NEW / NNB_BURST_PLANS, event >= NNB_PLAN_NEW, (uint32_t)event % NNB_BURST_PLANS);
        }
    }
}

static void open_all(int n, uint32_t words, uint64_t window, int bursts_of_one)
{
    CHECK_EQ(nnb_group_create(&group, 2, words), 0);
    n_pairs = n;
    n_workers = hanging = released = 0;
    pairs = calloc((size_t)n, sizeof(*pairs));
    for (int i = 0; i < n; i++) {
        pairs[i] = new_pair(16, window, window);
        CHECK_EQ(nnb_group_add(group, pairs[i].server, (uint64_t)(i / bursts_of_one), 1, NULL, 0), i);
    }
    add_worker();
    add_worker();
}

static void close_all(void)
{
    for (int i = 0; i < n_pairs; i++)
        nnb_server_hang_up(pairs[i].server);
    nnb_group_close(group);
    for (int i = 0;; i++) {
        pthread_mutex_lock(&lock);
        int n = n_workers;
        pthread_t thread = i < n ? threads[i] : 0;
        pthread_mutex_unlock(&lock);
        if (i >= n)
            break;
        finish(thread);
    }
    nnb_group_destroy(group);
    for (int i = 0; i < n_pairs; i++) {
        const uint64_t *n = nnb_server_inbox(pairs[i].server)->counters;
        CHECK_EQ(n[NNB_REQUESTS], n[NNB_RESULTS]);
        CHECK_EQ(n[NNB_MALFORMED], 0);
        end_pair(&pairs[i]);
    }
    free(pairs);
}

static void *client(void *argument)
{
    int first = (int)(intptr_t)argument, rounds = UNDER_SANITIZER ? 40 : 400;
    for (int i = 0; i < rounds; i++)
        for (int k = first; k < n_pairs; k += 4) {
            nnb_execution *e = new_execution(pairs[k].client, (uint32_t)(2 + i % 3));
            CHECK_EQ(run_to_end(e), 0);
            nnb_execution_destroy(e);
        }
    return NULL;
}

static void every_request_is_answered(int n, uint32_t words, uint64_t window)
{
    open_all(n, words, window, 2);
    pthread_t clients[4];
    for (int i = 0; i < 4; i++)
        clients[i] = start(client, (void *)(intptr_t)i);
    for (int i = 0; i < 4; i++)
        finish(clients[i]);
    close_all();
}

static void *run_hanging(void *argument)
{
    nnb_execution *e = new_execution(pairs[(intptr_t)argument].client, 1);
    CHECK_EQ(run_to_end(e), 0);
    nnb_execution_destroy(e);
    return NULL;
}

/* Client 0 has three bursts whose runs hang, as many as it may have and one more; client 1 is served all the same. */
static void hanging_runs_hold_up_nobody(uint64_t window)
{
    open_all(6, 127, window, 3);
    pthread_t hung[3];
    for (int i = 0; i < 3; i++)
        hung[i] = start(run_hanging, (void *)(intptr_t)i);
    pthread_mutex_lock(&lock);
    while (hanging < 2)
        pthread_cond_wait(&changed, &lock);
    pthread_mutex_unlock(&lock);
    for (int i = 0; i < 200; i++) {
        nnb_execution *e = new_execution(pairs[3 + i % 3].client, 2);
        CHECK_EQ(run_to_end(e), 0);
        nnb_execution_destroy(e);
    }
    CHECK_EQ(hanging, 2); /* the third waits: two are what a client may have under way on two processors */
    pthread_mutex_lock(&lock);
    released = 1;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
    for (int i = 0; i < 3; i++)
        finish(hung[i]);
    CHECK_EQ(hanging, 3);
    close_all();
}

/* The burst was alone when its run began, so nothing watched over it. */
static void newcomer_is_served_beside_a_hanging_run(void)
{
    CHECK_EQ(nnb_group_create(&group, 2, 127), 0);
    n_pairs = 2;
    n_workers = hanging = released = 0;
    pairs = calloc(2, sizeof(*pairs));
    for (int i = 0; i < 2; i++)
        pairs[i] = new_pair(16, 0, 0);
    CHECK_EQ(nnb_group_add(group, pairs[0].server, 0, 1, NULL, 0), 0);
    add_worker();
    pthread_t hung = start(run_hanging, (void *)0);
    pthread_mutex_lock(&lock);
    while (!hanging)
        pthread_cond_wait(&changed, &lock);
    pthread_mutex_unlock(&lock);
    CHECK_EQ(nnb_group_workers(group), 1);
    add_worker();
    CHECK_EQ(nnb_group_add(group, pairs[1].server, 1, 1, NULL, 0), 1);
    nnb_execution *e = new_execution(pairs[1].client, 2);
    CHECK_EQ(run_to_end(e), 0);
    nnb_execution_destroy(e);
    pthread_mutex_lock(&lock);
    released = 1;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
    finish(hung);
    close_all();
}

int main(void)
{
    watchdog();
    every_request_is_answered(8, 127, 0);
    every_request_is_answered(8, 127, 50000);
    every_request_is_answered(9, 2, 0); /* most are left to watchers */
    every_request_is_answered(9, 2, 20000);
    every_request_is_answered(6, 0, 0); /* as on a kernel without futex_waitv */
    hanging_runs_hold_up_nobody(0);
    hanging_runs_hold_up_nobody(50000);
    newcomer_is_served_beside_a_hanging_run();
    return 0;
}
