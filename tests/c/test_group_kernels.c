/* The kernels of a group's bursts under everything at once: clients come and hang up in a run, slots are freed all the
 * time, and workers leave with a request at hand. A kernel is not called after its caller was told that it may end, each
 * request is run and answered once, and kernels that last until others have run do not hold these up. The clients without
 * such kernels have a batcher: what waits there runs as one, or one by one if one of them fails. */
#include <sched.h>

#include "burst_pair.h"

#define CLIENTS 4
#define BURSTS 2 /* of each at a time */
#define ROUNDS (UNDER_SANITIZER ? 12 : 60)
#define REQUESTS (UNDER_SANITIZER ? 100 : 200) /* of a burst */
#define MEANWHILE 30                           /* runs of the others that a long run waits for */
#define PLANS 8                                /* of a pair's server */
#define SLOTS 12
#define LEAVERS 100 /* workers that leave, at most */
#define MOST_WORKERS 1024
#define MOST_NUMBERS 64

enum { SHORT, FAILS, LONG };
enum { DEFECT = 4, FAILURE = 2 }; /* what a kernel returns, and what a request gets whose worker leaves */

typedef struct test_kernel {
    nnb_kernel is;
    struct seat *seat;
    void *argument; /* where that is named */
    int32_t slot;
    int has_ended; /* plain: ThreadSanitizer sees whether the core orders it after each run */
    int runs;      /* that have begun, */
    int last_run;  /* and which of them may be the last */
    struct test_kernel *next;
} test_kernel;

typedef struct seat {
    pthread_mutex_t lock; /* the caller's tables, against those that free slots */
    burst_pair pair;
    int is_open, has_ended;
    test_kernel *kernels[PLANS], *leaving;
    test_kernel *all; /* of this burst */
    /* the request at hand: the client's until it is sent, and once it is answered */
    int asked, kind;
    int32_t slot;
    int served, outcome;
} seat;

static nnb_group *group;
static seat seats[CLIENTS][BURSTS];
static seat *table[MOST_NUMBERS]; /* a number is free again before its client knows */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static pthread_t threads[MOST_WORKERS];
static int n_workers, n_left;
static int quick_runs, others = CLIENTS - 1; /* clients without long runs */
static int n_leaving, n_long;                /* what has happened: kernels dropped in a run, long runs of kernels, */
static int n_together, n_split;              /* requests that ran as one, and runs of several that failed */
static nnb_batcher batcher = {.most = 4};
static seat *stack[4]; /* whose requests run as one */
static int n_stacked;

static int load(int *n) { return __atomic_load_n(n, __ATOMIC_RELAXED); }
static int add(int *n, int more) { return __atomic_add_fetch(n, more, __ATOMIC_RELAXED); }

/* ---- the kernels ------------------------------------------------------------------------------------------------- */

static int serve(seat *s)
{
    CHECK_EQ(s->served, s->asked - 1); /* not run before */
    s->served = s->asked;
    if (s->kind == LONG)
        for (int until = load(&quick_runs) + MEANWHILE; load(&others) && load(&quick_runs) - until < 0;)
            sched_yield();
    else
        add(&quick_runs, 1);
    return s->outcome = s->kind == FAILS ? DEFECT : 0;
}

static int run(nnb_kernel *kernel, uint64_t deadline_ns)
{
    test_kernel *k = (test_kernel *)kernel;
    CHECK(!k->has_ended && deadline_ns == 0);
    CHECK_EQ(k->slot, k->seat->slot);
    add(&k->runs, 1);
    if (k->seat->kind == LONG)
        add(&n_long, 1);
    int status = serve(k->seat);
    CHECK(!k->has_ended);
    return status;
}

