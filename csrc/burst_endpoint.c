/* The client end of a burst: executions that are serialised once and run many times.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 *   IDLE --start--> SENT --result--> IDLE
 *          |          |--timeout / abandon--> IDLE, and one more late result to drop
 *          `-> QUEUED, while requests that were given up are still in the ring --timeout / abandon--> IDLE
 *   any --hang_up--> every call -EPIPE
 *
 * An execution may have two requests that take turns: each run that ends with NONE passes the turn to the other one,
 * before another thread may run it. So state that a run leaves in one buffer is read there by the next.
 *
 * Results come in request order. A result whose request was given up is counted in `late` and dropped when it comes,
 * so it is never taken for the answer to the next request. A result that was not asked for is dropped before the next
 * request goes out.
 *
 * The endpoint lives in pages that the kernel zeroes in a forked child (MADV_WIPEONFORK): there `magic` is 0 and every
 * call says -ECHILD, without a getpid() in each run.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "nnb_channel.h"

#define MAGIC 0x6e6e6263u
#define GENERAL_FAILURE 2
#define SPINS 128u
#define FARTHEST_NS (24ull * 3600 * 1000000000u) /* a deadline that is further away is not told to the service */

struct nnb_client {
    uint32_t magic;
    nnb_a64 busy;  /* the execution that is inside, by address: taken with acquire, given back with release, which orders
                    * the fields below between threads */
    nnb_a64 owner; /* thread of the run in flight; stale while not busy */
    int closed;
    uint32_t late; /* results still to come for requests that were given up */
    nnb_row *row; /* or NULL: nothing is timed */
    nnb_sampling sampling;
    uint64_t quick;    /* runs answered within the first looks since the last of those that was timed */
    uint64_t looks_ns; /* what the first looks of a run took that was timed and got no answer from them */
    /* the run in flight */
    uint64_t timed_ns; /* when it was sent, 0: it is not timed */
    uint64_t late_ns;  /* likewise, as far as it can be told afterwards */
    int slow;          /* the first looks have brought no answer */
    nnb_trace *trace; /* or NULL */
    uint64_t own_counters[NNB_COUNTERS];
    uint8_t *packet; /* room for the whole result ring */
    nnb_channel request, result;
    pthread_mutex_t lock; /* hang_up against close */
};

struct nnb_execution {
    nnb_client *client;
    uint64_t timeout_ns, deadline_ns;
    nnb_a32 left; /* it runs elsewhere from now on */
    int waiting, sent;
    int late; /* a run of it was given up and may still go on */
    uint32_t n, shapes_room, dims_room;
    uint32_t turn;  /* 1: `other` is sent next */
    uint8_t *other; /* as long as `packet`, or NULL: the same request each time */
    nnb_result result;
    uint8_t packet[];
};

#define CLOSING 1u

static uint64_t self(void) { return (uint64_t)(uintptr_t)pthread_self(); }

/* ---- client --------------------------------------------------------------------------------------------------- */

