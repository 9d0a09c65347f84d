/* A group under everything at once: clients come and go, with bursts of all priorities whose runs are short, long or stuck,
 * on processors that change. Every run is answered, every burst ends, and no more workers are made than runs were under
 * way: those that were needed once are there when they are needed again. */
#define _GNU_SOURCE
#include <sched.h>

#include "burst_pair.h"

#define CLIENTS 6
#define BURSTS 2 /* of each at a time */
#define ROUNDS (UNDER_SANITIZER ? 12 : 40)
#define RUNS 24
#define MOST_WORKERS 1024
#define MOST_SEATS 64

static nnb_group *group;
static pthread_t threads[MOST_WORKERS];
static int n_workers;
static struct {
    nnb_server *server;
    int has_ended;
} seats[MOST_SEATS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static cpu_set_t allowed;

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

static void last_for(uint64_t ns)
{
    struct timespec t = {.tv_nsec = (long)ns};
    nanosleep(&t, NULL);
}

/* The tag says how long: mostly not at all, often too long for the leader, at times so long that others run beside it. */
static void run(int number, int is_new, uint32_t plan)
{
    pthread_mutex_lock(&lock);
    nnb_server *s = seats[number].server;
    pthread_mutex_unlock(&lock);
    uint32_t tag = nnb_server_request(s)->arguments[0].offset;
    if (is_new)
        nnb_server_keep_plan(s, plan);
    if (tag)
        last_for(tag * 1000);
}

static void *work(void *argument)
{
    nnb_worker *w = argument;
    for (;;) {
        int event = nnb_group_next(w);
        if (event == -EUSERS) {
            add_worker();
        } else if (event == -ERESTART) {
            continue;
        } else if (event < 0) {
            CHECK(event == -EPIPE || event == -ESHUTDOWN);
            nnb_worker_destroy(w);
            return NULL;
        } else if (event < NNB_BURST_ENDED) {
            run(event % NNB_PLAN_NEW / NNB_BURST_PLANS, event >= NNB_PLAN_NEW, (uint32_t)event % NNB_BURST_PLANS);
        } else {
            CHECK_EQ(nnb_worker_ending(w), -EPIPE);
            pthread_mutex_lock(&lock);
            seats[(event - NNB_BURST_ENDED) / NNB_BURST_PLANS].has_ended = 1;
            pthread_cond_broadcast(&changed);
            pthread_mutex_unlock(&lock);
        }
    }
}

static int join(burst_pair *p, uint64_t client, uint32_t priority, uint64_t window)
{
    *p = new_pair_as(NNB_LAYOUT_STAMPED, 32, window, window);
    pthread_mutex_lock(&lock); /* until it is in the table no worker looks there */
    int number = nnb_group_add(group, p->server, client, priority, NULL, 0);
    CHECK(number >= 0 && number < MOST_SEATS);
    seats[number].server = p->server;
    seats[number].has_ended = 0;
    pthread_mutex_unlock(&lock);
    return number;
}

static void leave(burst_pair *p, int number)
{
    nnb_server_hang_up(p->server);
    nnb_group_wake_all(group);
    pthread_mutex_lock(&lock);
    while (!seats[number].has_ended)
        pthread_cond_wait(&changed, &lock);
    pthread_mutex_unlock(&lock);
    end_pair(p);
}

static void move(uint32_t random)
{
    cpu_set_t one;
    int cpu = (int)(random % CPU_SETSIZE);
    CPU_ZERO(&one);
    while (!CPU_ISSET(cpu, &allowed))
        cpu = (cpu + 1) % CPU_SETSIZE;
    CPU_SET(cpu, &one);
    sched_setaffinity(0, sizeof one, random & 1 ? &one : &allowed);
}

static void *client(void *argument)
{
    static const uint32_t lasts_us[][8] = {{0, 0, 0, 150, 0, 0, 4000, 300}, {4000, 200, 200, 3000, 200, 4000, 200, 0}};
    uint32_t random = (uint32_t)(intptr_t)argument * 2654435761u + 1;
    for (int round = 0; round < ROUNDS; round++) {
        burst_pair pairs[BURSTS];
        nnb_execution *e[BURSTS];
        int numbers[BURSTS];
        uint64_t number = (uint64_t)(intptr_t)argument * ROUNDS + (uint64_t)round;
        for (int i = 0; i < BURSTS; i++) {
            random = random * 1664525u + 1013904223u;
            numbers[i] = join(&pairs[i], number, random >> 16 & 3, random >> 20 & 3 ? 50000 : 0);
        }
        for (int k = 0; k < RUNS; k++) {
            random = random * 1664525u + 1013904223u;
            if (k % 8 == 0)
                move(random >> 8);
            for (int i = 0; i < BURSTS; i++) {
                e[i] = new_execution(pairs[i].client, lasts_us[argument == NULL][(random >> (16 + 3 * i)) % 8]);
                CHECK_EQ(nnb_execution_start(e[i]), 0);
            }
            for (int i = 0; i < BURSTS; i++) {
                int rc;
                while ((rc = nnb_execution_resume(e[i])) == -ERESTART)
                    ;
                CHECK_EQ(rc, 0);
                nnb_execution_destroy(e[i]);
            }
        }
        for (int i = 0; i < BURSTS; i++)
            leave(&pairs[i], numbers[i]);
        nnb_group_leave(group, number);
    }
    return NULL;
}

int main(void)
{
    watchdog();
    CHECK_EQ(sched_getaffinity(0, sizeof allowed, &allowed), 0);
    CHECK_EQ(nnb_group_create(&group, 2, 127), 0);
    add_worker();
    add_worker();
    pthread_t clients[CLIENTS];
    for (int i = 0; i < CLIENTS; i++)
        clients[i] = start(client, (void *)(intptr_t)i);
    for (int i = 0; i < CLIENTS; i++)
        finish(clients[i]);
    nnb_group_close(group);
    for (int i = 0; i < n_workers; i++) /* none is made any more: no run is under way */
        finish(threads[i]);
    nnb_group_destroy(group);
    CHECK(n_workers <= CLIENTS * BURSTS + 4);
    return 0;
}
