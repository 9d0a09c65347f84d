/* The client end of a burst: executions that are serialised once and run many times.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 *   IDLE --start--> SENT --answer--> LANDED --told--> IDLE
 *          |          `--timeout / abandon--> IDLE, and one more late result to drop
 *          `-> QUEUED: does not fit beside what is in flight --room--> SENT
 *                `--timeout / abandon / withdraw--> IDLE
 *   any --hang_up--> every call -EPIPE
 *
 * Results come in request order. `flight` has a record for each request that was sent and not answered; `queue` has
 * the requests that wait to be sent. An answer belongs to the oldest record, whose execution then lands. The record of
 * a run that was given up has no execution: its result is dropped, and so never answers another request. A result that
 * no request asked for is dropped before the next request is sent.
 *
 * Waiting: the caller of a run holds the client until its answer is there, and takes earlier answers for others. A
 * detached execution has no caller: nnb_client_land returns the next landed one, and nnb_client_arm makes the service
 * ring a bell, a socket that an event loop watches. A holder that sleeps is woken instead of the bell, and rings the
 * bell when it leaves. It also rings if one of these two functions was refused because of the holder.
 *
 * An execution may have two requests that take turns. A run that ends with NONE passes the turn before another thread
 * may run the execution. So the next run reads state from the buffer in which this run has left it.
 *
 * The endpoint is in pages that the kernel zeroes in a forked child (MADV_WIPEONFORK). There `magic` is 0 and every
 * call returns -ECHILD, without a getpid() in each run.
 */
#define _GNU_SOURCE
#include <sched.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "nnb_channel.h"

#define MAGIC 0x6e6e6263u
#define FARTHEST_NS (24ull * 3600 * 1000000000u) /* a later deadline is not sent to the service */
#define MOST_SENT 256u                           /* maximum number of requests without an answer; a power of two */

/* `busy` names the holder: the address of an execution, or only BRIEF. Other threads wait for a BRIEF holder. A holder
 * that waits for the service gets the mark WANTED instead, and rings the bell when it leaves. */
#define BRIEF 1u
#define WANTED 2u
#define HOLDER(busy) ((busy) & ~(uint64_t)(BRIEF | WANTED))

typedef struct record {
    nnb_execution *e;  /* NULL: the run was given up */
    uint32_t room;     /* maximum datums of the answer */
    int sampled;       /* see nnb_sample_due */
    uint64_t timed_ns; /* when the request was sent; 0: not timed */
    uint64_t end;      /* W after the request */
} record;

struct nnb_client {
    uint32_t magic;
    nnb_a64 busy;   /* taken with acquire, given back with release: orders the fields below between threads */
    nnb_a64 owner;  /* thread that waits for its run; 0: none */
    nnb_a32 closed; /* changed by the holder */
    int is_long, pipelined;
    int tells;               /* 1: the holder rings the bell when it leaves, not the service */
    int bell;                /* bell of this process's event loop; -1: none */
    nnb_a32 flights;         /* number of executions with `flies` */
    uint32_t late;           /* number of records without an execution */
    uint64_t owed;           /* maximum datums of the answers to all other records */
    uint64_t answered, sent; /* flight[answered % MOST_SENT] is the oldest */
    nnb_execution *queue, **queue_end;
    nnb_execution *landed, **landed_end;
    record *flight;
    nnb_row *row; /* or NULL: nothing is timed */
    nnb_sampling sampling;
    uint64_t quick;    /* runs answered at the first looks, since the last timed run of this kind */
    uint64_t looks_ns; /* time of a timed run's first looks without an answer */
    uint64_t late_ns;  /* estimated time of sending the only request in flight, if it is not timed */
    int slow;          /* the first looks at that request's answer found nothing */
    nnb_trace *trace;  /* or NULL */
    uint64_t own_counters[NNB_COUNTERS];
    uint32_t room;   /* datums of the result ring */
    uint8_t *packet; /* `room` datums */
    nnb_channel request, result;
    pthread_mutex_t lock; /* hang_up against close */
};

enum { IDLE, QUEUED, SENT, LANDED };

