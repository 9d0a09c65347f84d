/* The server end of a burst: the loop's steps and the plan table.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * A plan is the bytes of a request packet that the executor has bound. The first guess for a request is the plan that
 * followed the last plan last time, which is right for any fixed cycle. If the guess is wrong, a hash finds the plan.
 * Only the listener thread adds plans and reads their bytes. Another thread that frees a slot drops its plans by a
 * change of their `state`. `lock` orders adding against dropping. `state` of a plan without a kernel orders nothing: a
 * client that frees a slot sends no request with this slot after the reply.
 *
 * The caller owns a kernel. If its plan is dropped during a run (RUNS), the listener finds the plan DEAD after the run,
 * and reports it to the caller. Otherwise the kernel may end at once.
 *
 * A plan is admitted to its driver-managed buffers between its look-up and its run, and leaves them before its answer
 * is sent, so that the usual case costs the interpreter nothing.
 */
#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/mman.h>

#include "nnb_server.h"

#define MAGIC 0x6e6e6273u

enum { DEAD, LIVE, RUNS }; /* states of a plan */

typedef struct plan {
    nnb_a32 state;
    uint32_t n; /* datums */
    uint32_t hash;
    int32_t measure;
    uint8_t *packet;
    const int32_t *slots; /* behind the packet's bytes; under lock */
    uint32_t n_slots;
    uint32_t next;      /* the plan that ran after this one last time */
    nnb_uses *uses;     /* driver-managed buffers, or NULL; listener thread only */
    nnb_kernel *kernel; /* or NULL; listener thread only */
    int joins;          /* its kernel has a batch */
} plan;

struct nnb_server {
    uint32_t magic;
    nnb_channel request, result;
    pthread_mutex_t lock; /* plans against nnb_server_free_slot, hang_up against destroy */
    uint64_t frees;       /* slots freed so far, under lock */

    /* listener thread only */
    uint8_t *packet; /* the request at hand, room for the whole ring */
    uint32_t n;
    uint32_t hash;
    int pending; /* a request waits for its answer */
    uint64_t frees_at_receive;
    uint64_t deadline_ns; /* of the request at hand, 0: none */
    uint64_t longest_ns;  /* maximum time of a run; 0: no limit */
    uint64_t dequeued_ns; /* 0: not measured */
    nnb_request decoded;
    int is_decoded;
    uint8_t *answer;       /* room for the whole result ring */
    uint32_t answer_n;     /* datums of the answer */
    int failed;            /* the executor's status, even if its answer did not fit */
    int keeps_failures;    /* failures are not sent any more */
    nnb_uses *admitted;    /* buffers that the request at hand was admitted to */
    plan *running;         /* plan whose kernel runs the request at hand, or ran the last one */
    int32_t kernel_status; /* status of that run */
    int was_dropped;       /* 1: its plan was dropped meanwhile */
    int idle_closed;       /* the listener has buffers to free */
    nnb_row *row;          /* or NULL: nothing is timed */
    uint64_t taken_ns;     /* when the request at hand was taken; 0: it is not timed */
    uint32_t together;     /* number of requests in its joint run */
    uint64_t weight;       /* requests since the last timed request */
    uint64_t idle_ns;      /* when the last answer was sent, if it was timed; else 0 */
    uint64_t idle_weight;
    int shares_thread; /* 1: its thread also polls for other bursts */
    uint64_t own_counters[NNB_COUNTERS];

    uint32_t n_plans, last, victim;
    plan plans[];
};

static size_t server_bytes(uint32_t n_plans) { return sizeof(struct nnb_server) + n_plans * sizeof(plan); }

/* ---- life ----------------------------------------------------------------------------------------------------- */

