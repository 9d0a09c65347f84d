/* A plan with driver-managed buffers is admitted before it is run and has left them before the client has its answer. */
#include "burst_pair.h"
#include "nnb_channel.h"

static nnb_server *server;
static nnb_buffer *state;
static nnb_uses *uses;
static int quick, careful, idle_reports;
static int32_t status; /* of the next answer */
static int forgo;
static nnb_kernel *kernel; /* of the plan that is bound next, or NULL */
static int kernel_status, kernel_runs, finished;

static nnb_buffer_state look(void)
{
    nnb_buffer_state s;
    nnb_buffer_look(state, &s);
    return s;
}

static int run_kernel(nnb_kernel *k, uint64_t deadline_ns)
{
    (void)k;
    (void)deadline_ns;
    kernel_runs++;
    CHECK_EQ(look().is_idle, 0);
    return kernel_status;
}

static const char *say_nothing(nnb_kernel *k) { return k ? NULL : "no kernel"; }

/* Between the run and its answer. */
int __real_nnb_channel_send(nnb_channel *ch, const uint8_t *packet, uint32_t n);
int __wrap_nnb_channel_send(nnb_channel *ch, const uint8_t *packet, uint32_t n)
{
    CHECK_EQ(look().is_idle, 1); /* also when a request is sent: nobody else uses it here */
    return __real_nnb_channel_send(ch, packet, n);
}

static void *serve(void *unused)
{
    (void)unused;
    for (;;) {
        int id = nnb_server_next(server);
        if (id == -EPIPE)
            return NULL;
        if (id == -ERESTART) {
            idle_reports += look().is_closed && look().is_idle;
            continue;
        }
        CHECK(id >= 0);
        int plan = id & (NNB_PLAN_NEW - 1);
        if (id & NNB_PLAN_NEW) {
            CHECK_EQ(nnb_server_keep_plan(server, (uint32_t)plan), 0);
            CHECK_EQ(nnb_server_guard_plan(server, (uint32_t)plan, uses), 0);
            if (kernel)
                CHECK_EQ(nnb_server_set_kernel(server, (uint32_t)plan, kernel), 0);
        } else if (id & NNB_PLAN_KERNEL) {
            const char *sentence;
            int32_t outcome;
            CHECK_EQ(nnb_server_outcome(server, &outcome, &sentence), 0);
            CHECK_EQ(outcome, kernel_status);
            CHECK_EQ(look().is_idle, 0); /* its owner finishes the run */
            finished++;
        } else if (id & NNB_PLAN_GUARDED) {
            careful++;
            if (!look().is_closed) {
                CHECK_EQ(nnb_uses_enter(uses, 0), 0);
                nnb_uses_settle(uses, nnb_gate_moves(0));
                CHECK_EQ(nnb_uses_leave(uses, NNB_COMMITTED), 0);
            }
        } else {
            quick++;
            CHECK_EQ(look().is_idle, 0);
            if (forgo) {
                nnb_server_forgo(server);
                CHECK_EQ(look().is_idle, 1);
            }
            if (status == 100) /* closed while it runs */
                nnb_buffer_close(state);
        }
        nnb_result result = {status == 100 ? 0 : status, 0, 0, NULL, NULL, NNB_NO_TIME, NNB_NO_TIME};
        CHECK_EQ(nnb_server_set_result(server, &result), 0);
    }
}

static void run(nnb_execution *e, int32_t with)
{
    status = with;
    CHECK_EQ(run_to_end(e), with == 100 ? 0 : with);
}

int main(void)
{
    watchdog();
    CHECK_EQ(nnb_buffer_create(&state), 0);
    CHECK_EQ(nnb_uses_create(&uses, NULL, 0, &state, 1), 0);
    burst_pair p = new_pair(32, 0, 0);
    server = p.server;
    nnb_execution *e = new_execution(p.client, 1), *other = new_execution(p.client, 2);
    pthread_t thread = start(serve, NULL);

    run(e, 0); /* new */
    run(e, 0); /* never settled */
    CHECK_EQ(careful, 1);
    CHECK_EQ(look().generation, 1);
    for (int i = 0; i < 10; i++)
        run(e, 0);
    CHECK_EQ(quick, 10);
    CHECK_EQ(look().generation, 11);
    CHECK_EQ(look().is_idle, 1);
    CHECK_EQ(look().is_initialised, 1);

    run(e, 2); /* a failure loses the contents */
    CHECK_EQ(look().is_initialised, 0);
    CHECK_EQ(look().generation, 12);

    run(other, 0); /* another plan on the same buffers */
    run(other, 0);
    CHECK_EQ(quick, 12);
    CHECK_EQ(look().is_initialised, 1);

    nnb_gate_moves(1);
    run(e, 0);
    CHECK_EQ(careful, 2);
    CHECK_EQ(nnb_uses_enter(uses, 0), 0); /* somebody else has it */
    nnb_uses_leave(uses, NNB_UNCHANGED);

    /* A kernel runs with the buffers, wherever they are, if it may have them. */
    static nnb_kernel in_c = {.run = run_kernel, .sentence = say_nothing};
    kernel = &in_c;
    nnb_execution *third = new_execution(p.client, 3);
    run(third, 0);
    nnb_uses_settle(uses, NNB_ANYWHERE);
    int before_it = careful, seen = quick;
    uint64_t generation = look().generation;
    for (int i = 0; i < 3; i++) {
        nnb_gate_moves(1);
        CHECK_EQ(run_to_end(third), 0);
    }
    CHECK_EQ(kernel_runs, 3);
    CHECK_EQ(look().generation, generation + 3);
    kernel_status = -ENOSPC;
    run(third, 0);
    CHECK_EQ(finished, 1);
    CHECK_EQ(look().is_initialised, 1);
    run(third, 2);
    CHECK_EQ(look().is_initialised, 0);
    CHECK_EQ(look().is_idle, 1);
    kernel_status = 0;
    nnb_uses_settle(uses, UINT64_MAX);
    run(third, 0);
    CHECK_EQ(careful, before_it + 1);
    CHECK_EQ(kernel_runs, 5);
    nnb_uses_settle(uses, NNB_ANYWHERE);
    CHECK_EQ(run_to_end(third), 0);
    CHECK_EQ(kernel_runs, 6);
    CHECK_EQ(seen, quick);
    nnb_uses_settle(uses, nnb_gate_moves(0));
    nnb_execution_destroy(third);
    kernel = NULL;

    forgo = 1;
    uint64_t before = look().generation;
    run(e, 2);
    CHECK_EQ(look().generation, before);
    forgo = 0;

    run(e, 100);
    CHECK_EQ(look().is_closed, 1);
    CHECK_EQ(look().is_idle, 1);
    run(e, 4); /* not admitted any more */
    CHECK_EQ(careful, 4);

    nnb_server_hang_up(p.server);
    finish(thread);
    CHECK(idle_reports >= 1); /* the listener was told to free it */
    nnb_execution_destroy(e);
    nnb_execution_destroy(other);
    end_pair(&p);
    nnb_uses_destroy(uses);
    nnb_buffer_destroy(state);
    return 0;
}
