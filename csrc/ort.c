/* A graph of ONNX Runtime, bound to its arguments: a kernel.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * The caller loads the library, and makes the session and the binding. This file has the run, the copies of arguments
 * that the library may not share with a client, deadlines, and the reasons of failures. It finds the library's
 * functions by their positions in the library's table, which have never changed.
 *
 * To end a run early, a thread sets a flag in the run's options at the deadline; the run then ends at its next node.
 * The thread starts with the first deadline, and sleeps without a timer while there is none. A deadline later than the
 * awaited one does not wake it. The flag is cleared under the lock, so that it ends no later run.
 */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "nnb_internal.h"

/* Positions in the library's table. */
enum {
    GET_ERROR_MESSAGE = 2,
    CREATE_RUN_OPTIONS = 39,
    SET_RUN_LOG_SEVERITY = 41,
    SET_TERMINATE = 46,
    UNSET_TERMINATE = 47,
    CREATE_TENSOR_WITH_DATA = 49,
    GET_TENSOR_DATA = 51,
    GET_DIMENSIONS_COUNT = 61,
    GET_DIMENSIONS = 62,
    GET_TYPE_AND_SHAPE = 65,
    ALLOCATOR_FREE = 76,
    RELEASE_STATUS = 93,
    RELEASE_VALUE = 96,
    RELEASE_RUN_OPTIONS = 97,
    RELEASE_TYPE_AND_SHAPE = 99,
    RUN_WITH_BINDING = 133,
    BIND_INPUT = 136,
    BIND_OUTPUT = 137,
    BIND_OUTPUT_TO_DEVICE = 138,
    GET_BOUND_OUTPUTS = 140,
    HAS_VALUE = 192,
};
#define FATAL 4 /* severity of messages: none is printed, because the status reports a failure */

typedef void *(*of_options)(void *options);
typedef void *(*of_two)(const void *, void *);
typedef void *(*of_binding)(void *binding, const char *name, const void *what);
typedef void (*release)(void *what);

typedef struct ort_run {
    nnb_kernel kernel;
    void *const *api;
    void *session, *binding, *options;
    void *(*run)(void *session, const void *options, const void *binding);
    char *sentence;
    uint64_t deadline_ns; /* of the present run, which is in the list `timed`. Under lock up to is_cancelled */
    struct ort_run *next, **link;
    int is_ended, is_cancelled;
    int expects; /* outputs of unknown dimensions are bound to their buffers with expected dimensions */

    nnb_ort_argument *arguments; /* inputs, then outputs; NULL: nnb_ort_tell was not called */
    uint32_t n_inputs, n_outputs;
    void *memory, *allocator;
    nnb_result told;

    uint32_t n_before, n_copies;
    nnb_copy copies[];
} ort_run;

static pthread_mutex_t lock;
static pthread_cond_t changed;
static ort_run *timed; /* runs with a deadline */
static uint64_t sleeps_until;
static int has_thread;

/* Called at first and in a forked child, which has no other threads and runs, and where the lock may be taken. */
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

static void set_termination(ort_run *r, int which)
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
                set_termination(r, SET_TERMINATE);
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