struct nnb_execution {
    nnb_client *client;
    uint64_t timeout_ns, deadline_ns; /* deadline_ns refers to the clock plus skipped_ns */
    nnb_a32 left;                     /* nnb_execution_leave was called */
    nnb_a32 flies;                    /* a run was started, has no waiting caller, and its end was not reported */
    int late;                         /* a run was given up and may still go on */
    int stage;
    int status;          /* LANDED: status of the result, or the error of sending */
    uint32_t place;      /* SENT: index of its record */
    uint64_t tag;        /* 0: not detached */
    nnb_execution *next; /* in the list of queued or of landed executions */
    uint32_t n, answer_n, shapes_room, dims_room;
    uint32_t windows; /* number of windows for which a wait polls */
    uint32_t turn;    /* 1: `other` is sent next */
    uint8_t *other;   /* as long as `packet`, or NULL: the same request each time */
    nnb_result result;
    uint8_t packet[];
};

static uint64_t self(void) { return (uint64_t)(uintptr_t)pthread_self(); }

static int is_closed(const nnb_client *c) { return nnb_load32_relaxed(&c->closed) != 0; }

/* ---- the holder ----------------------------------------------------------------------------------------------- */

static int holds(const nnb_execution *e) { return HOLDER(nnb_load_relaxed(&e->client->busy)) == (uintptr_t)e; }

/* -EBUSY: another holder waits for the service. `wants`: the holder shall ring the bell when it leaves. */
static int may_wait(nnb_client *c, int wants)
{
    uint64_t by = nnb_load_relaxed(&c->busy);
    if (by & BRIEF)
        sched_yield();
    else if (by && (!wants || by & WANTED || nnb_cas_relaxed(&c->busy, by, by | WANTED)))
        return -EBUSY;
    return 0;
}

/* Becomes the holder. `e`: the execution whose caller will wait, or NULL. */
static int enter(nnb_client *c, const nnb_execution *e, int wants)
{
    if (c->magic != MAGIC)
        return -ECHILD;
    while (!nnb_cas_acquire(&c->busy, 0, (uintptr_t)e | BRIEF))
        if (may_wait(c, wants) < 0)
            return -EBUSY;
    return 0;
}

static int leave(nnb_client *c, int rc);

/* Like enter, for an execution. -EALREADY: it is the holder; -ESTALE: nnb_execution_leave was called. */
static int claim(nnb_execution *e, int wants)
{
    nnb_client *c = e->client;
    if (c->magic != MAGIC)
        return -ECHILD;
    while (!nnb_cas_seq_cst(&c->busy, 0, (uintptr_t)e | BRIEF)) {
        if (holds(e))
            return -EALREADY;
        if (may_wait(c, wants) < 0)
            return -EBUSY;
    }
    return nnb_load32_seq_cst(&e->left) ? leave(c, -ESTALE) : 0; /* SYNC POINT enter <-> leave */
}

/* Clears BRIEF before the holder waits. Release: a thread that finds the holder waiting sees all earlier writes. */
static void stay(nnb_client *c)
{
    if (c->is_long)
        return;
    c->is_long = 1;
    nnb_store_release(&c->busy, HOLDER(nnb_load_relaxed(&c->busy)));
}

static void ring_own(nnb_client *c)
{
    pthread_mutex_lock(&c->lock);
    if (c->bell >= 0)
        nnb_bell_ring(c->bell);
    pthread_mutex_unlock(&c->lock);
}

static int leave(nnb_client *c, int rc)
{
    nnb_store_relaxed(&c->owner, 0);
    if (__builtin_expect(!c->is_long, 1)) {
        nnb_store_release(&c->busy, 0);
        return rc;
    }
    int tells = c->tells;
    c->is_long = c->tells = 0;
    if (nnb_swap_release(&c->busy, 0) & WANTED || tells)
        ring_own(c);
    return rc;
}

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
    c->bell = -1;
    c->queue_end = &c->queue;
    c->landed_end = &c->landed;
    if (!rc) {
        c->room = (uint32_t)result->capacity;
        c->packet = malloc(result->size);
        c->flight = malloc(MOST_SENT * sizeof(record));
        if (!c->packet || !c->flight)
            rc = -ENOMEM;
    }
    pthread_mutex_init(&c->lock, NULL);
    c->magic = MAGIC;
    if (rc < 0) {
        nnb_client_destroy(c);
        return rc;
    }
    *out = c;
    return 0;
}

int nnb_client_set_pipelined(nnb_client *c, int bell)
{
    c->pipelined = 1;
    return nnb_bell_copy(&c->bell, bell);
}

