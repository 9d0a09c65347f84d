/* The interpreter lock around calls from Python into the C core.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * cffi releases the GIL around every call. That costs about 50 ns, and with another thread running Python code it
 * hands the interpreter away for up to a whole switch interval (5 ms): out of proportion for functions that take
 * 20 ns and never wait. So the generated wrappers keep the lock, and the functions that do wait release it here.
 * They keep their names: Python calls lib.nnb_event_wait and gets nnb_py_event_wait.
 */
#ifndef NNB_GIL_H
#define NNB_GIL_H

#include <Python.h>
#include <errno.h>

#undef Py_BEGIN_ALLOW_THREADS
#undef Py_END_ALLOW_THREADS
#define Py_BEGIN_ALLOW_THREADS {
#define Py_END_ALLOW_THREADS }

/* Evaluates `call` without the lock. */
#define NNB_WITHOUT_GIL(rc, call)                    \
    do {                                             \
        PyThreadState *state_ = PyEval_SaveThread(); \
        (rc) = (call);                               \
        PyEval_RestoreThread(state_);                \
    } while (0)

static int nnb_py_event_wait(uint32_t *word, uint32_t mask, uint32_t *state, uint64_t deadline_ns)
{
    int rc;
    NNB_WITHOUT_GIL(rc, nnb_event_wait(word, mask, state, deadline_ns));
    return rc;
}
#define nnb_event_wait nnb_py_event_wait

static int nnb_py_event_wait_retry(uint32_t *word, uint32_t mask, uint32_t *state, uint64_t deadline_ns)
{
    int rc;
    NNB_WITHOUT_GIL(rc, nnb_event_wait_retry(word, mask, state, deadline_ns));
    return rc;
}
#define nnb_event_wait_retry nnb_py_event_wait_retry

/* A queue that has enough is served at once, so the lock can stay. */
static int nnb_py_mq_read_blocking(nnb_mq *q, void *data, uint64_t count, uint32_t read_notification,
                                   uint32_t write_notification, uint64_t deadline_ns, uint32_t *word)
{
    int rc;
    int64_t ready = nnb_mq_available_to_read(q);
    if (ready >= 0 && (uint64_t)ready >= count)
        return nnb_mq_read_blocking(q, data, count, read_notification, write_notification, deadline_ns, word);
    NNB_WITHOUT_GIL(rc, nnb_mq_read_blocking(q, data, count, read_notification, write_notification, deadline_ns, word));
    return rc;
}
#define nnb_mq_read_blocking nnb_py_mq_read_blocking

static int nnb_py_mq_write_blocking(nnb_mq *q, const void *data, uint64_t count, uint32_t read_notification,
                                    uint32_t write_notification, uint64_t deadline_ns, uint32_t *word)
{
    int rc;
    int64_t ready = nnb_mq_available_to_write(q);
    if (ready >= 0 && (uint64_t)ready >= count)
        return nnb_mq_write_blocking(q, data, count, read_notification, write_notification, deadline_ns, word);
    NNB_WITHOUT_GIL(rc,
                    nnb_mq_write_blocking(q, data, count, read_notification, write_notification, deadline_ns, word));
    return rc;
}
#define nnb_mq_write_blocking nnb_py_mq_write_blocking

/* Buffers that are free are taken at once. */
static int nnb_py_uses_enter(nnb_uses *u, uint64_t deadline_ns)
{
    int rc = nnb_uses_enter(u, 0);
    if (rc != -EAGAIN || !deadline_ns)
        return rc;
    NNB_WITHOUT_GIL(rc, nnb_uses_enter(u, deadline_ns));
    return rc;
}
#define nnb_uses_enter nnb_py_uses_enter

/* Bursts. An answer that comes within the first spins costs no hand-over of the lock on either side; they last about as
 * long as a few hundred bytecodes, so other threads do not notice. */
static int nnb_py_execution_resume(nnb_execution *e)
{
    int rc;
    NNB_WITHOUT_GIL(rc, nnb_execution_resume(e));
    return rc;
}
#define nnb_execution_resume nnb_py_execution_resume

static int nnb_py_execution_run(nnb_execution *e)
{
    int rc = nnb_execution_begin(e);
    return rc == -EAGAIN ? nnb_py_execution_resume(e) : rc;
}
#define nnb_execution_run nnb_py_execution_run