static int run_stack(nnb_kernel *kernel, uint64_t deadline_ns)
{
    (void)kernel;
    CHECK(deadline_ns == 0);
    CHECK_EQ(add(&n_stacked, 1), 1); /* one at a time */
    int n = 0, fails = 0;
    while (n < 4 && stack[n])
        fails |= stack[n++]->kind == FAILS;
    CHECK(n >= 2);
    for (int i = 0; i < n && !fails; i++)
        CHECK_EQ(serve(stack[i]), 0);
    memset(stack, 0, sizeof(stack));
    add(fails ? &n_split : &n_together, fails ? 1 : n);
    add(&n_stacked, -1);
    return fails ? DEFECT : 0;
}

static const char *sentence(nnb_kernel *kernel)
{
    CHECK(!((test_kernel *)kernel)->has_ended);
    return "a cat sat on it";
}

static void destroy(nnb_kernel *kernel) { CHECK(kernel == NULL); } /* the core leaves that to its caller */

static const uint64_t nbytes[] = {sizeof(seat *)};
static uint8_t *const stacks[] = {(uint8_t *)stack};
static nnb_kernel whole = {.run = run_stack};
static nnb_kernel *const runs[] = {NULL, NULL, &whole, &whole, &whole};
static nnb_batch batch = {4, 1, 1, nbytes, stacks, runs, 0, 0};

/* ---- what the caller does, under the seat's lock ------------------------------------------------------------------- */

/* From now on it is not called. Its memory stays for the test's sake, to see a call. */
static void end(test_kernel **k)
{
    if (*k)
        (*k)->has_ended = 1;
    *k = NULL;
}

static void bind(seat *s, uint32_t id)
{
    end(&s->kernels[id]);
    test_kernel *k = calloc(1, sizeof(*k));
    CHECK(k != NULL);
    k->argument = &k->seat;
    k->is = (nnb_kernel){run, sentence, destroy, s >= seats[1] ? &batch : NULL, &k->argument};
    k->seat = s;
    k->slot = nnb_server_request(s->pair.server)->pools[0];
    k->next = s->all;
    s->all = k;
    if (nnb_server_keep_plan(s->pair.server, id) == 0) {
        CHECK_EQ(nnb_server_set_kernel(s->pair.server, id, &k->is), 0);
        s->kernels[id] = k;
    }
}

static int look(seat *s)
{
    int32_t status;
    const char *why;
    int was_dropped = nnb_server_outcome(s->pair.server, &status, &why);
    CHECK_EQ(status, s->outcome);
    CHECK(!status == !why);
    CHECK(status || was_dropped); /* else it goes on without the caller */
    CHECK_EQ(was_dropped, s->leaving != NULL);
    if (was_dropped)
        CHECK(s->leaving->runs <= s->leaving->last_run);
    end(&s->leaving);
    return status;
}

static void free_slot(seat *s, int32_t slot)
{
    uint32_t ids[NNB_MAX_PLANS];
    for (int i = nnb_server_free_slot(s->pair.server, slot, ids); i-- > 0;) {
        uint32_t id = ids[i] & ~(uint32_t)NNB_PLAN_KERNEL;
        CHECK(s->kernels[id] != NULL);
        if (ids[i] != id) {
            CHECK(s->leaving == NULL); /* one runs at a time */
            s->leaving = s->kernels[id];
            s->leaving->last_run = load(&s->leaving->runs) + 1; /* it may not have begun */
            s->kernels[id] = NULL;
            add(&n_leaving, 1);
        }
        end(&s->kernels[id]);
    }
}

/* ---- workers ----------------------------------------------------------------------------------------------------- */

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

static seat *seat_of(int number)
{
    pthread_mutex_lock(&lock);
    seat *s = table[number];
    pthread_mutex_unlock(&lock);
    return s;
}

static void attend(seat *s, int event, int leaves)
{
    int status;
    pthread_mutex_lock(&s->lock);
    if (event & NNB_PLAN_NEW)
        bind(s, (uint32_t)event % NNB_BURST_PLANS);
    if (event & NNB_PLAN_KERNEL)
        status = look(s);
    pthread_mutex_unlock(&s->lock);
    if (!(event & NNB_PLAN_KERNEL)) /* new, or dropped between its look-up and its run */
        status = serve(s);
    if (leaves) {
        s->outcome = FAILURE;
    } else if (status) {
        nnb_result result = {status, 0, 0, NULL, NULL, NNB_NO_TIME, NNB_NO_TIME};
        CHECK_EQ(nnb_server_set_result(s->pair.server, &result), 0);
    }
}

