/* A bound graph: its copies, its deadline, its end by another thread, and why it failed; the library is a false one. */
#include "check.h"

#include <sys/wait.h>

#include "nnb_internal.h"

#define MS 1000000u
enum { PATIENCE_S = 30 };

typedef struct options {
    nnb_a32 terminate;
} options;

static nnb_a32 begun;
static enum { AT_ONCE, UNTIL_ENDED, UNTIL_TOLD } runs;
static int fails;
static const char *message;
static options *made;

static void *create_options(void **out)
{
    made = calloc(1, sizeof(options));
    *out = made;
    return NULL;
}

static void *set_severity(void *o, int level) { return level == 4 ? NULL : o; }

static nnb_a32 told; /* how often a run was ended; with the lock held */
static uint32_t told_before;

static void *set_terminate(void *o)
{
    nnb_store32_release(&told, nnb_load32_relaxed(&told) + 1);
    nnb_store32_release(&((options *)o)->terminate, 1);
    return NULL;
}

static void *unset_terminate(void *o)
{
    nnb_store32_release(&((options *)o)->terminate, 0);
    return NULL;
}

static const char *text(const void *status) { return status == &fails ? message : "terminated"; }
static int released;
static void release_status(void *status) { released += status != NULL; }

/* A graph that takes no time, or has no end of its own. */
static void *run_nodes(void *session, const void *o, const void *binding)
{
    CHECK_EQ(*(const int *)session, 7);
    const options *opts = o;
    nnb_store32_release(&begun, 1);
    for (uint64_t end = nnb_now_ns() + PATIENCE_S * 1000ull * MS; nnb_now_ns() < end;) {
        int is_told = nnb_load32_acquire(&told) != told_before;
        if (runs == UNTIL_TOLD ? is_told : (int)nnb_load32_acquire((nnb_a32 *)&opts->terminate))
            return made;
        if (runs == AT_ONCE) {
            *(int *)binding += 1;
            return fails ? &fails : NULL;
        }
    }
    return NULL; /* too late */
}

static void *const *table(void)
{
    static void *api[134];
    api[2] = (void *)text;
    api[39] = (void *)create_options;
    api[41] = (void *)set_severity;
    api[46] = (void *)set_terminate;
    api[47] = (void *)unset_terminate;
    api[93] = (void *)release_status;
    api[97] = (void *)free;
    api[133] = (void *)run_nodes;
    return api;
}

static void await_begin(void)
{
    while (!nnb_load32_acquire(&begun))
        ;
}

static void *run_long(void *k)
{
    CHECK_EQ(nnb_kernel_run(k, nnb_now_ns() + PATIENCE_S * 1000ull * MS), 5);
    return NULL;
}

static void *cancel(void *k)
{
    await_begin();
    nnb_ort_cancel(k);
    return NULL;
}

int main(void)
{
    watchdog();
    int session = 7, binding = 0, x = 1, private = 0, y = 0;
    nnb_copy copies[] = {{&private, &x, sizeof x, 0}, {&y, &private, sizeof y, 0}};
    nnb_kernel *k;
    CHECK_EQ(nnb_ort_create(&k, table(), &session, &binding, copies, 1, 1), 0);

    CHECK_EQ(nnb_kernel_run(k, 0), 0);
    CHECK_EQ(binding, 1);
    CHECK_EQ(y, 1);
    CHECK(k->sentence(k) == NULL);

    /* A failure is told, and nothing is copied out. */
    fails = 1, message = "bad", x = 2;
    CHECK_EQ(nnb_kernel_run(k, 0), 2);
    CHECK_EQ(strcmp(k->sentence(k), "ONNX Runtime: Error in execution: bad"), 0);
    message = "std::bad_alloc";
    CHECK_EQ(nnb_kernel_run(k, 0), 7);
    CHECK_EQ(released, 2);
    CHECK_EQ(private, 2);
    CHECK_EQ(y, 1);
    fails = 0;

    /* Ended at its deadline; one that is over before it begins does not begin; the end of time is none. */
    for (int i = 0; i < 3; i++) {
        runs = UNTIL_ENDED;
        uint64_t deadline = nnb_now_ns() + 5 * MS;
        CHECK_EQ(nnb_kernel_run(k, deadline), 5);
        CHECK(nnb_now_ns() >= deadline);
        CHECK_EQ(strcmp(k->sentence(k), "the run was ended at its deadline"), 0);
        runs = AT_ONCE; /* no later one is ended by it */
        CHECK_EQ(nnb_kernel_run(k, nnb_now_ns() + PATIENCE_S * 1000ull * MS), 0);
        CHECK_EQ(nnb_kernel_run(k, 0), 0);
    }
    nnb_store32_release(&begun, 0);
    CHECK_EQ(nnb_kernel_run(k, nnb_now_ns() - 1), 5);
    CHECK_EQ(nnb_load32_acquire(&begun), 0);
    CHECK_EQ(nnb_kernel_run(k, UINT64_MAX), 0);

    /* A nearer deadline than the one that is waited for. */
    nnb_kernel *far;
    CHECK_EQ(nnb_ort_create(&far, table(), &session, &binding, copies, 0, 0), 0);
    runs = UNTIL_ENDED;
    nnb_store32_release(&begun, 0);
    pthread_t thread = start(run_long, far);
    await_begin();
    CHECK_EQ(nnb_kernel_run(k, nnb_now_ns() + 5 * MS), 5);
    nnb_ort_cancel(far);
    pthread_join(thread, NULL);
    far->destroy(far);

    /* Deadlines hold in a forked child, too, which has not the thread. */
    pid_t child = fork();
    if (child == 0)
        _exit(nnb_kernel_run(k, nnb_now_ns() + 5 * MS));
    int status;
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK(WIFEXITED(status));
    CHECK_EQ(WEXITSTATUS(status), 5);

    /* Cancelled from another thread: that run and all others, whatever their deadlines. */
    nnb_store32_release(&begun, 0);
    thread = start(cancel, k);
    CHECK_EQ(nnb_kernel_run(k, nnb_now_ns() + PATIENCE_S * 1000ull * MS), 5);
    CHECK(strstr(k->sentence(k), "its client has gone") != NULL);
    pthread_join(thread, NULL);
    told_before = nnb_load32_acquire(&told);
    runs = UNTIL_TOLD; /* and this one is ended at its deadline, too */
    CHECK_EQ(nnb_kernel_run(k, nnb_now_ns() + 5 * MS), 5);
    runs = UNTIL_ENDED;
    CHECK_EQ(nnb_kernel_run(k, 0), 5);
    k->destroy(k);
    return 0;
}