void nnb_client_hang_up(nnb_client *c)
{
    if (c->magic != MAGIC)
        return;
    pthread_mutex_lock(&c->lock);
    nnb_channel_hang_up(&c->result);
    if (c->bell >= 0)
        nnb_bell_ring(c->bell);
    pthread_mutex_unlock(&c->lock);
}

int nnb_client_close(nnb_client *c)
{
    if (c->magic != MAGIC)
        return -ECHILD;
    nnb_client_hang_up(c);
    if (enter(c, NULL, 0) < 0)
        return nnb_load_relaxed(&c->owner) == self() ? -EDEADLK : -EBUSY;
    pthread_mutex_lock(&c->lock);
    if (!is_closed(c)) {
        nnb_store32_relaxed(&c->closed, 1);
        nnb_channel_fini(&c->request);
        nnb_channel_fini(&c->result);
        free(c->packet);
        free(c->flight);
        c->packet = NULL;
        c->flight = NULL;
        if (c->bell >= 0)
            close(c->bell);
        c->bell = -1;
    }
    pthread_mutex_unlock(&c->lock);
    return leave(c, 0);
}

void nnb_client_destroy(nnb_client *c)
{
    if (!c)
        return;
    if (nnb_client_close(c) == 0)
        pthread_mutex_destroy(&c->lock);
    munmap(c, sizeof(*c));
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
    e->windows = 1;
    e->answer_n = c->room; /* a copy: the queue may be closed meanwhile */
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

int nnb_execution_resize(nnb_execution *e, const uint32_t *sizes, uint32_t n)
{
    if (e->client->magic != MAGIC)
        return -ECHILD;
    if (holds(e) || nnb_load32_relaxed(&e->flies))
        return -EALREADY;
    int rc = nnb_wire_resize_request(e->packet, sizes, n);
    return rc < 0 || !e->other ? rc : nnb_wire_resize_request(e->other, sizes, n);
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
    int rc =
        HOLDER(nnb_load_seq_cst(&e->client->busy)) == (uintptr_t)e || nnb_load32_relaxed(&e->flies) ? -EALREADY : 0;
    if (!rc && e->late && !nnb_load32_relaxed(&e->client->result.hung_up))
        rc = -EAGAIN;
    if (rc)
        nnb_execution_return(e);
    return rc;
}

void nnb_execution_return(nnb_execution *e) { nnb_store32_relaxed(&e->left, 0); }

int nnb_client_is_free(const nnb_client *c)
{
    return !nnb_load_relaxed(&c->busy) && !nnb_load32_relaxed(&c->flights) && !is_closed(c);
}

int nnb_client_is_sound(nnb_client *c)
{
    if (enter(c, NULL, 0) < 0)
        return 1; /* a run waits in the client; or in a forked child: the next run reports it */
    return leave(c, !is_closed(c) && !c->request.mq->corrupt && !c->result.mq->corrupt);
}

/* Time by which tests have advanced this process's deadlines. */
static nnb_a64 skipped_ns;

void nnb_skip_time(uint64_t ns) { nnb_add_relaxed(&skipped_ns, ns); }

uint64_t nnb_execution_deadline(const nnb_execution *e)
{
    if (!e->deadline_ns)
        return 0;
    uint64_t skipped = nnb_load_relaxed(&skipped_ns);
    return e->deadline_ns > skipped ? e->deadline_ns - skipped : 1;
}

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

void nnb_execution_set_answer(nnb_execution *e, uint32_t n) { e->answer_n = n; }

void nnb_execution_set_windows(nnb_execution *e, uint32_t n) { e->windows = n ? n : 1; }

const nnb_result *nnb_execution_result(const nnb_execution *e) { return &e->result; }

int nnb_execution_status(const nnb_execution *e) { return e->status; }

uint32_t nnb_execution_spins(const nnb_execution *e) { return nnb_channel_polls(&e->client->result) ? NNB_SPINS : 0; }

/* ---- from request to answer ------------------------------------------------------------------------------------- */

/* -EAGAIN: some requests in flight have to land first. Each answer must find room, or the server ends the burst. Other
 * implementations of a server read all datums in the ring as one packet, so they get one request at a time. */
static int send_request(nnb_execution *e)
{
    nnb_client *c = e->client;
    uint64_t flying = c->sent - c->answered;
    if (flying) {
        if (flying == MOST_SENT || (flying > c->late && c->owed + e->answer_n > c->room))
            return -EAGAIN;
        int64_t room = c->pipelined ? 0 : nnb_mq_available_to_write(c->request.mq);
        if (room < 0 || (!c->pipelined && (uint64_t)room < c->request.mq->capacity))
            return room < 0 ? (int)room : -EAGAIN;
    }
    uint64_t timed = 0;
    if (!flying) {
        c->sampling.was_slow = c->slow;
        c->late_ns = 0;
        c->slow = 0;
    }
    int sampled = c->row ? nnb_sample_due(&c->sampling) : 0;
    if (sampled) {
        timed = nnb_now_ns();
        nnb_channel_stamp(&c->request, e->n, timed, 0, 0);
    }
    uint64_t deadline_ns = e->timeout_ns < FARTHEST_NS ? nnb_execution_deadline(e) : 0;
    if (deadline_ns || c->request.deadlines)
        nnb_channel_set_deadline(&c->request, e->n, deadline_ns);
    int rc = nnb_channel_send(&c->request, e->turn ? e->other : e->packet, e->n);
    if (rc < 0) {
        if (deadline_ns)
            nnb_channel_unset_deadline(&c->request);
        return rc == -EMSGSIZE ? -ENOBUFS : rc == -ENOBUFS && flying ? -EAGAIN : rc;
    }
    c->result.peer_sleeps = c->request.peer_sleeps;
    e->place = (uint32_t)(c->sent++ % MOST_SENT);
    c->flight[e->place] = (record){e, e->answer_n, sampled, timed, c->request.mq->own_w};
    c->owed += e->answer_n;
    e->stage = SENT;
    return 0;
}

static void land(nnb_execution *e, int status)
{
    e->stage = LANDED;
    e->status = status;
    if (e->tag) {
        e->next = NULL;
        *e->client->landed_end = e;
        e->client->landed_end = &e->next;
    }
}

static void send_queued(nnb_client *c)
{
    while (c->queue) {
        nnb_execution *e = c->queue;
        int rc = send_request(e);
        if (rc == -EAGAIN)
            return;
        if (!(c->queue = e->next))
            c->queue_end = &c->queue;
        if (rc < 0)
            land(e, rc);
    }
}

/* Marks a sent request as given up: the service need not run it, but must answer. */
static void revoke_request(const nnb_execution *e)
{
    nnb_channel_revoke(&e->client->request, e->client->flight[e->place].end);
}

static void give_up(nnb_execution *e)
{
    nnb_client *c = e->client;
    if (e->stage == SENT && !is_closed(c)) {
        record *r = &c->flight[e->place];
        revoke_request(e);
        c->owed -= r->room;
        c->late++;
        r->e = NULL;
        r->room = 0;
        r->timed_ns = 0;
        e->late = 1;
    }
    if (e->stage == QUEUED) {
        nnb_execution **link = &c->queue;
        while (*link != e)
            link = &(*link)->next;
        if (!(*link = e->next))
            c->queue_end = link;
    }
}

/* Called after a read from the result ring: another implementation of a server may wait for room. */
static void tell_room(nnb_client *c)
{
    nnb_fence_seq_cst(); /* SYNC POINT: publish <-> sleep */
    nnb_channel_notify_not_full(&c->result);
}

/* Sends the request, or queues it behind others. The caller holds the client. */
static int begin(nnb_execution *e)
{
    nnb_client *c = e->client;
    if (e->stage != IDLE)
        return -EALREADY;
    if (is_closed(c))
        return -ESHUTDOWN;
    if (nnb_load32_acquire(&c->result.hung_up))
        return -ENOTCONN;
    if (!c->late)
        e->late = 0;
    if (c->sent == c->answered) { /* no request is in flight, so bytes in the ring answer none */
        int stray = nnb_channel_drain(&c->result);
        if (stray < 0)
            return stray;
        if (stray) {
            nnb_count(c->result.counters, NNB_DROPPED, 1);
            tell_room(c);
        }
    }
    e->result.status = -1; /* until this run's answer is here */
    e->tag = 0;
    e->deadline_ns = e->timeout_ns ? nnb_now_ns() + nnb_load_relaxed(&skipped_ns) + e->timeout_ns : 0;
    int rc = c->queue ? -EAGAIN : send_request(e);
    if (rc < 0 && rc != -EAGAIN)
        return rc;
    if (rc == -EAGAIN) {
        e->stage = QUEUED;
        e->next = NULL;
        *c->queue_end = e;
        c->queue_end = &e->next;
    }
    return 0;
}

static void wait_for(nnb_execution *e)
{
    nnb_client *c = e->client;
    c->result.waiting = 0; /* a new wait begins */
    nnb_store_relaxed(&c->owner, self());
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

/* Makes the result of an answer that cannot be read. */
static int fail(nnb_execution *e)
{
    memset(&e->result, 0, offsetof(nnb_result, shapes));
    e->result.status = NNB_GENERAL_FAILURE;
    e->result.time_on_device = e->result.time_in_driver = NNB_NO_TIME;
    return NNB_GENERAL_FAILURE;
}

static int decode(nnb_execution *e, const uint8_t *packet, uint32_t n)
{
    /* n bounds every count in the packet. The usual answer has no shapes and needs no room. */
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

/* ---- timed runs, see watch.c ------------------------------------------------------------------------------------ */

static void note_slow(nnb_client *c)
{
    if (!c->row || c->slow || c->sent - c->answered != 1)
        return;
    uint64_t now = nnb_now_ns(), timed = c->flight[c->answered % MOST_SENT].timed_ns;
    c->slow = 1;
    if (timed)
        c->looks_ns = now - timed;
    else
        c->late_ns = now - c->looks_ns;
}

/* Records the times of an answered run: every slow run without others in flight; of other runs, a sample. */
static void note_answer(nnb_execution *e, int sampled, uint64_t timed, int status)
{
    nnb_client *c = e->client;
    uint64_t sent = timed ? timed : c->late_ns, weight = 1;
    if (!c->slow)
        weight = ++c->quick;
    if (!sent)
        return;
    if (!c->slow)
        c->quick = 0;
    uint64_t now = nnb_now_ns(), taken = 0, lasted = 0;
    uint32_t together = 0;
    nnb_histogram_add(&c->row->histograms[NNB_ROUND_TRIP], now - sent, weight);
    int known = timed && nnb_channel_is_stamped(&c->result) &&
                nnb_channel_stamp_of(&c->result, now, &taken, &lasted, &together) && taken >= sent;
    if (known) {
        nnb_histogram_add(&c->row->histograms[NNB_QUEUE_WAIT], taken - sent, weight);
        nnb_histogram_add(&c->row->histograms[NNB_EXECUTION], lasted, weight);
    }
    if (c->trace && sampled & NNB_ITS_TURN)
        c->trace->entries[c->trace->noted++ % c->trace->room] =
            (nnb_trace_entry){.sent = sent,
                              .taken = known ? taken : 0,
                              .answered = known ? taken + lasted : 0,
                              .received = now,
                              .run = c->request.counters[NNB_REQUESTS],
                              .thread = self(),
                              .status = status,
                              .together = together};
}

/* Handles the result of a receive. 0: an answer was handled. */
static int settle(nnb_client *c, int got)
{
    uint64_t due = c->sent - c->answered;
    const record *r = &c->flight[c->answered % MOST_SENT]; /* the oldest, if any is due */
    if (got > 0 || got == -EPROTO)
        tell_room(c);
    if (got == -EPROTO) { /* the ring was emptied: if several answers were due, some may be missing */
        if (due != 1 || !r->e) {
            c->result.mq->corrupt = 1;
            return -EBADMSG;
        }
    } else if (got < 0) {
        return got;
    }
    if (!due) { /* the packet answers no request */
        nnb_count(c->result.counters, NNB_DROPPED, 1);
        return 0;
    }
    c->answered++;
    c->owed -= r->room;
    if (r->e) {
        int status = got < 0 ? fail(r->e) : decode(r->e, c->packet, (uint32_t)got);
        if (status > 0)
            nnb_count(c->result.counters, NNB_FAILURES, 1);
        if (c->row && got > 0)
            note_answer(r->e, r->sampled, r->timed_ns, status);
        land(r->e, status);
    } else {
        c->late--;
        nnb_count(c->result.counters, NNB_DROPPED, 1);
    }
    if (__builtin_expect(c->queue != NULL, 0))
        send_queued(c); /* may reuse the record */
    return 0;
}

/* ---- runs with a waiting caller --------------------------------------------------------------------------------- */

static void fly(nnb_execution *e)
{
    if (nnb_load32_relaxed(&e->flies))
        return;
    nnb_store32_relaxed(&e->flies, 1);
    nnb_store32_relaxed(&e->client->flights, nnb_load32_relaxed(&e->client->flights) + 1);
}

/* Notes that the end of the run is reported, or never will be. */
static void told(nnb_execution *e)
{
    e->stage = IDLE;
    e->tag = 0;
    if (!nnb_load32_relaxed(&e->flies))
        return;
    nnb_store32_relaxed(&e->flies, 0);
    nnb_store32_relaxed(&e->client->flights, nnb_load32_relaxed(&e->client->flights) - 1);
}

static int end(nnb_execution *e, int rc)
{
    give_up(e);
    told(e);
    return leave(e->client, rc);
}

/* 0 if the awaited execution has landed, else -EAGAIN. */
static int outcome(nnb_execution *e)
{
    if (e->stage != LANDED)
        return -EAGAIN;
    told(e);
    return leave(e->client, e->status);
}

static int start(nnb_execution *e)
{
    nnb_client *c = e->client;
    int rc = claim(e, 0);
    if (rc < 0)
        return rc;
    if (e->stage == IDLE && nnb_load32_relaxed(&c->flights)) /* this run would have to wait for those in flight */
        return leave(c, -EBUSY);
    if ((rc = begin(e)) < 0)
        return leave(c, rc);
    wait_for(e);
    return 0;
}

int nnb_execution_start(nnb_execution *e)
{
    int rc = start(e);
    if (rc == 0)
        stay(e->client);
    return rc;
}

/* Translates an error for a request that was not sent. */
static int unsent(const nnb_execution *e, int rc)
{
    return e->stage != QUEUED ? rc : rc == -ETIMEDOUT ? -ECANCELED : rc == -EPIPE ? -ENOTCONN : rc;
}

int nnb_execution_try(nnb_execution *e, uint32_t spins)
{
    nnb_client *c = e->client;
    if (!holds(e))
        return -EINVAL;
    int rc = outcome(e);
    if (rc != -EAGAIN)
        return rc;
    int got = nnb_channel_try(&c->result, c->packet, spins);
    if (got == -EAGAIN)
        return got;
    return (rc = settle(c, got)) < 0 ? end(e, unsent(e, rc)) : outcome(e);
}

/* Looks for the answer as long as an interpreter lock may be kept. Without an answer, the caller stays the holder. */
static int glance(nnb_execution *e)
{
    uint32_t spins = nnb_execution_spins(e);
    int rc = spins || e->stage == LANDED ? nnb_execution_try(e, spins) : -EAGAIN;
    if (rc == -EAGAIN)
        stay(e->client);
    return rc;
}

int nnb_execution_begin(nnb_execution *e)
{
    int rc = start(e);
    return rc < 0 ? rc : glance(e);
}

/* Receives: sleeps, or only polls until until_ns. */
static int receive(nnb_execution *e, int sleeps, uint64_t until_ns)
{
    nnb_client *c = e->client;
    int rc;
    while ((rc = outcome(e)) == -EAGAIN) {
        uint64_t deadline_ns = nnb_execution_deadline(e);
        rc = settle(c, sleeps ? nnb_channel_wait(&c->result, c->packet, deadline_ns)
                              : nnb_channel_look(&c->result, c->packet, deadline_ns, until_ns));
        if (rc == -EAGAIN || rc == -ERESTART)
            return rc;
        if (rc < 0)
            return end(e, unsent(e, rc));
    }
    return rc;
}

int nnb_execution_resume(nnb_execution *e)
{
    nnb_client *c = e->client;
    if (!holds(e))
        return -EINVAL;
    note_slow(c);
    c->result.windows = e->windows;
    if (nnb_channel_disarm(&c->result) && nnb_load32_relaxed(&c->flights))
        c->tells = 1;
    return receive(e, 1, 0);
}

int nnb_execution_run(nnb_execution *e)
{
    int rc = nnb_execution_start(e);
    return rc < 0 ? rc : nnb_execution_resume(e);
}

void nnb_execution_abandon(nnb_execution *e)
{
    nnb_client *c = e->client;
    if (c->magic == MAGIC && nnb_load_relaxed(&c->owner) == self() && holds(e))
        end(e, 0);
}

int nnb_execution_drop(nnb_execution *e)
{
    nnb_execution_abandon(e);
    int rc = enter(e->client, e, 0);
    if (rc < 0)
        return rc;
    return nnb_load32_relaxed(&e->flies) && !e->tag ? end(e, 0) : leave(e->client, 0);
}

int nnb_execution_advance(nnb_execution *started, nnb_execution *awaited)
{
    nnb_client *c = awaited->client;
    int rc = enter(c, awaited, 0);
    if (rc < 0)
        return rc;
    if (started && (rc = begin(started)) < 0)
        return leave(c, rc);
    if (started)
        fly(started);
    if (awaited->stage == IDLE)
        return leave(c, 0);
    if (is_closed(c))
        return end(awaited, -ESHUTDOWN);
    wait_for(awaited);
    return glance(awaited);
}

/* ---- runs without a waiting caller ------------------------------------------------------------------------------ */

static int detach(nnb_execution *e, uint64_t tag, int rc)
{
    e->tag = tag;
    fly(e);
    note_slow(e->client);
    return leave(e->client, rc);
}

int nnb_execution_look(nnb_execution *e, uint64_t tag, uint64_t until_ns)
{
    if (!holds(e) || !tag)
        return -EINVAL;
    e->client->result.windows = 1; /* an event loop gives one window to polling */
    int rc = receive(e, 0, until_ns);
    return rc == -EAGAIN || rc == -ERESTART ? detach(e, tag, rc) : rc;
}

int nnb_execution_launch(nnb_execution *e, uint64_t tag, uint64_t until_ns)
{
    int rc = tag ? claim(e, 1) : -EINVAL;
    if (rc < 0)
        return rc;
    if ((rc = begin(e)) < 0)
        return leave(e->client, rc);
    if (!until_ns || nnb_now_ns() >= until_ns)
        return detach(e, tag, until_ns ? -ERESTART : -EAGAIN);
    wait_for(e);
    rc = glance(e);
    return rc == -EAGAIN ? nnb_execution_look(e, tag, until_ns) : rc;
}

int nnb_execution_regain(nnb_execution *e, uint64_t tag)
{
    int rc = enter(e->client, e, 0); /* not claim: a run in flight cannot leave */
    if (rc < 0)
        return rc;
    if (e->stage != SENT || e->tag != tag || is_closed(e->client))
        return leave(e->client, -EINVAL);
    e->tag = 0;
    wait_for(e);
    return glance(e);
}

int nnb_execution_watch(nnb_execution *e, uint64_t tag, uint64_t until_ns)
{
    int rc = nnb_execution_regain(e, tag);
    return rc == -EAGAIN ? nnb_execution_look(e, tag, until_ns) : rc;
}

int nnb_execution_flies(const nnb_execution *e) { return (int)nnb_load32_relaxed(&e->flies); }

int nnb_execution_withdraw(nnb_execution *e)
{
    nnb_client *c = e->client;
    int rc = enter(c, NULL, 1);
    if (rc < 0)
        return rc;
    int over = is_closed(c) || nnb_load32_relaxed(&c->result.hung_up) || c->result.mq->corrupt;
    if (!e->tag || (e->stage != QUEUED && !over)) {
        if (e->tag && e->stage == SENT)
            revoke_request(e);
        return leave(c, -EALREADY);
    }
    give_up(e);
    told(e);
    return leave(c, 0);
}

int64_t nnb_client_land(nnb_client *c)
{
    int rc = enter(c, NULL, 1);
    if (rc < 0)
        return rc;
    nnb_execution *e;
    while (!(e = c->landed)) {
        rc = is_closed(c) ? -ESHUTDOWN : nnb_channel_try(&c->result, c->packet, 1);
        if (rc == -EAGAIN || rc == -ESHUTDOWN || (rc = settle(c, rc)) < 0)
            return leave(c, rc);
    }
    if (!(c->landed = e->next))
        c->landed_end = &c->landed;
    uint64_t tag = e->tag;
    told(e);
    return leave(c, 0), (int64_t)tag;
}

int nnb_client_arm(nnb_client *c)
{
    int rc = enter(c, NULL, 1);
    if (rc < 0)
        return rc;
    return leave(c, is_closed(c) || c->landed || nnb_channel_arm(&c->result));
}