static void *work(void *argument)
{
    nnb_worker *w = argument;
    for (int events = 1, leaves = 0;; events++) {
        int event = nnb_group_next(w);
        if (event == -EUSERS) {
            add_worker();
        } else if (event < 0) {
            CHECK(event == -EPIPE || event == -ESHUTDOWN);
            leaves = 1;
        } else if (event < NNB_BURST_ENDED) {
            int may_leave =
                event & NNB_PLAN_NEW || seat_of(event % NNB_PLAN_NEW / NNB_BURST_PLANS) < seats[1]; /* alone */
            if (events % 10 == 0 && may_leave && add(&n_left, 1) <= LEAVERS) {
                leaves = 1;
                add_worker();
            }
            attend(seat_of(event % NNB_PLAN_NEW / NNB_BURST_PLANS), event, leaves);
        } else {
            CHECK_EQ(nnb_worker_ending(w), -EPIPE);
            seat *s = seat_of((event - NNB_BURST_ENDED) / NNB_BURST_PLANS);
            pthread_mutex_lock(&lock);
            s->has_ended = 1;
            pthread_cond_broadcast(&changed);
            pthread_mutex_unlock(&lock);
        }
        if (leaves) {
            nnb_worker_destroy(w);
            return NULL;
        }
    }
}

/* ---- clients ----------------------------------------------------------------------------------------------------- */

static nnb_execution *request_on(nnb_client *c, int32_t slot)
{
    nnb_argument arguments[2] = {{0, 0, 0, 16, 0, 0}, {0, 0, 16, 16, 0, 0}};
    nnb_request r = {1, 1, 1, 0, arguments, NULL, &slot, 0};
    nnb_execution *e;
    CHECK_EQ(nnb_execution_create(&e, c, &r), 0);
    return e;
}

static void join(seat *s, uint64_t client, uint32_t priority, uint64_t window)
{
    pthread_mutex_lock(&s->lock);
    s->pair = new_pair_as(NNB_LAYOUT_STAMPED, 32, window, window);
    s->asked = s->served = s->has_ended = 0;
    s->is_open = 1;
    pthread_mutex_unlock(&s->lock);
    pthread_mutex_lock(&lock); /* until it is in the table no worker looks there */
    int number =
        nnb_group_add(group, s->pair.server, client, priority, s >= seats[1] ? &batcher : NULL, client % 2 ? 50000 : 0);
    CHECK(number >= 0 && number < MOST_NUMBERS);
    table[number] = s;
    pthread_mutex_unlock(&lock);
}

static void ask(seat *s, nnb_execution *e, int kind, int32_t slot)
{
    s->asked++;
    s->kind = kind;
    s->slot = slot;
    CHECK_EQ(nnb_execution_start(e), 0);
}

static int resume(nnb_execution *e)
{
    int rc;
    while ((rc = nnb_execution_resume(e)) == -ERESTART)
        ;
    return rc;
}

static void leave(seat *s, nnb_execution *last)
{
    nnb_server_hang_up(s->pair.server);
    nnb_group_wake_all(group);
    pthread_mutex_lock(&lock);
    while (!s->has_ended)
        pthread_cond_wait(&changed, &lock);
    pthread_mutex_unlock(&lock);
    const uint64_t *n = nnb_server_inbox(s->pair.server)->counters;
    CHECK_EQ(n[NNB_RESULTS], n[NNB_REQUESTS]);
    CHECK_EQ(n[NNB_RESULTS], s->served);
    if (s->served == s->asked) {
        CHECK_EQ(resume(last), s->outcome);
    } else { /* it was not taken any more */
        CHECK_EQ(s->served, s->asked - 1);
        nnb_client_hang_up(s->pair.client);
        CHECK_EQ(resume(last), -EPIPE);
    }
    CHECK_EQ(nnb_mq_available_to_read(s->pair.result), 0);

    pthread_mutex_lock(&s->lock);
    s->is_open = 0;
    CHECK(s->leaving == NULL); /* its end was told */
    for (int i = 0; i < PLANS; i++)
        end(&s->kernels[i]);
    while (s->all) {
        test_kernel *k = s->all;
        s->all = k->next;
        CHECK(k->has_ended || !k->runs); /* its plan was not kept */
        free(k);
    }
    pthread_mutex_unlock(&s->lock);
}

