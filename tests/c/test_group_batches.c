/* Beside requests that run together, in a group of threads: one that wants a fast answer and one of a higher priority run
 * before these are over, though they have the same batcher; one that waits for others does not. It does once they turn out
 * to run one by one. What always fails together is tried ever less often. */
#include "burst_pair.h"

#define SECOND 1000000000ull
#define WORKERS 4

enum { FIRST, SECOND_OF_TWO, HASTY, HIGH, LATER, BURSTS };

typedef struct test_kernel {
    nnb_kernel is;
    void *argument;
    int number;
} test_kernel;

static nnb_group *group;
static burst_pair pairs[BURSTS];
static test_kernel kernels[BURSTS];
static nnb_batcher batcher = {.most = 2, .wait_ns = 1000 * SECOND};
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static int runs[BURSTS], n_together, fails, is_blocked, may_end, places[BURSTS];

/* Until it is let go. */
static void block(void)
{
    pthread_mutex_lock(&lock);
    is_blocked = 1;
    pthread_cond_broadcast(&changed);
    while (!may_end)
        pthread_cond_wait(&changed, &lock);
    pthread_mutex_unlock(&lock);
}

static void let_go(void)
{
    pthread_mutex_lock(&lock);
    may_end = 1;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}

static void await_block(void)
{
    pthread_mutex_lock(&lock);
    while (!is_blocked)
        pthread_cond_wait(&changed, &lock);
    pthread_mutex_unlock(&lock);
}

static int runs_of(int i) { return __atomic_load_n(&runs[i], __ATOMIC_ACQUIRE); }

static int run(nnb_kernel *kernel, uint64_t deadline_ns)
{
    const test_kernel *k = (const test_kernel *)kernel;
    CHECK(deadline_ns == 0);
    __atomic_add_fetch(&runs[k->number], 1, __ATOMIC_RELEASE);
    if (k->number <= SECOND_OF_TWO && fails)
        block();
    return 0;
}

static int run_stack(nnb_kernel *kernel, uint64_t deadline_ns)
{
    CHECK(kernel && deadline_ns == 0);
    __atomic_add_fetch(&n_together, 1, __ATOMIC_RELEASE);
    if (fails)
        return 2;
    block();
    return 0;
}

static const char *sentence(nnb_kernel *kernel) { return kernel ? NULL : "no kernel"; }
static void destroy(nnb_kernel *kernel) { CHECK(kernel == NULL); }

static int stack[2];
static const uint64_t nbytes[] = {sizeof(*stack)};
static uint8_t *const stacks[] = {(uint8_t *)stack};
static nnb_kernel whole = {.run = run_stack};
static nnb_kernel *const whole_runs[] = {NULL, NULL, &whole};
static nnb_batch batch = {
    .most = 2, .n_inputs = 1, .n_arguments = 1, .nbytes = nbytes, .stacks = stacks, .runs = whole_runs};

static void *work(void *argument)
{
    nnb_worker *w = argument;
    for (int event; (event = nnb_group_next(w)) != -EPIPE;) {
        if (event == -EUSERS || event >= NNB_BURST_ENDED)
            continue;
        int i = event % NNB_PLAN_NEW / NNB_BURST_PLANS;
        uint32_t id = (uint32_t)event % NNB_BURST_PLANS;
        CHECK(event & NNB_PLAN_NEW);
        nnb_server_request(pairs[i].server);
        kernels[i] = (test_kernel){{run, sentence, destroy, &batch, &kernels[i].argument}, &places[i], i};
        CHECK_EQ(nnb_server_keep_plan(pairs[i].server, id), 0);
        CHECK_EQ(nnb_server_set_kernel(pairs[i].server, id, &kernels[i].is), 0);
    }
    nnb_worker_destroy(w);
    return NULL;
}

static void end(nnb_execution *e)
{
    int rc;
    while ((rc = nnb_execution_resume(e)) == -ERESTART)
        ;
    CHECK_EQ(rc, 0);
}

/* The first two run together, which fails or not; meanwhile the others come. */
static void run_two(nnb_execution *const *e, int *with)
{
    is_blocked = may_end = 0;
    CHECK_EQ(nnb_execution_start(e[FIRST]), 0);
    CHECK_EQ(nnb_execution_start(e[SECOND_OF_TWO]), 0);
    await_block();
    for (; *with < BURSTS; with++)
        CHECK_EQ(run_to_end(e[*with]), 0);
}

static void end_two(nnb_execution *const *e)
{
    let_go();
    end(e[FIRST]);
    end(e[SECOND_OF_TWO]);
}

int main(void)
{
    nnb_execution *e[BURSTS];
    pthread_t threads[WORKERS];
    watchdog();
    CHECK_EQ(nnb_group_create(&group, 2, 127), 0);
    for (int i = 0; i < BURSTS; i++) {
        pairs[i] = new_pair(32, 0, 0);
        e[i] = new_execution(pairs[i].client, 0);
        uint64_t wait = i <= SECOND_OF_TWO ? 1000 * SECOND : i == HASTY ? 0 : 1000000;
        CHECK_EQ(nnb_group_add(group, pairs[i].server, (uint64_t)i, i == HIGH ? 0 : 2, &batcher, wait), i);
    }
    for (int i = 0; i < WORKERS; i++) {
        nnb_worker *w;
        CHECK_EQ(nnb_worker_create(&w, group), 0);
        threads[i] = start(work, w);
    }
    for (int i = 0; i < BURSTS; i++)
        CHECK_EQ(run_to_end(e[i]), 0); /* is bound */

    run_two(e, (int[]){HASTY, HIGH, BURSTS});
    CHECK_EQ(nnb_execution_start(e[LATER]), 0);
    CHECK_EQ(run_to_end(e[HASTY]) | run_to_end(e[HIGH]), 0); /* once it may have been seen, too */
    CHECK(runs_of(HASTY) == 2 && runs_of(HIGH) == 2 && runs_of(LATER) == 0 && n_together == 1);
    end_two(e);
    end(e[LATER]);
    CHECK(runs_of(FIRST) == 0 && runs_of(SECOND_OF_TWO) == 0 && runs_of(LATER) == 1);

    fails = 1;
    run_two(e, (int[]){LATER, BURSTS});
    end_two(e);
    CHECK_EQ(n_together, 2);
    for (int i = 0; i < 64; i++) {
        run_two(e, (int[]){BURSTS});
        end_two(e);
    }
    CHECK(runs_of(FIRST) == 65 && runs_of(SECOND_OF_TWO) == 65);
    CHECK_EQ(n_together, 1 + 7); /* of 65: between them none, 1, 3, 7, 15 and 31 that were not tried */
    fails = 0;

    for (int i = 0; i < BURSTS; i++)
        nnb_server_hang_up(pairs[i].server);
    nnb_group_close(group);
    for (int i = 0; i < WORKERS; i++)
        finish(threads[i]);
    nnb_group_destroy(group);
    for (int i = 0; i < BURSTS; i++) {
        nnb_execution_destroy(e[i]);
        end_pair(&pairs[i]);
    }
    return 0;
}
