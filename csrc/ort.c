/* A graph of ONNX Runtime, bound to its arguments: a kernel.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * The library is loaded by the caller, who also makes the session and the binding. Here are the run and what surrounds it:
 * copies of arguments that the library may not share with a client, a deadline, and why a run failed. What is called of the
 * library is found by its position in the table that the library gives out, which has never changed.
 *
 * A run ends before its last node only where its options say so, at the next node. At a deadline a thread says it; it starts
 * with the first one, and sleeps without a timer while there is none. A deadline later than the one it waits for does not
 * wake it. What it says is taken back with the lock held, so that it ends no later run.
 */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "nnb_internal.h"

/* Positions in the table. */
enum {
    GET_ERROR_MESSAGE = 2,
    CREATE_RUN_OPTIONS = 39,
    SET_RUN_LOG_SEVERITY = 41,
    SET_TERMINATE = 46,
    UNSET_TERMINATE = 47,
    RELEASE_STATUS = 93,
    RELEASE_RUN_OPTIONS = 97,
    RUN_WITH_BINDING = 133,
};
#define FATAL 4 /* the severity of messages that nothing here writes: a failure is told by its status alone */

typedef void *(*of_options)(void *options);
typedef void (*release)(void *what);

typedef struct ort_run {
    nnb_kernel kernel;
    void *const *api;
    void *session, *binding, *options;
    void *(*run)(void *session, const void *options, const void *binding);
    char *sentence;
    uint64_t deadline_ns; /* of the run under way, in the list; what follows needs the lock */
    struct ort_run *next, **link;
    int is_ended, is_cancelled;
    uint32_t n_before, n_copies;
    nnb_copy copies[];
} ort_run;

static pthread_mutex_t lock;
static pthread_cond_t changed;
static ort_run *timed; /* runs with a deadline */
static uint64_t sleeps_until;
static int has_thread;

/* At first, and in a forked child: it has neither the thread nor the runs of others, and the lock may be taken. */
static void begin_anew(void)
{
    pthread_condattr_t attr;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&changed, &attr);
    pthread_condattr_destroy(&attr);
    pthread_mutex_init(&lock, NULL);
    timed = NULL;
    has_thread = 0;
}

static void prepare(void)
{
    begin_anew();
    pthread_atfork(NULL, NULL, begin_anew);
}

/* ---- deadlines -------------------------------------------------------------------------------------------------- */

static void tell(ort_run *r, int which)
{
    void *status = ((of_options)r->api[which])(r->options);
    if (status)
        ((release)r->api[RELEASE_STATUS])(status);
}

static void *end_at_deadlines(void *unused)
{
    (void)unused;
    pthread_mutex_lock(&lock);
    for (;;) {
        uint64_t now = nnb_now_ns();
        sleeps_until = UINT64_MAX;
        for (ort_run *r = timed; r; r = r->next) {
            if (r->deadline_ns <= now && !r->is_ended) {
                r->is_ended = 1;
                tell(r, SET_TERMINATE);
            } else if (r->deadline_ns > now && r->deadline_ns < sleeps_until) {
                sleeps_until = r->deadline_ns;
            }
        }
        if (sleeps_until == UINT64_MAX) {
            pthread_cond_wait(&changed, &lock);
        } else {
            struct timespec at = {(time_t)(sleeps_until / 1000000000u), (long)(sleeps_until % 1000000000u)};
            pthread_cond_timedwait(&changed, &lock, &at);
        }
    }
    return NULL;
}

/* 0 or -EAGAIN: there is no thread for it. */
static int begin_timed(ort_run *r, uint64_t deadline_ns)
{
    pthread_mutex_lock(&lock);
    if (!has_thread) {
        sleeps_until = 0; /* it looks at the list before it sleeps */
        has_thread = nnb_start_thread(NULL, end_at_deadlines, NULL) == 0;
    }
    int rc = has_thread ? 0 : -EAGAIN;
    if (!rc) {
        r->deadline_ns = deadline_ns;
        r->link = &timed;
        if ((r->next = timed))
            timed->link = &r->next;
        timed = r;
        if (deadline_ns < sleeps_until)
            pthread_cond_signal(&changed);
    }
    pthread_mutex_unlock(&lock);
    return rc;
}

static void end_timed(ort_run *r)
{
    pthread_mutex_lock(&lock);
    if ((*r->link = r->next))
        r->next->link = r->link;
    if (r->is_ended && !r->is_cancelled)
        tell(r, UNSET_TERMINATE);
    r->is_ended = 0;
    pthread_mutex_unlock(&lock);
}