int nnb_server_create(nnb_server **out, nnb_mq *request, nnb_mq *result, uint64_t polling_window_ns, uint32_t max_plans)
{
    if (!max_plans || max_plans > NNB_MAX_PLANS)
        max_plans = NNB_MAX_PLANS;
    nnb_server *s = mmap(NULL, server_bytes(max_plans), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (s == MAP_FAILED) {
        nnb_mq_close(request);
        nnb_mq_close(result);
        return -ENOMEM;
    }
    int rc = madvise(s, server_bytes(max_plans), MADV_WIPEONFORK) < 0 ? -errno : 0;
    s->n_plans = max_plans;
    s->last = UINT32_MAX;
    int rc_request = nnb_channel_init(&s->request, request, 4, polling_window_ns, s->own_counters);
    int rc_result = nnb_channel_init(&s->result, result, 8, polling_window_ns, s->own_counters);
    rc = rc ? rc : rc_request ? rc_request : rc_result;
    if (!rc) {
        uint64_t room = request->capacity;
        s->packet = malloc(request->size);
        s->answer = malloc(result->size);
        s->decoded.arguments = malloc(room * sizeof(nnb_argument));
        s->decoded.dims = malloc(room * sizeof(uint32_t));
        s->decoded.pools = malloc(room * sizeof(int32_t));
        if (!s->packet || !s->answer || !s->decoded.arguments || !s->decoded.dims || !s->decoded.pools)
            rc = -ENOMEM;
    }
    pthread_mutex_init(&s->lock, NULL);
    s->magic = MAGIC;
    if (rc < 0) {
        nnb_server_destroy(s);
        return rc;
    }
    *out = s;
    return 0;
}

int nnb_server_set_bell(nnb_server *s, int bell) { return nnb_bell_copy(&s->result.bell, bell); }

void nnb_server_hang_up(nnb_server *s)
{
    if (s->magic != MAGIC)
        return;
    pthread_mutex_lock(&s->lock);
    nnb_channel_hang_up(&s->request);
    pthread_mutex_unlock(&s->lock);
}

void nnb_server_destroy(nnb_server *s)
{
    if (!s || s->magic != MAGIC) /* in a forked child the pages are wiped, so nothing in them can be freed */
        return;
    nnb_server_forgo(s);
    pthread_mutex_lock(&s->lock);
    nnb_channel_fini(&s->request);
    nnb_channel_fini(&s->result);
    pthread_mutex_unlock(&s->lock);
    pthread_mutex_destroy(&s->lock);
    for (uint32_t i = 0; i < s->n_plans; i++) {
        free(s->plans[i].packet);
        nnb_uses_destroy(s->plans[i].uses);
    }
    free(s->packet);
    free(s->answer);
    free(s->decoded.arguments);
    free(s->decoded.dims);
    free(s->decoded.pools);
    munmap(s, server_bytes(s->n_plans));
}

void nnb_server_watch(nnb_server *s, nnb_row *row)
{
    if (s->magic != MAGIC)
        return;
    s->row = row;
    s->request.counters = s->result.counters = row->counters;
}

static void count(nnb_server *s, uint32_t which) { nnb_count(s->request.counters, which, 1); }

uint64_t nnb_server_deadline(const nnb_server *s) { return s->deadline_ns; }
void nnb_server_limit_runs(nnb_server *s, uint64_t longest_ns) { s->longest_ns = longest_ns; }

int nnb_server_is_revoked(const nnb_server *s)
{
    uint64_t deadline_ns = nnb_channel_deadline(&s->request);
    return deadline_ns && nnb_now_ns() >= deadline_ns;
}

nnb_channel *nnb_server_inbox(nnb_server *s) { return &s->request; }
nnb_channel *nnb_server_outbox(nnb_server *s) { return &s->result; }

void nnb_server_share_thread(nnb_server *s) { s->shares_thread = 1; }

/* Returns 1 if a kernel ran the last request: it will probably run the next one, too. */
static int runs_kernels(const nnb_server *s) { return s->last < s->n_plans && s->plans[s->last].kernel; }

int nnb_server_joins(const nnb_server *s) { return runs_kernels(s) && s->plans[s->last].joins; }

uint32_t nnb_server_spins(const nnb_server *s)
{
    return nnb_channel_polls(&s->request) && !runs_kernels(s) ? NNB_SPINS : 0;
}

/* ---- answering ------------------------------------------------------------------------------------------------ */

/* Makes an answer of only a status. */
static void answer_status(nnb_server *s, int32_t status)
{
    nnb_result r = {.status = status, .time_on_device = NNB_NO_TIME, .time_in_driver = NNB_NO_TIME};
    s->answer_n = (uint32_t)nnb_wire_encode_result(&r, s->answer, NNB_MIN_CHANNEL);
}

/* Sends the answer, or NNB_GENERAL_FAILURE when it does not fit. */
static int send_answer(nnb_server *s)
{
    int rc = nnb_channel_send(&s->result, s->answer, s->answer_n);
    if (rc == -ENOBUFS || rc == -EMSGSIZE) {
        answer_status(s, NNB_GENERAL_FAILURE);
        rc = nnb_channel_send(&s->result, s->answer, s->answer_n);
    }
    if (rc == 0)
        nnb_channel_notify_not_full(&s->request); /* the fence of the send came after the last read */
    return rc;
}

static int send_status(nnb_server *s, int32_t status)
{
    answer_status(s, status);
    return send_answer(s);
}

static void leave_buffers(nnb_server *s, int outcome)
{
    if (s->admitted) {
        s->idle_closed |= nnb_uses_leave(s->admitted, outcome);
        s->admitted = NULL;
    }
}

void nnb_server_forgo(nnb_server *s) { leave_buffers(s, NNB_UNCHANGED); }

/* ---- timed requests, see watch.c ------------------------------------------------------------------------------- */

static void note_request(nnb_server *s)
{
    int is_stamped = nnb_channel_is_stamped(&s->request);
    s->weight++;
    s->taken_ns = 0;
    if (!is_stamped && !s->idle_ns)
        return;
    uint64_t now = nnb_now_ns(), sent, lasted, poll_ended = s->request.poll_ended;
    if (s->idle_ns) {
        uint64_t until = poll_ended == 0 ? now : poll_ended;
        nnb_histogram_add(&s->row->histograms[NNB_SPIN], until > s->idle_ns ? until - s->idle_ns : 0, s->idle_weight);
        s->idle_ns = 0;
    }
    if (is_stamped && nnb_channel_stamp_of(&s->request, now, &sent, &lasted, &s->together)) {
        s->together = 0;
        nnb_histogram_add(&s->row->histograms[NNB_QUEUE_WAIT], now - sent, s->weight);
        s->taken_ns = now;
    }
}

static void note_reply(nnb_server *s)
{
    uint64_t now = nnb_now_ns();
    nnb_histogram_add(&s->row->histograms[NNB_EXECUTION], now - s->taken_ns, s->weight);
    nnb_channel_stamp(&s->result, s->answer_n, s->taken_ns, now - s->taken_ns, s->together);
    s->idle_ns = s->shares_thread ? 0 : now;
    s->idle_weight = s->weight;
    s->weight = 0;
    s->taken_ns = 0;
}

int nnb_server_reply(nnb_server *s)
{
    if (!s->pending)
        return 0;
    s->pending = 0;
    leave_buffers(s, s->failed ? NNB_LOST : NNB_COMMITTED); /* before the answer: the next request needs them */
    if (s->failed) {
        count(s, NNB_FAILURES);
        if (s->keeps_failures)
            return 0;
    }
    if (s->taken_ns)
        note_reply(s);
    int rc = send_answer(s);
    if (!rc && s->idle_closed) {
        s->idle_closed = 0;
        return -ERESTART;
    }
    return rc;
}

int nnb_server_set_result(nnb_server *s, const nnb_result *result)
{
    if (!s->pending)
        return -EINVAL;
    nnb_result r = *result;
    if (r.status < 0 || r.status > NNB_LAST_STATUS || (r.status == NNB_OUTPUT_INSUFFICIENT_SIZE && !r.n_shapes))
        r.status = NNB_GENERAL_FAILURE;
    s->failed = r.status != 0;
    if (r.status != 0 && r.status != NNB_OUTPUT_INSUFFICIENT_SIZE)
        r.n_shapes = r.n_dims = 0;
    if (r.status != 0 || !s->dequeued_ns) {
        r.time_on_device = r.time_in_driver = NNB_NO_TIME;
    } else {
        r.time_in_driver = (nnb_now_ns() - s->dequeued_ns + 999) / 1000;
        if (r.time_on_device != NNB_NO_TIME && r.time_in_driver < r.time_on_device)
            r.time_in_driver = r.time_on_device;
    }
    int n = nnb_wire_encode_result(&r, s->answer, (uint32_t)s->result.mq->capacity);
    s->answer_n = (uint32_t)n;
    if (n < 0)
        answer_status(s, NNB_GENERAL_FAILURE);
    return 0;
}

void nnb_server_keep_failures(nnb_server *s) { s->keeps_failures = 1; }

/* ---- plans ---------------------------------------------------------------------------------------------------- */

static int matches(const nnb_server *s, const plan *p)
{
    return nnb_load32_relaxed(&p->state) == LIVE && p->n == s->n &&
           !memcmp(p->packet, s->packet, (size_t)s->n * NNB_DATUM_SIZE);
}

/* Returns a plan id for a new packet: the id of a dead plan, or else the next id in turn. */
static uint32_t choose_victim(nnb_server *s)
{
    for (uint32_t i = 0; i < s->n_plans; i++)
        if (nnb_load32_relaxed(&s->plans[i].state) == DEAD)
            return i;
    s->victim = (s->victim + 1) % s->n_plans;
    return s->victim == s->last && s->n_plans > 1 ? (s->victim = (s->victim + 1) % s->n_plans) : s->victim;
}

static void follow(nnb_server *s, uint32_t id)
{
    if (s->last < s->n_plans)
        s->plans[s->last].next = id;
    s->last = id;
}

/* Returns a plan whose kernel has adapted to the request, or NEW | a plan to replace. Under lock. */
static int adapt(nnb_server *s)
{
    for (uint32_t i = 0; i < s->n_plans; i++) {
        plan *p = &s->plans[i];
        if (nnb_load32_relaxed(&p->state) != LIVE || !p->kernel || !p->kernel->adapt || p->joins || p->n != s->n ||
            p->measure != s->decoded.measure || p->n_slots != s->decoded.n_pools ||
            memcmp(p->slots, s->decoded.pools, p->n_slots * sizeof(int32_t)) != 0)
            continue;
        int rc = p->kernel->adapt(p->kernel, &s->decoded);
        if (rc == 0) {
            memcpy(p->packet, s->packet, (size_t)s->n * NNB_DATUM_SIZE);
            p->hash = s->hash;
            return (int)i;
        }
        if (rc != -EINVAL) /* replace this plan */
            return NNB_PLAN_NEW | (int)i;
    }
    return NNB_PLAN_NEW | (int)choose_victim(s);
}

static int identify(nnb_server *s)
{
    s->is_decoded = 0;
    uint32_t guess = s->last < s->n_plans ? s->plans[s->last].next : UINT32_MAX;
    if (guess < s->n_plans && matches(s, &s->plans[guess])) {
        count(s, NNB_PLAN_HITS);
        return (int)(s->last = guess);
    }
    s->hash = nnb_wire_hash(s->packet, s->n);
    for (uint32_t i = 0; i < s->n_plans; i++)
        if (s->plans[i].hash == s->hash && matches(s, &s->plans[i])) {
            count(s, NNB_PLAN_HITS);
            follow(s, i);
            return (int)i;
        }
    if (nnb_wire_decode_request(s->packet, s->n, &s->decoded) < 0)
        return -EPROTO;
    s->is_decoded = 1;
    pthread_mutex_lock(&s->lock);
    s->frees_at_receive = s->frees;
    int id = adapt(s);
    if (id & NNB_PLAN_NEW)
        nnb_store32_relaxed(&s->plans[id & ~NNB_PLAN_NEW].state, DEAD); /* the caller will replace its callable */
    else
        follow(s, (uint32_t)id);
    pthread_mutex_unlock(&s->lock);
    count(s, id & NNB_PLAN_NEW ? NNB_PLAN_MISSES : NNB_PLAN_HITS);
    return id;
}

const nnb_request *nnb_server_request(nnb_server *s)
{
    if (!s->is_decoded) /* the plan was known, but was dropped after its look-up */
        nnb_wire_decode_request(s->packet, s->n, &s->decoded);
    s->is_decoded = 1;
    return &s->decoded;
}

int nnb_server_keep_plan(nnb_server *s, uint32_t id)
{
    if (id >= s->n_plans || !s->is_decoded)
        return -EINVAL;
    plan *p = &s->plans[id];
    size_t packet_size = (size_t)s->n * NNB_DATUM_SIZE, slots_size = s->decoded.n_pools * sizeof(int32_t);
    uint8_t *packet = malloc(packet_size + slots_size);
    if (!packet)
        return -ENOMEM;
    memcpy(packet, s->packet, packet_size);
    memcpy(packet + packet_size, s->decoded.pools, slots_size);
    pthread_mutex_lock(&s->lock);
    int rc = -ESTALE; /* a slot was freed during binding, so the plan may use a dropped memory */
    if (s->frees == s->frees_at_receive) {
        uint8_t *old = p->packet;
        p->packet = packet;
        p->slots = (const int32_t *)(const void *)(packet + packet_size);
        packet = old;
        p->n = s->n;
        p->n_slots = s->decoded.n_pools;
        p->hash = s->hash;
        p->measure = s->decoded.measure;
        nnb_uses_destroy(p->uses);
        p->uses = NULL;
        p->kernel = NULL;
        nnb_store32_relaxed(&p->state, LIVE);
        p->next = id; /* most requests are repetitions */
        follow(s, id);
        rc = 0;
    }
    pthread_mutex_unlock(&s->lock);
    free(packet);
    return rc;
}

int nnb_server_guard_plan(nnb_server *s, uint32_t id, nnb_uses *uses)
{
    if (id >= s->n_plans)
        return -EINVAL;
    nnb_uses_destroy(s->plans[id].uses);
    s->plans[id].uses = nnb_uses_share(uses);
    return 0;
}

int nnb_server_set_kernel(nnb_server *s, uint32_t id, nnb_kernel *kernel)
{
    if (id >= s->n_plans)
        return -EINVAL;
    s->plans[id].kernel = kernel;
    s->plans[id].joins = kernel->batch != NULL;
    return 0;
}

static int uses_slot(const plan *p, int32_t slot)
{
    uint32_t k = 0;
    while (k < p->n_slots && slot != NNB_ANY_SLOT && p->slots[k] != slot)
        k++;
    return k < p->n_slots;
}

int nnb_server_free_slot(nnb_server *s, int32_t slot, uint32_t *ids)
{
    int n = 0;
    if (s->magic != MAGIC)
        return 0;
    pthread_mutex_lock(&s->lock);
    s->frees += slot != NNB_ANY_SLOT;
    for (uint32_t i = 0; i < s->n_plans; i++) {
        plan *p = &s->plans[i];
        /* SYNC POINT: leave_kernel <-> free_slot */
        uint32_t was = uses_slot(p, slot) ? nnb_and32_acquire(&p->state, DEAD) : DEAD;
        if (was != DEAD)
            ids[n++] = was == RUNS ? i | NNB_PLAN_KERNEL : i;
    }
    pthread_mutex_unlock(&s->lock);
    return n;
}

/* ---- the loop's steps ----------------------------------------------------------------------------------------- */

static int admit(nnb_server *s, int id)
{
    plan *p = &s->plans[id];
    if (p->uses) {
        if (!nnb_uses_admit(p->uses))
            return id | NNB_PLAN_GUARDED;
        s->admitted = p->uses; /* the plan keeps `uses` until another plan replaces it */
    }
    if (p->kernel && nnb_cas32_relaxed(&p->state, LIVE, RUNS)) { /* else the plan was dropped after its look-up */
        s->running = p;
        return id | NNB_PLAN_KERNEL;
    }
    return id;
}

/* Handles the result of a receive. -EAGAIN: receive again. */
static int settle(nnb_server *s, int got)
{
    int id = got;
    if (got > 0) {
        s->n = (uint32_t)got;
        if (s->row)
            note_request(s);
        s->request.poll_ended = 0;
        s->deadline_ns = nnb_channel_deadline(&s->request);
        uint64_t now = s->deadline_ns || s->longest_ns ? nnb_now_ns() : 0;
        if (s->deadline_ns && now >= s->deadline_ns) {
            count(s, NNB_FAILURES); /* the client has given up the request: the answer only keeps both ends in step */
            s->taken_ns = 0;
            int rc = send_status(s, NNB_MISSED_DEADLINE);
            return rc < 0 ? rc : -EAGAIN;
        }
        if (s->longest_ns && (!s->deadline_ns || s->deadline_ns - now > s->longest_ns))
            s->deadline_ns = now + s->longest_ns;
        id = identify(s);
        if (id >= 0) {
            int measure = s->is_decoded ? s->decoded.measure : s->plans[id].measure;
            s->dequeued_ns = measure ? nnb_now_ns() : 0;
            s->pending = 1;
            s->failed = 0;
            answer_status(s, 0); /* the default, which nnb_server_set_result replaces */
            id = id & NNB_PLAN_NEW ? id : admit(s, id);
            return s->deadline_ns ? id | NNB_PLAN_TIMED : id;
        }
        count(s, NNB_MALFORMED);
    }
    if (id == -EPROTO) {
        int rc = send_status(s, NNB_GENERAL_FAILURE);
        return rc < 0 ? rc : -EAGAIN;
    }
    return id;
}

/* After a hang-up, no client takes the answers to requests in the ring. */
static int is_hung_up(nnb_server *s) { return nnb_load32_acquire(&s->request.hung_up) != 0; }

int nnb_server_try(nnb_server *s, uint32_t spins)
{
    if (is_hung_up(s))
        return -EPIPE;
    int got = nnb_channel_try(&s->request, s->packet, spins);
    return got == -EAGAIN ? got : settle(s, got);
}

static void leave_kernel(nnb_server *s)
{
    s->was_dropped = !nnb_cas32_release(&s->running->state, RUNS, LIVE); /* SYNC POINT: leave_kernel <-> free_slot */
}

nnb_kernel *nnb_server_kernel(const nnb_server *s) { return s->running->kernel; }

void nnb_server_ran_together(nnb_server *s, uint32_t n) { s->together = n; }

int nnb_server_ran(nnb_server *s, int id)
{
    s->kernel_status = 0;
    leave_kernel(s);
    return s->was_dropped ? id : -EAGAIN;
}

int nnb_server_run(nnb_server *s, int id)
{
    if (id < 0 || !(id & NNB_PLAN_KERNEL))
        return id;
    nnb_kernel *k = s->running->kernel;
    int32_t status = k->run(k, s->deadline_ns);
    if (k->result && (status == 0 || status == NNB_OUTPUT_INSUFFICIENT_SIZE)) {
        nnb_server_set_result(s, k->result(k));
        status = 0;
    }
    int is_known = (status >= 0 && status <= NNB_LAST_STATUS) || status == -ENOSPC;
    s->kernel_status = is_known ? status : NNB_GENERAL_FAILURE;
    return status ? id : nnb_server_ran(s, id); /* after a failure, the plan is left in nnb_server_outcome */
}

int nnb_server_outcome(nnb_server *s, int32_t *status, const char **sentence)
{
    *status = s->kernel_status;
    *sentence = *status ? s->running->kernel->sentence(s->running->kernel) : NULL;
    if (*status)
        leave_kernel(s);
    return s->was_dropped;
}

int nnb_server_next(nnb_server *s)
{
    if (s->magic != MAGIC)
        return -ECHILD;
    int rc = nnb_server_reply(s);
    while (rc >= 0 || rc == -EAGAIN) {
        if (is_hung_up(s))
            return -EPIPE;
        int got = -EAGAIN, is_kernels = runs_kernels(s);
        if (is_kernels && nnb_channel_polls(&s->request)) /* the caller has not looked: look without the clock */
            got = nnb_channel_try(&s->request, s->packet, NNB_SPINS);
        if (got == -EAGAIN)
            got = nnb_channel_wait(&s->request, s->packet, 0);
        if (got == -ERESTART && is_kernels) /* this thread needs no interpreter: leave it to others */
            continue;
        int id = nnb_server_run(s, settle(s, got));
        if (id != -EAGAIN)
            return id;
        rc = nnb_server_reply(s);
    }
    return rc;
}