static void *be_client(void *argument)
{
    uint64_t number = (uint64_t)(intptr_t)argument;
    seat *with = seats[number];
    uint32_t random = (uint32_t)number * 2654435761u + 1;
    for (uint64_t round = 0; round < ROUNDS; round++) {
        nnb_execution *e[BURSTS][SLOTS];
        for (int i = 0; i < BURSTS; i++) {
            random = random * 1664525u + 1013904223u;
            join(&with[i], number * ROUNDS + round, random >> 16 & 3, random >> 20 & 1 ? 50000 : 0);
            for (int32_t slot = 0; slot < SLOTS; slot++)
                e[i][slot] = request_on(with[i].pair.client, slot);
        }
        int32_t slots[BURSTS];
        for (int k = 0; k <= REQUESTS; k++) {
            for (int i = 0; i < BURSTS; i++) {
                random = random * 1664525u + 1013904223u;
                slots[i] = (int32_t)(random >> 28 ? random >> 16 & 1 : (random >> 16) % SLOTS);
                int kind = random >> 20 & 15 ? SHORT : number == 0 ? LONG : FAILS;
                ask(&with[i], e[i][slots[i]], kind, slots[i]);
            }
            for (int i = 0; i < BURSTS && k < REQUESTS; i++) {
                int rc = resume(e[i][slots[i]]);
                CHECK_EQ(with[i].served, with[i].asked);
                CHECK_EQ(rc, with[i].outcome);
            }
        }
        for (int i = 0; i < BURSTS; i++) {
            leave(&with[i], e[i][slots[i]]);
            for (int slot = 0; slot < SLOTS; slot++)
                nnb_execution_destroy(e[i][slot]);
            end_pair(&with[i].pair);
        }
        nnb_group_leave(group, number * ROUNDS + round);
    }
    if (number)
        add(&others, -1);
    return NULL;
}

static int is_over;

static void *free_slots(void *unused)
{
    for (uint32_t i = 0; !load(&is_over); i++) {
        seat *s = &seats[i % CLIENTS][i / CLIENTS % BURSTS];
        pthread_mutex_lock(&s->lock);
        if (s->is_open)
            free_slot(s, i % 31 ? (int32_t)(i / (CLIENTS * BURSTS) % SLOTS) : NNB_ANY_SLOT);
        pthread_mutex_unlock(&s->lock);
        sched_yield();
    }
    return unused;
}

int main(void)
{
    watchdog();
    for (int i = 0; i < CLIENTS * BURSTS; i++)
        pthread_mutex_init(&seats[i / BURSTS][i % BURSTS].lock, NULL);
    CHECK_EQ(nnb_group_create(&group, 2, 127), 0);
    add_worker();
    add_worker();
    pthread_t clients[CLIENTS], freeing = start(free_slots, NULL);
    for (int i = 0; i < CLIENTS; i++)
        clients[i] = start(be_client, (void *)(intptr_t)i);
    for (int i = 0; i < CLIENTS; i++)
        finish(clients[i]);
    __atomic_store_n(&is_over, 1, __ATOMIC_RELAXED);
    finish(freeing);
    nnb_group_close(group);
    for (int i = 0; i < n_workers; i++) /* none is made any more: no run is under way */
        finish(threads[i]);
    nnb_group_destroy(group);
    CHECK(n_leaving > 0 && n_long > 0 && n_left > 0 && n_together > 0 && n_split > 0);
    return 0;
}