/* ---- failures --------------------------------------------------------------------------------------------------- */

static int say(ort_run *r, int status, const char *start, const char *rest)
{
    if (asprintf(&r->sentence, "%s%s", start, rest) < 0)
        r->sentence = NULL; /* not known */
    return status;
}

static int say_missed(ort_run *r) { return say(r, NNB_MISSED_DEADLINE, "the run was ended at its deadline", ""); }

static int fail(ort_run *r, void *status, uint64_t deadline_ns)
{
    const char *text = ((const char *(*)(const void *))r->api[GET_ERROR_MESSAGE])(status);
    pthread_mutex_lock(&lock);
    int is_cancelled = r->is_cancelled;
    pthread_mutex_unlock(&lock);
    int rc;
    if (deadline_ns && nnb_now_ns() >= deadline_ns)
        rc = say_missed(r);
    else if (is_cancelled)
        rc = say(r, NNB_MISSED_DEADLINE, "the run was ended, for its client has gone or closed the burst", "");
    else if (strstr(text, "std::bad_alloc"))
        rc = say(r, NNB_RESOURCE_EXHAUSTED, "no memory for this execution: ", text);
    else
        rc = say(r, NNB_GENERAL_FAILURE, "ONNX Runtime: Error in execution: ", text);
    ((release)r->api[RELEASE_STATUS])(status);
    return rc;
}

/* ---- the kernel ------------------------------------------------------------------------------------------------- */

static void copy(const nnb_copy *c)
{
    if (!c->as_bool) {
        memcpy(c->to, c->from, c->nbytes);
        return;
    }
    for (uint64_t i = 0; i < c->nbytes; i++)
        ((uint8_t *)c->to)[i] = ((const uint8_t *)c->from)[i] != 0;
}

static int run(nnb_kernel *k, uint64_t deadline_ns)
{
    ort_run *r = (ort_run *)k;
    free(r->sentence);
    r->sentence = NULL;
    for (uint32_t i = 0; i < r->n_before; i++)
        copy(&r->copies[i]);
    if (deadline_ns >= INT64_MAX)
        deadline_ns = 0; /* the end of time */
    if (deadline_ns && nnb_now_ns() >= deadline_ns)
        return say_missed(r);
    if (deadline_ns && begin_timed(r, deadline_ns) < 0)
        return say(r, NNB_RESOURCE_EXHAUSTED, "the system has no thread for a deadline", "");
    void *status = r->run(r->session, r->options, r->binding);
    if (deadline_ns)
        end_timed(r);
    if (status)
        return fail(r, status, deadline_ns);
    for (uint32_t i = r->n_before; i < r->n_copies; i++)
        copy(&r->copies[i]);
    return 0;
}

static const char *sentence(nnb_kernel *k) { return ((ort_run *)k)->sentence; }

static void destroy(nnb_kernel *k)
{
    ort_run *r = (ort_run *)k;
    ((release)r->api[RELEASE_RUN_OPTIONS])(r->options);
    free(r->sentence);
    free(r);
}

int nnb_ort_create(nnb_kernel **out, void *const *api, void *session, void *binding, const nnb_copy *copies,
                   uint32_t n_before, uint32_t n_after)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, prepare);
    uint32_t n = n_before + n_after;
    ort_run *r = calloc(1, sizeof(*r) + n * sizeof(*copies));
    if (!r)
        return -ENOMEM;
    r->kernel = (nnb_kernel){.run = run, .sentence = sentence, .destroy = destroy};
    r->api = api;
    r->session = session;
    r->binding = binding;
    r->run = (void *(*)(void *, const void *, const void *))api[RUN_WITH_BINDING];
    r->n_before = n_before;
    r->n_copies = n;
    memcpy(r->copies, copies, n * sizeof(*copies));
    void *status = ((void *(*)(void **))api[CREATE_RUN_OPTIONS])(&r->options);
    if (!status)
        status = ((void *(*)(void *, int))api[SET_RUN_LOG_SEVERITY])(r->options, FATAL);
    if (status) {
        ((release)api[RELEASE_STATUS])(status);
        destroy(&r->kernel);
        return -ENOMEM;
    }
    *out = &r->kernel;
    return 0;
}

void nnb_ort_cancel(nnb_kernel *k)
{
    ort_run *r = (ort_run *)k;
    pthread_mutex_lock(&lock);
    r->is_cancelled = 1;
    tell(r, SET_TERMINATE);
    pthread_mutex_unlock(&lock);
}