/* The look of an event loop: its other tasks wait until that moment at most, other threads only for the first spins. */
static int nnb_py_execution_look(nnb_execution *e, uint64_t tag, uint64_t until_ns, int rc)
{
    if (rc == -EAGAIN)
        NNB_WITHOUT_GIL(rc, nnb_execution_look(e, tag, until_ns));
    return rc;
}

static int nnb_py_execution_launch(nnb_execution *e, uint64_t tag, uint64_t until_ns)
{
    if (until_ns <= nnb_now_ns())
        return nnb_execution_launch(e, tag, until_ns);
    return nnb_py_execution_look(e, tag, until_ns, nnb_execution_begin(e));
}
#define nnb_execution_launch nnb_py_execution_launch

static int nnb_py_execution_watch(nnb_execution *e, uint64_t tag, uint64_t until_ns)
{
    return nnb_py_execution_look(e, tag, until_ns, nnb_execution_regain(e, tag));
}
#define nnb_execution_watch nnb_py_execution_watch

static int nnb_py_execution_advance(nnb_execution *started, nnb_execution *awaited)
{
    int rc = nnb_execution_advance(started, awaited);
    return rc == -EAGAIN ? nnb_py_execution_resume(awaited) : rc;
}
#define nnb_execution_advance nnb_py_execution_advance

/* A kernel runs without the lock, and so do the next requests for one, however many there are. */
static int nnb_py_has_kernel(int id) { return id > 0 && id & NNB_PLAN_KERNEL; }

static int nnb_py_server_next(nnb_server *s)
{
    int rc = nnb_server_reply(s);
    if (rc < 0)
        return rc;
    uint32_t spins = nnb_server_spins(s);
    if (spins && (rc = nnb_server_try(s, spins)) != -EAGAIN && !nnb_py_has_kernel(rc))
        return rc;
    NNB_WITHOUT_GIL(rc, spins && (rc = nnb_server_run(s, rc)) != -EAGAIN ? rc : nnb_server_next(s));
    return rc;
}
#define nnb_server_next nnb_py_server_next

/* After a long run the client sleeps, and may take this processor when it is woken: not with the lock. */
static int nnb_py_group_next(nnb_worker *w)
{
    int rc, id = -EAGAIN;
    if (!nnb_group_ran_long(w)) {
        if ((rc = nnb_group_answer(w)))
            return rc;
        uint32_t spins = nnb_group_spins(w);
        if (spins && (id = nnb_group_try(w, spins)) != -EAGAIN && !nnb_py_has_kernel(id))
            return id;
    }
    NNB_WITHOUT_GIL(rc, (rc = nnb_group_run(w, id)) != -EAGAIN ? rc : nnb_group_next(w));
    return rc;
}
#define nnb_group_next nnb_py_group_next

/* Small arguments are copied in less time than the lock takes to change hands. */
static int nnb_py_steps_turn(nnb_steps *s, uint64_t step)
{
    if (s->nbytes < 1 << 16) {
        return nnb_steps_turn(s, step);
    }
    PyThreadState *state = PyEval_SaveThread();
    int rc = nnb_steps_turn(s, step);
    PyEval_RestoreThread(state);
    return rc;
}
#define nnb_steps_turn nnb_py_steps_turn

static int nnb_py_kernel_run(nnb_kernel *k, uint64_t deadline_ns)
{
    int rc;
    NNB_WITHOUT_GIL(rc, nnb_kernel_run(k, deadline_ns));
    return rc;
}
#define nnb_kernel_run nnb_py_kernel_run

/* The measurements run for seconds. */
static int nnb_py_bench_line(int client_cpu, int server_cpu, uint32_t warmup, uint32_t count, uint32_t *samples)
{
    int rc;
    NNB_WITHOUT_GIL(rc, nnb_bench_line(client_cpu, server_cpu, warmup, count, samples));
    return rc;
}
#define nnb_bench_line nnb_py_bench_line

static int nnb_py_bench_runs(nnb_execution *e, uint32_t count, uint32_t *samples)
{
    int rc;
    NNB_WITHOUT_GIL(rc, nnb_bench_runs(e, count, samples));
    return rc;
}
#define nnb_bench_runs nnb_py_bench_runs

#endif