int nnb_client_create(nnb_client **out, nnb_mq *request, nnb_mq *result, uint64_t polling_window_ns)
{
    nnb_client *c = mmap(NULL, sizeof(*c), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (c == MAP_FAILED) {
        nnb_mq_close(request);
        nnb_mq_close(result);
        return -ENOMEM;
    }
    int rc = madvise(c, sizeof(*c), MADV_WIPEONFORK) < 0 ? -errno : 0;
    int rc_request = nnb_channel_init(&c->request, request, 4, polling_window_ns, c->own_counters);
    int rc_result = nnb_channel_init(&c->result, result, 8, polling_window_ns, c->own_counters);
    rc = rc ? rc : rc_request ? rc_request : rc_result;
    if (!rc && !(c->packet = malloc(result->size)))
        rc = -ENOMEM;
    pthread_mutex_init(&c->lock, NULL);
    c->magic = MAGIC;
    if (rc < 0) {
        nnb_client_destroy(c);
        return rc;
    }
    *out = c;
    return 0;
}

void nnb_client_hang_up(nnb_client *c)
{
    if (c->magic != MAGIC)
        return;
    pthread_mutex_lock(&c->lock);
    nnb_channel_hang_up(&c->result);
    pthread_mutex_unlock(&c->lock);
}

int nnb_client_close(nnb_client *c)
{
    if (c->magic != MAGIC)
        return -ECHILD;
    nnb_client_hang_up(c);
    if (!nnb_cas_acquire(&c->busy, 0, CLOSING))
        return nnb_load_relaxed(&c->owner) == self() ? -EDEADLK : -EBUSY;
    pthread_mutex_lock(&c->lock);
    if (!c->closed) {
        c->closed = 1;
        nnb_channel_fini(&c->request);
        nnb_channel_fini(&c->result);
        free(c->packet);
        c->packet = NULL;
    }
    pthread_mutex_unlock(&c->lock);
    nnb_store_release(&c->busy, 0);
    return 0;
}

void nnb_client_destroy(nnb_client *c)
{
    if (!c)
        return;
    if (nnb_client_close(c) == 0)
        pthread_mutex_destroy(&c->lock);
    munmap(c, sizeof(*c));
}

void nnb_client_stats(const nnb_client *c, nnb_stats *out)
{
    const uint64_t *n = c->result.counters;
    memset(out, 0, sizeof(*out));
    if (c->magic != MAGIC)
        return;
    *out = (nnb_stats){.sent = n[NNB_REQUESTS],
                       .received = n[NNB_RESULTS],
                       .sleeps = n[NNB_SLEEPS],
                       .wakes = n[NNB_WAKES],
                       .malformed = n[NNB_MALFORMED],
                       .dropped = n[NNB_DROPPED]};
}

void nnb_client_watch(nnb_client *c, nnb_row *row)
{
    if (c->magic != MAGIC)
        return;
    c->row = row;
    c->request.counters = c->result.counters = row->counters;
    c->sampling.random = (uint32_t)((uintptr_t)c >> 12) ^ (uint32_t)nnb_now_ns();
}

void nnb_client_trace(nnb_client *c, nnb_trace *trace, uint32_t every)
{
    if (c->magic != MAGIC)
        return;
    c->trace = trace;
    c->sampling.every = c->sampling.countdown = every;
}

/* ---- execution ------------------------------------------------------------------------------------------------ */

int nnb_execution_create(nnb_execution **out, nnb_client *c, const nnb_request *request)
{
    if (c->magic != MAGIC)
        return -ECHILD;
    uint64_t n = 2ull + request->n_inputs + request->n_outputs + request->n_pools + request->n_dims;
    if (n > UINT32_MAX / NNB_DATUM_SIZE)
        return -EMSGSIZE;
    nnb_execution *e = calloc(1, sizeof(*e) + n * NNB_DATUM_SIZE);
    if (!e)
        return -ENOMEM;
    e->client = c;
    e->result.status = -1;
    int rc = nnb_wire_encode_request(request, e->packet, (uint32_t)n);
    if (rc < 0) {
        free(e);
        return rc;
    }
    e->n = (uint32_t)rc;
    *out = e;
    return 0;
}

int nnb_execution_alternate(nnb_execution *e, const nnb_request *other)
{
    uint8_t *packet = malloc((size_t)e->n * NNB_DATUM_SIZE);
    if (!packet)
        return -ENOMEM;
    int rc = nnb_wire_encode_request(other, packet, e->n);
    if (rc >= 0 && (uint32_t)rc != e->n)
        rc = -EINVAL;
    if (rc < 0) {
        free(packet);
        return rc;
    }
    free(e->other);
    e->other = packet;
    return 0;
}

uint32_t nnb_execution_turn(const nnb_execution *e) { return e->turn; }

static void pass_turn(nnb_execution *e, int status)
{
    if (status == 0 && e->other)
        e->turn = !e->turn;
}

void nnb_execution_ran_elsewhere(nnb_execution *e, int status)
{
    e->result.status = -1;
    pass_turn(e, status);
}

int nnb_execution_leave(nnb_execution *e)
{
    nnb_store32_seq_cst(&e->left, 1); /* SYNC POINT enter <-> leave */
    int rc = nnb_load_seq_cst(&e->client->busy) == (uintptr_t)e ? -EALREADY : 0;
    if (!rc && e->late && !nnb_load32_relaxed(&e->client->result.hung_up))
        rc = -EAGAIN;
    if (rc)
        nnb_execution_return(e);
    return rc;
}

void nnb_execution_return(nnb_execution *e) { nnb_store32_relaxed(&e->left, 0); }

int nnb_client_is_free(const nnb_client *c) { return !nnb_load_relaxed(&c->busy) && !c->closed; }

uint64_t nnb_execution_deadline(const nnb_execution *e) { return e->deadline_ns; }

void nnb_execution_destroy(nnb_execution *e)
{
    if (!e)
        return;
    free(e->other);
    free(e->result.shapes);
    free(e->result.dims);
    free(e);
}

void nnb_execution_set_timeout(nnb_execution *e, uint64_t timeout_ns) { e->timeout_ns = timeout_ns; }

const nnb_result *nnb_execution_result(const nnb_execution *e) { return &e->result; }

uint32_t nnb_execution_spins(const nnb_execution *e) { return nnb_channel_polls(&e->client->result) ? SPINS : 0; }

static int end(nnb_execution *e, int rc)
{
    e->waiting = 0;
    nnb_store_release(&e->client->busy, 0);
    return rc;
}

/* -EAGAIN: not now. While answers to requests that were given up are due, nothing is put beside such a request in the
 * ring: a server of another make takes all that it finds there for one packet. With the last of those answers the ring
 * is empty. */
static int send_request(nnb_execution *e)
{
    nnb_client *c = e->client;
    if (c->late) {
        int64_t room = nnb_mq_available_to_write(c->request.mq);
        if (room < 0 || (uint64_t)room < c->request.mq->capacity)
            return room < 0 ? (int)room : -EAGAIN;
    }
    if (c->row && (c->timed_ns || nnb_sample_due(&c->sampling))) {
        c->timed_ns = nnb_now_ns();
        nnb_channel_stamp(&c->request, e->n, c->timed_ns, 0);
    }
    if (e->timeout_ns && e->timeout_ns < FARTHEST_NS)
        nnb_channel_set_deadline(&c->request, e->n, e->deadline_ns);
    int rc = nnb_channel_send(&c->request, e->turn ? e->other : e->packet, e->n);
    e->sent = rc == 0;
    return rc == -EMSGSIZE ? -ENOBUFS : rc;
}

/* After anything was taken out of the result ring: a server of another make may wait for room. */
static void tell_room(nnb_client *c)
{
    nnb_fence_seq_cst(); /* SYNC POINT: publish <-> sleep */
    nnb_channel_notify_not_full(&c->result);
}

int nnb_execution_start(nnb_execution *e)
{
    nnb_client *c = e->client;
    if (c->magic != MAGIC)
        return -ECHILD;
    if (!nnb_cas_seq_cst(&c->busy, 0, (uintptr_t)e))
        return nnb_load_relaxed(&c->busy) == (uintptr_t)e ? -EALREADY : -EBUSY;
    if (nnb_load32_seq_cst(&e->left)) /* SYNC POINT enter <-> leave */
        return end(e, -ESTALE);
    if (c->closed)
        return end(e, -ESHUTDOWN);
    if (nnb_load32_acquire(&c->result.hung_up))
        return end(e, -ENOTCONN);
    if (!c->late) { /* nothing is outstanding, so whatever is there answers nothing */
        e->late = 0;
        int stray = nnb_channel_drain(&c->result);
        if (stray < 0)
            return end(e, stray);
        if (stray)
            nnb_count(c->result.counters, NNB_DROPPED, 1);
        if (stray)
            tell_room(c);
    }
    c->sampling.was_slow = c->slow;
    c->timed_ns = c->late_ns = 0;
    c->slow = 0;
    e->result.status = -1; /* until the answer of this run is here */
    e->sent = 0;
    e->deadline_ns = e->timeout_ns ? nnb_now_ns() + e->timeout_ns : 0;
    int rc = send_request(e);
    if (rc < 0 && rc != -EAGAIN)
        return end(e, rc);
    c->result.waiting = 0; /* a new wait begins */
    nnb_store_relaxed(&c->owner, self());
    e->waiting = 1;
    return 0;
}

static int grow(void **array, uint32_t *room, uint32_t need, size_t each)
{
    if (need <= *room)
        return 0;
    void *bigger = realloc(*array, need * each);
    if (!bigger)
        return -ENOMEM;
    *array = bigger;
    *room = need;
    return 0;
}

/* What stands for an answer that cannot be read. */
static int fail(nnb_execution *e)
{
    memset(&e->result, 0, offsetof(nnb_result, shapes));
    e->result.status = GENERAL_FAILURE;
    e->result.time_on_device = e->result.time_in_driver = NNB_NO_TIME;
    return GENERAL_FAILURE;
}

static int decode(nnb_execution *e, const uint8_t *packet, uint32_t n)
{
    /* n bounds every count in the packet; the common answer has no shapes and needs no room */
    if (n > 2 && (grow((void **)&e->result.shapes, &e->shapes_room, n, sizeof(nnb_shape)) < 0 ||
                  grow((void **)&e->result.dims, &e->dims_room, n, sizeof(uint32_t)) < 0))
        return -ENOMEM;
    if (nnb_wire_decode_result(packet, n, &e->result) == 0) {
        pass_turn(e, e->result.status);
        return e->result.status;
    }
    nnb_count(e->client->result.counters, NNB_MALFORMED, 1);
    return fail(e);
}
/* ---- what is timed, see watch.c --------------------------------------------------------------------------------- */

static void note_slow(nnb_client *c)
{
    if (!c->row || c->slow)
        return;
    uint64_t now = nnb_now_ns();
    c->slow = 1;
    if (c->timed_ns)
        c->looks_ns = now - c->timed_ns;
    else
        c->late_ns = now - c->looks_ns;
}

/* The answer is here. All slow runs are timed, of the quick ones one stands for many. */
static void note_answer(nnb_execution *e, int status)
{
    nnb_client *c = e->client;
    uint64_t sent = c->timed_ns ? c->timed_ns : c->late_ns, weight = 1;
    if (!c->slow)
        weight = ++c->quick;
    if (!sent)
        return;
    if (!c->slow)
        c->quick = 0;
    uint64_t now = nnb_now_ns(), taken = 0, lasted = 0;
    nnb_histogram_add(&c->row->histograms[NNB_ROUND_TRIP], now - sent, weight);
    int known = c->timed_ns && nnb_channel_is_stamped(&c->result) &&
                nnb_channel_stamp_of(&c->result, now, &taken, &lasted) && taken >= sent;
    if (known) {
        nnb_histogram_add(&c->row->histograms[NNB_QUEUE_WAIT], taken - sent, weight);
        nnb_histogram_add(&c->row->histograms[NNB_EXECUTION], lasted, weight);
    }
    if (c->trace && c->timed_ns)
        c->trace->entries[c->trace->noted++ % c->trace->room] = (nnb_trace_entry){
            .sent = sent, .taken = known ? taken : 0, .answered = known ? taken + lasted : 0, .received = now,
            .run = c->request.counters[NNB_REQUESTS], .thread = self(), .status = status};
}

/* Looks at what a receive returned. -EAGAIN: it was no answer to this request. */
static int settle(nnb_execution *e, int got)
{
    nnb_client *c = e->client;
    if (got > 0 || got == -EPROTO)
        tell_room(c);
    if (got > 0) {
        if (c->late) {
            c->late--;
            nnb_count(c->result.counters, NNB_DROPPED, 1);
            int rc = e->sent ? 0 : send_request(e);
            return rc < 0 && rc != -EAGAIN ? end(e, rc) : -EAGAIN;
        }
        int status = decode(e, c->packet, (uint32_t)got);
        if (status > 0)
            nnb_count(c->result.counters, NNB_FAILURES, 1);
        if (c->row)
            note_answer(e, status);
        return end(e, status);
    }
    if (got == -EPROTO) { /* the ring was thrown away; with late results in it one cannot tell which are still due */
        if (c->late)
            c->result.mq->corrupt = 1;
        return end(e, c->late ? -EBADMSG : fail(e));
    }
    if (got == -ETIMEDOUT) {
        if (!e->sent)
            return end(e, -ECANCELED);
        c->late++;
        e->late = 1;
        return end(e, got);
    }
    if (got == -EPIPE && !e->sent)
        return end(e, -ENOTCONN);
    return got == -EAGAIN || got == -ERESTART ? got : end(e, got);
}

int nnb_execution_try(nnb_execution *e, uint32_t spins)
{
    if (!e->waiting)
        return -EINVAL;
    int got = nnb_channel_try(&e->client->result, e->client->packet, spins);
    return got == -EAGAIN ? got : settle(e, got);
}

int nnb_execution_resume(nnb_execution *e)
{
    if (!e->waiting)
        return -EINVAL;
    note_slow(e->client);
    int rc;
    do
        rc = settle(e, nnb_channel_wait(&e->client->result, e->client->packet, e->deadline_ns));
    while (rc == -EAGAIN);
    return rc;
}

int nnb_execution_run(nnb_execution *e)
{
    int rc = nnb_execution_start(e);
    return rc < 0 ? rc : nnb_execution_resume(e);
}

void nnb_execution_abandon(nnb_execution *e)
{
    if (e->client->magic != MAGIC || !e->waiting || nnb_load_relaxed(&e->client->owner) != self())
        return;
    if (e->sent) {
        e->client->late++;
        e->late = 1;
    }
    end(e, 0);
}