/* Puts a run into `timed`. -EAGAIN: the system cannot start the thread. */
static int begin_timed(ort_run *r, uint64_t deadline_ns)
{
    pthread_mutex_lock(&lock);
    if (!has_thread) {
        sleeps_until = 0; /* no signal is needed: the new thread reads the list first */
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
        set_termination(r, UNSET_TERMINATE);
    r->is_ended = 0;
    pthread_mutex_unlock(&lock);
}

/* ---- failures --------------------------------------------------------------------------------------------------- */

static int say(ort_run *r, int status, const char *start, const char *rest)
{
    if (asprintf(&r->sentence, "%s%s", start, rest) < 0)
        r->sentence = NULL; /* unknown */
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

/* ---- arguments -------------------------------------------------------------------------------------------------- */

static nnb_ort_argument *output(const ort_run *r, uint32_t i) { return &r->arguments[r->n_inputs + i]; }

/* Looks up the place of an argument in a buffer. 1: the place has changed. */
static int look_up(nnb_ort_argument *a)
{
    if (!a->buffer)
        return 0;
    const nnb_buffer_contents *c = nnb_buffer_contents_of(a->buffer);
    int has_moved = a->place != c->place;
    a->place = c->place;
    a->room = c->room;
    return has_moved;
}

/* Sets a dimension. 1: its size has changed. */
static int change(nnb_ort_argument *a, uint32_t i, int64_t size)
{
    int is_other = a->dims[i] != size;
    a->dims[i] = size;
    return is_other;
}

/* Binds an argument with its place and dimensions. Returns NULL or the library's error. */
static void *bind(ort_run *r, nnb_ort_argument *a)
{
    uint64_t nbytes = a->element_size;
    for (uint32_t i = 0; i < a->rank; i++)
        nbytes *= (uint64_t)a->dims[i];
    void *value = NULL;
    void *status = ((void *(*)(const void *, void *, size_t, const int64_t *, size_t, int,
                               void **))r->api[CREATE_TENSOR_WITH_DATA])(r->memory, a->place, nbytes, a->dims, a->rank,
                                                                         a->element, &value);
    if (!status) {
        int which = a < output(r, 0) ? BIND_INPUT : BIND_OUTPUT;
        status = ((of_binding)r->api[which])(r->binding, a->name, value);
        ((release)r->api[RELEASE_VALUE])(value); /* the binding has its own reference */
    }
    if (a->copy >= 0)
        r->copies[a->copy].nbytes = nbytes;
    return status;
}

/* Binds a steadily growing output to its buffer, so that no copy is needed. 1: the buffer has room. */
static int expect(ort_run *r, nnb_ort_argument *a)
{
    uint64_t nbytes = a->element_size;
    int64_t sizes[NNB_MAX_RANK];
    for (uint32_t i = 0; i < a->rank; i++) {
        sizes[i] = a->dims[i];
        a->dims[i] += a->growth[i];
        if (a->dims[i] <= 0 || __builtin_mul_overflow(nbytes, (uint64_t)a->dims[i], &nbytes))
            nbytes = UINT64_MAX;
    }
    void *status = nbytes <= a->room ? bind(r, a) : NULL;
    memcpy(a->dims, sizes, a->rank * sizeof *sizes);
    if (status)
        ((release)r->api[RELEASE_STATUS])(status);
    return nbytes <= a->room && !status;
}

/* Binds the arguments in buffers whose place or dimensions have changed. 0 or a status. */
static int bind_buffers(ort_run *r, uint64_t deadline_ns)
{
    for (uint32_t i = 0; i < r->n_inputs + r->n_outputs; i++) {
        nnb_ort_argument *a = &r->arguments[i];
        int is_other = look_up(a);
        if (a->buffer && i < r->n_inputs) {
            const nnb_buffer_contents *c = nnb_buffer_contents_of(a->buffer);
            is_other |= a->rank != c->rank;
            a->rank = c->rank;
            for (uint32_t d = 0; d < c->rank; d++)
                is_other |= change(a, d, c->dims[d]);
        }
        if (a->is_steady && r->kernel.result)
            r->expects |= expect(r, a);
        void *status = is_other && a->value < 0 ? bind(r, a) : NULL;
        if (status) {
            a->place = NULL; /* so that the next run binds it */
            return fail(r, status, deadline_ns);
        }
    }
    return 0;
}

/* ---- outputs of unknown dimensions ------------------------------------------------------------------------------ */

/* Takes the dimensions of the library's value, and its bytes if there is room. Returns NULL or the library's error. */
static void *take_value(const ort_run *r, nnb_ort_argument *a, void *value)
{
    void *info = NULL, *status = ((of_two)r->api[GET_TYPE_AND_SHAPE])(value, &info);
    if (status)
        return status;
    size_t rank = 0;
    int64_t before[NNB_MAX_RANK];
    memcpy(before, a->dims, sizeof before);
    status = ((of_two)r->api[GET_DIMENSIONS_COUNT])(info, &rank);
    a->is_steady = a->buffer && rank == a->rank;
    a->rank = rank > NNB_MAX_RANK ? NNB_ANY_RANK : (uint32_t)rank;
    if (!status && rank <= NNB_MAX_RANK)
        status = ((void *(*)(const void *, int64_t *, size_t))r->api[GET_DIMENSIONS])(info, a->dims, rank);
    ((release)r->api[RELEASE_TYPE_AND_SHAPE])(info);
    if (status || a->rank == NNB_ANY_RANK)
        return status;
    uint64_t nbytes = a->element_size;
    for (size_t i = 0; i < rank; i++) {
        nbytes *= (uint64_t)a->dims[i];
        if (a->dims[i] > UINT32_MAX) /* possible in an array without elements */
            a->rank = NNB_ANY_RANK;
        a->is_steady &= a->growth[i] == a->dims[i] - before[i];
        a->growth[i] = a->dims[i] - before[i];
    }
    a->is_steady &= a->rank != NNB_ANY_RANK;
    a->is_sufficient = nbytes <= a->room;
    void *data = NULL;
    if (nbytes && a->is_sufficient && !(status = ((of_two)r->api[GET_TENSOR_DATA])(value, &data)) && data != a->place)
        memcpy(a->place, data, nbytes);
    return status;
}

/* Makes the result with the shapes of the outputs. Returns the run's status. */
static int tell(ort_run *r)
{
    nnb_result *told = &r->told;
    told->status = 0;
    told->n_dims = 0;
    for (uint32_t i = 0; i < r->n_outputs; i++) {
        const nnb_ort_argument *a = output(r, i);
        told->shapes[i] = (nnb_shape){a->is_sufficient, a->rank, told->n_dims};
        for (uint32_t d = 0; d < a->rank; d++)
            told->dims[told->n_dims++] = (uint32_t)a->dims[d];
        if (!a->is_sufficient)
            told->status = NNB_OUTPUT_INSUFFICIENT_SIZE;
    }
    return told->status;
}

/* Returns 1 if an output's value can be the contents of its buffer. */
static int suits_buffer(const nnb_ort_argument *a)
{
    int suits = a->n_declared == NNB_ANY_RANK || a->n_declared == a->rank;
    for (uint32_t i = 0; i < a->rank && suits; i++)
        suits = a->dims[i] && (a->n_declared == NNB_ANY_RANK || !a->declared[i] || a->declared[i] == a->dims[i]);
    return suits;
}

/* Copies the outputs that the library has allocated. 0, a status, or -ENOSPC: a buffer needs more room. */
static int take_outputs(ort_run *r, uint64_t deadline_ns)
{
    void **values = NULL;
    size_t n = 0;
    void *status = ((void *(*)(void *, void *, void ***, size_t *))r->api[GET_BOUND_OUTPUTS])(r->binding, r->allocator,
                                                                                              &values, &n);
    int rc = status ? fail(r, status, deadline_ns) : 0;
    int has_room = 1;
    for (uint32_t i = 0; i < r->n_outputs && !rc; i++) {
        nnb_ort_argument *a = output(r, i);
        if (a->value < 0)
            continue;
        look_up(a);
        int has_value = 0;
        status = ((of_two)r->api[HAS_VALUE])(values[a->value], &has_value);
        if (!status && has_value)
            status = take_value(r, a, values[a->value]);
        if (status)
            rc = fail(r, status, deadline_ns);
        else if (!has_value || a->rank == NNB_ANY_RANK)
            rc = say(r, NNB_GENERAL_FAILURE,
                     has_value ? "too many or too large dimensions has output " : "not computed: output ", a->name);
        else if (a->buffer && !suits_buffer(a))
            rc = say(r, NNB_GENERAL_FAILURE, "does not fit its buffer: output ", a->name);
        has_room &= !a->buffer || a->is_sufficient;
    }
    for (size_t i = 0; i < n; i++)
        ((release)r->api[RELEASE_VALUE])(values[i]);
    if (values && (status = ((of_two)r->api[ALLOCATOR_FREE])(r->allocator, values)))
        ((release)r->api[RELEASE_STATUS])(status);
    return rc ? rc : has_room ? tell(r) : -ENOSPC;
}

/* Frees the library's allocations. Otherwise the next run would use them again, whatever their size. */
static void let_go_of_outputs(const ort_run *r)
{
    for (uint32_t i = 0; i < r->n_outputs; i++) {
        const nnb_ort_argument *a = output(r, i);
        void *status =
            a->value < 0 ? NULL : ((of_binding)r->api[BIND_OUTPUT_TO_DEVICE])(r->binding, a->name, r->memory);
        if (status)
            ((release)r->api[RELEASE_STATUS])(status);
    }
}

static const nnb_result *result(nnb_kernel *k) { return &((ort_run *)k)->told; }

/* ---- other requests --------------------------------------------------------------------------------------------- */

static int64_t dimension(const nnb_ort_argument *a, const nnb_argument *row, const uint32_t *dims, uint32_t i)
{
    return row->rank ? dims[row->first_dim + i] : a->declared[i];
}

/* Checks one argument for `adapt`. */
static int look_at(const nnb_ort_argument *a, const nnb_argument *row, const uint32_t *dims)
{
    if (row->rank != a->n_given || row->has_no_value != !a->name || row->pool_index != a->pool_index ||
        row->offset != a->offset)
        return -EINVAL;
    if (a->buffer) /* a request uses the whole buffer */
        return row->rank || row->length ? -EINVAL : 0;
    if (a->value >= 0 || !a->name) /* an omitted argument has no bytes */
        return row->length == a->room ? 0 : -EINVAL;
    uint64_t nbytes = a->element_size;
    for (uint32_t i = 0; i < a->rank; i++) {
        uint64_t size = (uint64_t)dimension(a, row, dims, i);
        int is_declared = a->n_declared != NNB_ANY_RANK && a->declared[i];
        if (!size || (is_declared && a->declared[i] != size) || (nbytes *= size) > UINT32_MAX)
            return -EINVAL;
    }
    if (nbytes != row->length)
        return -EINVAL;
    return nbytes > a->room ? -ENOSPC : 0;
}

static int bind_anew(ort_run *r, nnb_ort_argument *a, const nnb_argument *row, const uint32_t *dims)
{
    int is_other = 0;
    for (uint32_t i = 0; i < a->rank; i++)
        is_other |= change(a, i, dimension(a, row, dims, i));
    void *status = is_other ? bind(r, a) : NULL;
    if (status)
        ((release)r->api[RELEASE_STATUS])(status);
    return status ? -EIO : 0;
}

static int adapt(nnb_kernel *k, const nnb_request *request)
{
    ort_run *r = (ort_run *)k;
    if (request->n_inputs != r->n_inputs || request->n_outputs != r->n_outputs)
        return -EINVAL;
    int rc = 0;
    for (uint32_t i = 0; i < r->n_inputs + r->n_outputs; i++) {
        int looks = look_at(&r->arguments[i], &request->arguments[i], request->dims);
        if (looks == -EINVAL)
            return looks;
        rc = looks ? looks : rc;
    }
    for (uint32_t i = 0; i < r->n_inputs + r->n_outputs && !rc; i++)
        if (r->arguments[i].name && r->arguments[i].value < 0 && !r->arguments[i].buffer)
            rc = bind_anew(r, &r->arguments[i], &request->arguments[i], request->dims);
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

/* Takes the outputs of a run that returned `rc`. */
static int finish(ort_run *r, uint64_t deadline_ns, int rc)
{
    if (r->kernel.result) {
        rc = rc ? rc : take_outputs(r, deadline_ns);
        if (rc == -ENOSPC)
            return rc; /* the library keeps the outputs */
        let_go_of_outputs(r);
    }
    for (uint32_t i = 0; i < r->n_outputs && !rc; i++)
        if (output(r, i)->buffer)
            nnb_buffer_settle(output(r, i)->buffer, output(r, i)->rank, output(r, i)->dims);
    for (uint32_t i = r->n_before; i < r->n_copies && (!rc || rc == NNB_OUTPUT_INSUFFICIENT_SIZE); i++)
        copy(&r->copies[i]);
    return rc;
}

int nnb_ort_take(nnb_kernel *k) { return finish((ort_run *)k, 0, 0); }

static int run(nnb_kernel *k, uint64_t deadline_ns)
{
    ort_run *r = (ort_run *)k;
    free(r->sentence);
    r->sentence = NULL;
    r->expects = 0;
    int rc = bind_buffers(r, deadline_ns);
    if (rc)
        return rc;
    for (uint32_t i = 0; i < r->n_before; i++)
        copy(&r->copies[i]);
    if (deadline_ns >= INT64_MAX)
        deadline_ns = 0; /* treated as no deadline */
    if (deadline_ns && nnb_now_ns() >= deadline_ns)
        return say_missed(r);
    if (deadline_ns && begin_timed(r, deadline_ns) < 0)
        return say(r, NNB_RESOURCE_EXHAUSTED, "the system has no thread for a deadline", "");
    void *status = r->run(r->session, r->options, r->binding);
    if (status && r->expects) { /* an output may have other dimensions than expected: run the graph again */
        ((release)r->api[RELEASE_STATUS])(status);
        let_go_of_outputs(r);
        status = r->run(r->session, r->options, r->binding);
    }
    if (deadline_ns)
        end_timed(r);
    return finish(r, deadline_ns, status ? fail(r, status, deadline_ns) : 0);
}

static const char *sentence(nnb_kernel *k) { return ((ort_run *)k)->sentence; }

static void destroy(nnb_kernel *k)
{
    ort_run *r = (ort_run *)k;
    ((release)r->api[RELEASE_RUN_OPTIONS])(r->options);
    free(r->sentence);
    free(r->told.shapes);
    free(r->told.dims);
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

int nnb_ort_tell(nnb_kernel *k, nnb_ort_argument *arguments, uint32_t n_inputs, uint32_t n_outputs, void *memory,
                 void *allocator, int adapts)
{
    ort_run *r = (ort_run *)k;
    r->arguments = arguments;
    r->n_inputs = n_inputs;
    r->n_outputs = n_outputs;
    r->memory = memory;
    r->allocator = allocator;
    r->told = (nnb_result){.n_shapes = n_outputs, .time_on_device = NNB_NO_TIME, .time_in_driver = NNB_NO_TIME};
    r->told.shapes = malloc(n_outputs * sizeof(nnb_shape));
    r->told.dims = malloc(n_outputs * NNB_MAX_RANK * sizeof(uint32_t));
    if (!r->told.shapes || !r->told.dims)
        return -ENOMEM;
    for (uint32_t i = 0; i < n_outputs; i++)
        if (output(r, i)->value >= 0)
            k->result = result;
    k->adapt = adapts ? adapt : NULL;
    return 0;
}

void nnb_ort_cancel(nnb_kernel *k)
{
    ort_run *r = (ort_run *)k;
    pthread_mutex_lock(&lock);
    r->is_cancelled = 1;
    set_termination(r, SET_TERMINATE);
    pthread_mutex_unlock(&lock);
}
