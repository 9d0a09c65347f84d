/* nnburst C core: burst execution over fast message queues in shared memory.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * Conventions
 *   - Functions return 0 or a count on success and a negative errno on failure.
 *   - Deadlines are absolute CLOCK_MONOTONIC nanoseconds; 0 means none.
 *   - A call that waits returns -ERESTART about every 100 ms, and at once when a signal arrives, so that an
 *     interpreter can run its signal handlers. To continue, call it again, or the function that its comment names.
 *   - Sizes are bytes, counts are elements.
 *   - Handles are not thread-safe unless the comment says so.
 */
#ifndef NNBURST_H
#define NNBURST_H

#include <stddef.h>
#include <stdint.h>

/* ---- memory_map.c ------------------------------------------------------------------------------------------- */

#define NNB_SEALS_FIXED_SIZE 0x7 /* F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW */

/* Creates a memfd of `size` zero bytes with these seals, and without the right to execute it. Returns the fd. */
int nnb_memfd_create(const char *name, uint64_t size, int seals);
int nnb_seals(int fd);             /* F_SEAL_*, or 0 when the file type has none */
int64_t nnb_fd_size(int fd);       /* size of a file, a device or a dma-buf */
int64_t nnb_fd_filesystem(int fd); /* statfs f_type */

/* A mapped range of a file. If guarded, a fault (the file was truncated, or its disk is full) maps zeros and counts. */
typedef struct nnb_mapping {
    uint8_t *addr; /* the requested first byte; `offset` need not be page-aligned */
    uint64_t size;
    void *base; /* what mmap returned, and its length */
    uint64_t length;
    int32_t guard; /* index in the guard table, -1: not guarded */
} nnb_mapping;

/* Maps `size` bytes at `offset`. prot: PROT_READ and/or PROT_WRITE. guarded: the caller must check nnb_map_faults
 * after each use. The fd is not kept. -EINVAL: size 0; -EOVERFLOW: beyond the end; or the errno of mmap. */
int nnb_map(nnb_mapping *out, int fd, uint64_t offset, uint64_t size, int prot, int guarded);
void nnb_unmap(nnb_mapping *m);
uint64_t nnb_map_faults(const nnb_mapping *m); /* faults that the guard has absorbed since nnb_map */

/* Makes whole pages read-only for this process. -EINVAL: not page-aligned; -ENOMEM. */
int nnb_make_read_only(void *address, uint64_t length);
/* Returns whole pages of private memory to the system. Each later access to them is a fault. */
int nnb_give_back(void *address, uint64_t length);

/* ---- descriptor.c ------------------------------------------------------------------------------------------- */

#define NNB_FD_MAY_BLOCK 0x40000000 /* added to the number if closing it may wait for another process */

/* Returns the process that made a pair of local stream sockets, 0 for another socket; -ENOTSOCK. */
int nnb_fd_socket_maker(int fd);
/* Closes a descriptor, given as a pointer: a destructor for cffi. If closing may block, a thread does it. A negative
 * errno in place of the descriptor is ignored. */
void nnb_fd_drop(void *fd);

/* ---- event_flag.c: a 32-bit word in shared memory, each bit a sticky notification ---------------------------- */

/* Sets the bits of `mask`, and wakes the waiters for bits that were not pending. 0: all bits were pending; else 1. */
int nnb_event_wake(uint32_t *word, uint32_t mask);

/* Consumes the pending bits of `mask` into *state, or sleeps once until one is set. 0: at least one bit; -ETIMEDOUT;
 * -EAGAIN: the word changed meanwhile; -EINTR: signal or spurious wake; -ERESTART; -EINVAL: null or mask 0. */
int nnb_event_wait(uint32_t *word, uint32_t mask, uint32_t *state, uint64_t deadline_ns);

/* Like nnb_event_wait, but continues after -EAGAIN, and returns -ERESTART for a signal. A pending bit counts even
 * after the deadline. */
int nnb_event_wait_retry(uint32_t *word, uint32_t mask, uint32_t *state, uint64_t deadline_ns);

uint64_t nnb_now_ns(void); /* CLOCK_MONOTONIC */

/* ---- message_queue.c: FMQ ----------------------------------------------------------------------------------- */

#define NNB_SYNCHRONIZED 1u   /* one writer, one reader; never loses */
#define NNB_UNSYNCHRONIZED 2u /* one writer, many readers; overwrites */

#define NNB_EVENT_NOT_FULL 1u
#define NNB_EVENT_NOT_EMPTY 2u

enum { NNB_GRANTOR_READ, NNB_GRANTOR_WRITE, NNB_GRANTOR_DATA, NNB_GRANTOR_EVENT, NNB_GRANTOR_INTENT };
#define NNB_GRANTOR_STAMP 4 /* of a synchronized queue: takes the place of the intent */
#define NNB_STAMP_BYTES 48

typedef struct nnb_grantor {
    uint32_t flags; /* always 0 */
    uint32_t fd_index;
    uint32_t offset;
    uint64_t extent;
} nnb_grantor;

/* Layouts that nnb_mq_layout can draw. Attaching accepts any layout. */
#define NNB_LAYOUT_LINES 0u   /* counters and event word on 128-byte lines of their own; the default */
#define NNB_LAYOUT_COMPAT 1u  /* the 16-byte header of libfmq */
#define NNB_LAYOUT_STAMPED 2u /* NNB_LAYOUT_LINES with room for a stamp beside W, if the queue is synchronized */

/* Fills `out` (room for 5) with the grantors of a queue in one file, and returns their number. *region_size: bytes of
 * the file, whole pages. with_event: 0 or 1 (0 only for COMPAT). -EINVAL: count or quantum 0, unknown flavour
 * or layout; -EOVERFLOW: too large for the format. */
int nnb_mq_layout(uint64_t count, uint32_t quantum, uint32_t flavour, uint32_t layout, int with_event, nnb_grantor *out,
                  uint64_t *region_size);

typedef struct nnb_mq nnb_mq;

#define NNB_MQ_RESET 1u /* set the counters to zero (sync: both; unsync: write counter) */
/* This handle is the only writer (or reader) from its first write (or read) on: it keeps its own counter in private
 * memory, and detects if a peer or another handle changes the shared one. Without this flag, handles may take turns. */
#define NNB_MQ_EXCLUSIVE 2u
#define NNB_MQ_SEALED 4u /* refuse files that could be truncated (-EPERM) */

/* Attaches to a queue of this quantum and flavour. The fds are not kept. An unsynchronized reader of read-only files
 * gets a read-only handle. -EINVAL: too few or ill-formed grantors; -EOVERFLOW: beyond the end of the file; -EPERM:
 * not sealed; or the errno of mmap. Nothing is left mapped on failure. */
int nnb_mq_open(nnb_mq **out, const nnb_grantor *grantors, uint32_t n_grantors, const int *fds, uint32_t n_fds,
                uint32_t quantum, uint32_t flavour, uint32_t options);
void nnb_mq_close(nnb_mq *q);   /* NULL is allowed */
void nnb_mq_inherit(nnb_mq *q); /* lets a forked child continue in the role of the parent's handle */

uint64_t nnb_mq_capacity(const nnb_mq *q); /* elements */
uint32_t nnb_mq_quantum(const nnb_mq *q);
int nnb_mq_is_read_only(const nnb_mq *q);
uint32_t *nnb_mq_event_word(const nnb_mq *q); /* NULL if the queue has none */
/* Shared counters, in bytes, as any peer could write them; for tests and tools. */
uint64_t *nnb_mq_write_counter(const nnb_mq *q);
uint64_t *nnb_mq_read_counter(const nnb_mq *q); /* unsynchronized: the handle's private counter */

/* Elements, or -EBADMSG when the counters are impossible (on a synchronized queue for good). */
int64_t nnb_mq_available_to_read(nnb_mq *q);
int64_t nnb_mq_available_to_write(nnb_mq *q);

typedef struct nnb_mq_region {
    uint8_t *first; /* NULL when the transaction failed */
    uint64_t first_count;
    uint8_t *second; /* ring start, after a wrap */
    uint64_t second_count;
} nnb_mq_region;

/* Zero copy. -EAGAIN: not enough room or data; -EMSGSIZE: more than the capacity; -EBADMSG: corrupt; -EOVERFLOW: an
 * unsynchronized reader was overtaken, and is now half a ring behind the writer; -EROFS: the handle is read-only. A
 * commit without a begin of at least that many is -EINVAL. */
int nnb_mq_begin_write(nnb_mq *q, uint64_t count, nnb_mq_region *tx);
int nnb_mq_commit_write(nnb_mq *q, uint64_t count);
int nnb_mq_begin_read(nnb_mq *q, uint64_t count, nnb_mq_region *tx);
int nnb_mq_commit_read(nnb_mq *q, uint64_t count);

/* Begin, copy and commit, all or nothing. No waiter is woken. 0 or the errors above. count 0 succeeds. */
int nnb_mq_write(nnb_mq *q, const void *data, uint64_t count);
int nnb_mq_read(nnb_mq *q, void *data, uint64_t count);

/* Like write and read, but wait for room or data. word: the event word; NULL: the queue's own. A read waits for the
 * bits write_notification and wakes read_notification; a write does the reverse. -ETIMEDOUT; -ERESTART; -EINVAL: no
 * word, no bits to wait for, or an unsynchronized queue; or the errors above. */
int nnb_mq_read_blocking(nnb_mq *q, void *data, uint64_t count, uint32_t read_notification, uint32_t write_notification,
                         uint64_t deadline_ns, uint32_t *word);
int nnb_mq_write_blocking(nnb_mq *q, const void *data, uint64_t count, uint32_t read_notification,
                          uint32_t write_notification, uint64_t deadline_ns, uint32_t *word);

/* ---- burst_wire.c: FmqRequestDatum / FmqResultDatum --------------------------------------------------------- */

#define NNB_DATUM_SIZE 24
#define NNB_MIN_CHANNEL 4u     /* datums of the smallest channel that is accepted */
#define NNB_MAX_CHANNEL 65536u /* datums of the largest: each end keeps room for a packet of this size */
#define NNB_NO_TIME 0xffffffffffffffffu

typedef struct nnb_argument {
    uint32_t has_no_value; /* 0 or 1 */
    uint32_t pool_index;
    uint32_t offset;
    uint32_t length;
    uint32_t rank;
    uint32_t first_dim; /* index into dims */
} nnb_argument;

typedef struct nnb_request {
    uint32_t n_inputs, n_outputs, n_pools, n_dims;
    nnb_argument *arguments; /* inputs, then outputs */
    uint32_t *dims;
    int32_t *pools;  /* slots */
    int32_t measure; /* 0 or 1 */
} nnb_request;

typedef struct nnb_shape {
    uint32_t is_sufficient;
    uint32_t rank;
    uint32_t first_dim;
} nnb_shape;

typedef struct nnb_result {
    int32_t status;
    uint32_t n_shapes, n_dims;
    nnb_shape *shapes;
    uint32_t *dims;
    uint64_t time_on_device, time_in_driver; /* microseconds or NNB_NO_TIME */
} nnb_result;

/* Serialise into `out` (room for `room` datums). Return the number of datums, or -EMSGSIZE. */
int nnb_wire_encode_request(const nnb_request *request, uint8_t *out, uint32_t room);
int nnb_wire_encode_result(const nnb_result *result, uint8_t *out, uint32_t room);

/* Parse a packet of n datums. The arrays of `out` must have room for n entries each. -EBADMSG: it breaks a rule. */
int nnb_wire_decode_request(const uint8_t *packet, uint32_t n, nnb_request *out);
int nnb_wire_decode_result(const uint8_t *packet, uint32_t n, nnb_result *out);

/* ---- watch.c: statistics that a process writes about itself ------------------------------------------------- */

enum {
    NNB_REQUESTS,    /* request packets: sent by a client, received by a server */
    NNB_RESULTS,     /* result packets */
    NNB_FAILURES,    /* results with an error status */
    NNB_SLEEPS,      /* futex waits entered */
    NNB_WAKES,       /* futex wakes called */
    NNB_MALFORMED,   /* packets refused */
    NNB_DROPPED,     /* results that came after the client gave up their requests */
    NNB_PLAN_HITS,   /* requests that were already bound */
    NNB_PLAN_MISSES, /* requests that had to be decoded and bound */
    NNB_SLOT_MISSES, /* memories that were fetched from the client */
    NNB_FALLBACKS,   /* executions without a burst */
    NNB_COMPILED,    /* models prepared from their definition */
    NNB_RESTORED,    /* models prepared from cache files */
    NNB_SAVED,       /* models saved in cache files */
    NNB_REJECTED,    /* cache files whose content is not what was saved */
    NNB_MODELS,      /* prepared models, open and closed */
    NNB_BURSTS,      /* bursts, open and closed */
    NNB_BATCHED,     /* requests that ran together with others */
    NNB_BATCHES,     /* runs of such requests */
};
enum { NNB_QUEUE_WAIT, NNB_EXECUTION, NNB_SPIN, NNB_ROUND_TRIP };
#define NNB_HISTOGRAMS 4
#ifndef NNB_BUCKETS     /* a model checker defines smaller numbers */
#define NNB_COUNTERS 20 /* room for a few more */
#define NNB_BUCKETS 528
#define NNB_LABEL 72
#endif

/* Nanoseconds. Bucket i counts durations from nnb_bucket_start(i) to below nnb_bucket_start(i + 1). */
typedef struct nnb_histogram {
    uint64_t count, sum, max;
    uint64_t buckets[NNB_BUCKETS];
} nnb_histogram;

/* A watched object. One thread at a time writes the row; any process that maps it may read it. */
typedef struct nnb_row {
    uint64_t number; /* used once in this memory; 0: the row is free */
    uint64_t parent; /* number of the row to which this row's numbers are added at its end */
    uint64_t since_ns;
    uint32_t kind;
    uint32_t client_pid;
    uint32_t client_uid;
    uint32_t has_left; /* not 0: the client awaits no more answers, but the last run has not ended */
    char label[NNB_LABEL];
    uint64_t counters[NNB_COUNTERS];
    nnb_histogram histograms[NNB_HISTOGRAMS];
} nnb_row;

/* The header of the rows. Each row begins at a multiple of row_bytes after NNB_PAGE_HEADER. */
typedef struct nnb_page {
    char magic[8]; /* NNB_PAGE_MAGIC, written last */
    uint32_t version;
    uint32_t row_bytes;
    uint32_t n_rows;
    uint32_t n_used; /* rows from this index on were never used */
    uint32_t pid;
    uint32_t reserved;
    uint64_t since_ns;
    uint64_t unwatched; /* number of objects for which no row was free */
    char name[NNB_LABEL];
} nnb_page;
#define NNB_PAGE_HEADER 4096
#define NNB_PAGE_VERSION 2

uint32_t nnb_bucket_of(uint64_t ns);
uint64_t nnb_bucket_start(uint32_t bucket);
void nnb_histogram_add(nnb_histogram *h, uint64_t ns, uint64_t weight); /* weight: number of events */
void nnb_row_count(nnb_row *row, uint32_t which, uint64_t n);
/* Copies the fields of `head` above the counters into a free row, then stores the row's number. */
void nnb_row_open(nnb_row *row, const nnb_row *head, uint64_t number);
/* Frees a row that no thread writes any more. Its counts are added to `above`, unless that is NULL. */
void nnb_row_close(nnb_row *row, nnb_row *above);
/* Copies a row into `out`, which must be zero. 0: the row is free, or was freed meanwhile. */
int nnb_row_look(nnb_row *out, const nnb_row *row);

/* Times of one run, noted at both ends. Nanoseconds of CLOCK_MONOTONIC; 0: not known. */
typedef struct nnb_trace_entry {
    uint64_t sent, taken, answered, received;
    uint64_t run; /* number of the run, from 1 */
    uint64_t thread;
    int32_t status;
    uint32_t together; /* number of requests that ran as one, 63 for more; 0: the request ran alone */
} nnb_trace_entry;

/* The last `room` timed runs. The i-th timed run, from 0, is in entries[i % room]. */
typedef struct nnb_trace {
    uint64_t noted; /* number of timed runs */
    uint64_t room;
    nnb_trace_entry *entries;
} nnb_trace;

/* ---- burst_endpoint.c: the client end of a burst ------------------------------------------------------------ */

/* One caller waits at a time; a second one gets -EBUSY. Errors of all calls: -EPIPE: the burst was hung up after the
 * request was sent; -ENOTCONN: before that; -ESHUTDOWN: closed; -ECHILD: in a forked child; -EBADMSG: corrupt for
 * good. */
typedef struct nnb_client nnb_client;

/* Takes over both queues (synchronized, exclusive, 24-byte quantum, with event word), even on failure.
 * polling_window_ns: how long a wait polls before it sleeps; 0: not at all. */
int nnb_client_create(nnb_client **out, nnb_mq *request, nnb_mq *result, uint64_t polling_window_ns);
/* Called before the first request if the peer answers any number of requests in order and rings bells
 * (nnb_client_arm). bell: a socket that this end rings for its own event loop; duplicated; -1: no socket. */
int nnb_client_set_pipelined(nnb_client *c, int bell);
void nnb_client_hang_up(nnb_client *c); /* ends every wait. Any thread, before nnb_client_destroy */
/* Unmaps the queues. Idempotent. -EBUSY: an execution is in flight, and was told to stop: try again. -EDEADLK: a
 * signal handler has interrupted this thread's own run: nnb_client_destroy will unmap the queues. */
int nnb_client_close(nnb_client *c);
void nnb_client_destroy(nnb_client *c);      /* closes and frees. NULL and a forked child are allowed */
int nnb_client_is_free(const nnb_client *c); /* 1 if no execution runs now. A hint: this may change at once */
int nnb_client_is_sound(nnb_client *c);      /* 0: closed or corrupt. A hint: 1 while another thread waits in it */
/* Counts in this row from now on. Call it before the first run. The row must outlive the client. */
void nnb_client_watch(nnb_client *c, nnb_row *row);
/* Notes each `every`-th run in the trace, which must outlive the client. Call it after nnb_client_watch, while no run
 * is in flight. */
void nnb_client_trace(nnb_client *c, nnb_trace *trace, uint32_t every);

/* A request that is serialised once and run many times. The client must outlive it. */
typedef struct nnb_execution nnb_execution;
int nnb_execution_create(nnb_execution **out, nnb_client *c, const nnb_request *request);
void nnb_execution_destroy(nnb_execution *e);
/* Adds a second request with as many datums. After each run that ends with NONE, it is the other request's turn. */
int nnb_execution_alternate(nnb_execution *e, const nnb_request *other);
/* Changes the sizes. For each argument, `sizes` has a length and as many dimensions as before. -EALREADY: it runs. */
int nnb_execution_resize(nnb_execution *e, const uint32_t *sizes, uint32_t n);
uint32_t nnb_execution_turn(const nnb_execution *e);                   /* 1: the second request is sent next */
void nnb_execution_ran_elsewhere(nnb_execution *e, int status);        /* status: of a run without the channel */
void nnb_execution_set_timeout(nnb_execution *e, uint64_t timeout_ns); /* per run; 0: none */

/* Ends the execution's use of this client: each later run here returns -ESTALE before anything is sent. Errors change
 * nothing: -EALREADY: it runs; -EAGAIN: a run was given up, and may still write. One caller at a time. */
int nnb_execution_leave(nnb_execution *e);
void nnb_execution_return(nnb_execution *e);             /* undoes nnb_execution_leave */
uint64_t nnb_execution_deadline(const nnb_execution *e); /* deadline of the last started run; 0: none */

/* For tests: brings the deadlines of all runs of this process nearer by `ns`. Waiting runs notice it after at most
 * 100 ms. */
void nnb_skip_time(uint64_t ns);

/* Runs once: send, wait, decode. Returns the status of the result (>= 0) or -EALREADY: this execution runs; -EBUSY:
 * another one runs; -ESTALE: nnb_execution_leave was called; -ETIMEDOUT: given up, a late result will be dropped;
 * -ECANCELED: the deadline passed before the request was sent; -ENOBUFS: no room in the request channel, not sent;
 * -ERESTART: call nnb_execution_resume to wait on, or nnb_execution_abandon to give up; or an error of all calls. */
int nnb_execution_run(nnb_execution *e);
int nnb_execution_resume(nnb_execution *e);
void nnb_execution_abandon(nnb_execution *e); /* does nothing unless this thread's run is in flight */
/* Steps of nnb_execution_run: start sends; try looks for the answer at most `spins` times (-EAGAIN: not there). */
int nnb_execution_start(nnb_execution *e);
int nnb_execution_try(nnb_execution *e, uint32_t spins);
/* Starts a run, and looks as long as an interpreter lock may be kept. -EAGAIN: continue with nnb_execution_resume. */
int nnb_execution_begin(nnb_execution *e);
/* Sets the maximum datums of the answer (default: the whole channel, so that no other run is in flight). Several
 * executions may be in flight. A request whose answer may not fit beside the others waits at this end, in order. */
void nnb_execution_set_answer(nnb_execution *e, uint32_t n);
void nnb_execution_set_windows(nnb_execution *e, uint32_t n); /* windows to poll before a sleep, default 1 */
/* Starts `started` (NULL: none), and waits for `awaited`, which was started by an earlier call; 0 at once if not.
 * -EALREADY: `started` is in flight; -EAGAIN: continue with nnb_execution_resume(awaited); or like run. */
int nnb_execution_advance(nnb_execution *started, nnb_execution *awaited);
/* Gives up an execution that nnb_execution_advance started. Never waits. -EBUSY: another thread waits in the burst. */
int nnb_execution_drop(nnb_execution *e);
/* Starts a run for which no caller waits. Polls for a window, but not beyond until_ns of CLOCK_MONOTONIC (0: not at
 * all). nnb_client_land will return `tag`, which is not 0. -EAGAIN: it is in flight; -ERESTART: likewise, but until_ns
 * came before the end of the window; -EBUSY: not started, because another thread waits for an answer: the bell will
 * ring when that thread is done; -EALREADY: it was in flight before; or like nnb_execution_run. */
int nnb_execution_launch(nnb_execution *e, uint64_t tag, uint64_t until_ns);
/* Continues polling for a run in flight. -EINVAL: no run with this tag is in flight; or like launch. */
int nnb_execution_watch(nnb_execution *e, uint64_t tag, uint64_t until_ns);
/* Steps of watch: regain, which looks as long as nnb_execution_begin; then look. Steps of launch: begin, then look. */
int nnb_execution_regain(nnb_execution *e, uint64_t tag);
int nnb_execution_look(nnb_execution *e, uint64_t tag, uint64_t until_ns);
int nnb_execution_flies(const nnb_execution *e); /* 1: a run was started whose end was not reported */
/* Takes back a launched run that was not sent, or any launched run if the burst is over: it will not land. -EALREADY:
 * it will land as soon as the service notices that its answer is not awaited; -EBUSY: as in launch. */
int nnb_execution_withdraw(nnb_execution *e);
/* Returns the tag of an execution that has landed; -EAGAIN: none has landed; -EBUSY: as in launch. */
int64_t nnb_client_land(nnb_client *c);
/* Makes the bell ring at the next answer that polling does not find. 1: call land first; -EBUSY: as in launch. */
int nnb_client_arm(nnb_client *c);
void nnb_bell_hush(int fd); /* reads all rings from the watched end of a bell; never waits */
/* Returns the status of the last run's result, or a negative errno if it could not be sent. */
int nnb_execution_status(const nnb_execution *e);
/* Returns the result of the last run, valid until the next run; status -1: no result came through the channel. */
const nnb_result *nnb_execution_result(const nnb_execution *e);

/* ---- buffer_admission.c: users of driver-managed buffers ------------------------------------------------------
 *
 * The state of a process's buffers and of the requests that use them. The caller owns the bytes. Any thread may call.
 * In a forked child, buffers that other threads used are free, and buffers that they wrote have lost their contents. */

#define NNB_MAX_RANK 64

typedef struct nnb_buffer nnb_buffer;
typedef struct nnb_uses nnb_uses;

/* Counts `more` events that make views stale (moved bytes, new dimensions, closing). Returns their number. */
uint64_t nnb_gate_moves(uint64_t more);

typedef struct nnb_buffer_state {
    uint64_t generation; /* number of changes of the contents */
    int32_t is_initialised;
    int32_t is_closed;
    int32_t is_idle;
} nnb_buffer_state;

int nnb_buffer_create(nnb_buffer **out); /* without contents. -ENOMEM */
void nnb_buffer_destroy(nnb_buffer *b);  /* requests that use the buffer keep it */
void nnb_buffer_look(nnb_buffer *b, nnb_buffer_state *out);
void nnb_buffer_close(nnb_buffer *b); /* admits no more users; present users continue. Idempotent */

/* The place of a buffer's contents, and their dimensions. Users read them; a user that writes may change them. */
typedef struct nnb_buffer_contents {
    uint8_t *place;
    uint64_t room; /* bytes at `place` */
    uint32_t rank, dims[NNB_MAX_RANK];
} nnb_buffer_contents;
nnb_buffer_contents *nnb_buffer_contents_of(nnb_buffer *b);
/* Sets the dimensions of contents that are being written. New dimensions count as a move. -EINVAL: too many. */
int nnb_buffer_settle(nnb_buffer *b, uint32_t rank, const int64_t *dims);

/* The buffers of one request, each at most once. -ENOMEM. */
int nnb_uses_create(nnb_uses **out, nnb_buffer *const *reading, uint32_t n_reading, nnb_buffer *const *writing,
                    uint32_t n_writing);
nnb_uses *nnb_uses_share(nnb_uses *u); /* needs one more nnb_uses_destroy */
void nnb_uses_destroy(nnb_uses *u);
/* Takes all buffers or none. 0; -ESHUTDOWN: one was closed; -EAGAIN: one was in use until the deadline (0: now). */
int nnb_uses_enter(nnb_uses *u, uint64_t deadline_ns);
/* Notes that views of the buffers, made at this number of moves, are valid until the number grows. NNB_ANYWHERE: each
 * run looks up where the contents are. */
#define NNB_ANYWHERE 0xfffffffffffffffeu
void nnb_uses_settle(nnb_uses *u, uint64_t moves);
/* If nothing has moved, no buffer is in use and all read buffers have contents, takes all buffers: 1. Else 0. */
int nnb_uses_admit(nnb_uses *u);

#define NNB_UNCHANGED 0 /* outcomes for the contents of the written buffers */
#define NNB_COMMITTED 1
#define NNB_LOST 2

/* Gives all buffers back. Returns 1 if one of them is closed and now idle, so that its bytes can be freed. */
int nnb_uses_leave(nnb_uses *u, int outcome);

/* ---- kernel.c ---------------------------------------------------------------------------------------------------
 *
 * A kernel runs a bound request any number of times, without an interpreter. The struct of its maker begins with this
 * struct. Its resources live as long as the kernel. One run at a time, each on any thread. */
typedef struct nnb_kernel nnb_kernel;
struct nnb_kernel {
    /* 0 or a positive status; -ENOSPC: a buffer needs more room, and the owner finishes the run. */
    int (*run)(nnb_kernel *k, uint64_t deadline_ns);
    const char *(*sentence)(nnb_kernel *k); /* why the last run failed, valid until the next run; NULL: unknown */
    void (*destroy)(nnb_kernel *k);         /* called by the owner, after the last run */
    struct nnb_batch *batch;                /* a batch in which the kernel may run; NULL: it runs alone */
    void *const *arguments;                 /* for the batch: places of its inputs, then outputs */
    /* NULL, or returns the outputs of the last run, which ended with 0 or NNB_OUTPUT_INSUFFICIENT_SIZE. */
    const struct nnb_result *(*result)(nnb_kernel *k);
    /* NULL, or binds the kernel to another request with the same pools. Nothing has changed after -EINVAL (more than
     * dimensions differ, or the model refuses them) and -ENOSPC (an argument needs more room). -EIO: run it no more. */
    int (*adapt)(nnb_kernel *k, const struct nnb_request *request);
};

/* Requests of one shape that run as one. Their arguments are placed one after the other. */
typedef struct nnb_batch {
    uint32_t most; /* maximum number of requests */
    uint32_t n_inputs, n_arguments;
    const uint64_t *nbytes;   /* size of each argument of one request */
    uint8_t *const *stacks;   /* for each argument, the place of all requests' values */
    nnb_kernel *const *runs;  /* runs[n] runs the first n requests, from 2 on */
    uint32_t n_failed, rests; /* failures in a row; number of next runs that are not tried */
} nnb_batch;

/* Runs 2 to `most` requests of a batch as one, one thread at a time. After failures in a row it is tried less often. */
int nnb_batch_run(nnb_kernel *const *kernels, uint32_t n, uint64_t deadline_ns);

/* The place where requests of one model wait for each other. It must be zero at first, and outlive its group. */
#define NNB_MOST_BATCHED 128
typedef struct nnb_batcher {
    uint32_t most;    /* requests that run as one, at most NNB_MOST_BATCHED */
    uint64_t wait_ns; /* maximum wait of a request */
    /* used by the leader alone */
    struct nnb_queue *queues;               /* the queues that use this batcher */
    uint32_t n_queues, n_ready, n_expected; /* queues; those with a request; those expected to have one in time */
    uint64_t since_ns, began_ns;            /* when the first request was ready; when the last joint run began */
    uint32_t held;                          /* 1 + priority of the present joint run; 0: none */
    struct nnb_batcher *next_freed;
} nnb_batcher;

int nnb_kernel_run(nnb_kernel *k, uint64_t deadline_ns);
nnb_kernel *nnb_kernel_noop(void); /* does nothing; has no owner */

/* ---- ort.c: a graph of ONNX Runtime, bound to its arguments ------------------------------------------------- */

typedef struct nnb_copy {
    void *to;
    const void *from;
    uint64_t nbytes;
    uint64_t as_bool; /* if set, bytes other than 0 become 1, and both places may be equal */
} nnb_copy;

/* Creates a kernel that makes the first n_before copies, runs the binding, and makes n_after copies after a success.
 * `api` is the library's table of functions. All arguments must outlive the kernel. -ENOMEM. */
int nnb_ort_create(nnb_kernel **out, void *const *api, void *session, void *binding, const nnb_copy *copies,
                   uint32_t n_before, uint32_t n_after);
/* Ends the present run between two nodes, and every later run before the first node. Any thread; never waits. */
void nnb_ort_cancel(nnb_kernel *k);

#define NNB_ANY_RANK UINT32_MAX

typedef struct nnb_ort_argument {
    const char *name;                     /* NULL: the request omits the argument */
    uint8_t *place;                       /* address for the library; an output of unknown dimensions is copied to it */
    uint64_t room;                        /* bytes at `place` that no other argument uses */
    const uint32_t *declared;             /* dimensions of the model, or of the buffer's description; 0: open */
    uint32_t n_declared;                  /* number of dimensions; NNB_ANY_RANK: open */
    uint32_t n_given, pool_index, offset; /* in the request: number of dimensions; place */
    int32_t element;                      /* ONNX's number of the element type */
    uint32_t element_size;
    int32_t copy;                 /* index of the copy between `place` and the client's memory; -1: none */
    int32_t value;                /* output of unknown dimensions: its index among such outputs; -1: known */
    uint32_t is_sufficient, rank; /* 1: the last run had room for it */
    int64_t dims[NNB_MAX_RANK];   /* dimensions in the request or the last run */
    nnb_buffer *buffer; /* NULL: in a pool; else the buffer determines place, room and an input's dimensions */
    int64_t growth[NNB_MAX_RANK]; /* of an output in a buffer: its dimensions minus those of the run before */
    uint32_t is_steady;           /* the growth was the same twice, and is expected again */
} nnb_ort_argument;

/* Finishes a run that ended with -ENOSPC, after the buffers got room. Returns the same as a run. */
int nnb_ort_take(nnb_kernel *k);
/* Passes the arguments, in the request's order, to the kernel, which owns them from then on. It reports outputs of
 * unknown dimensions, and, with `adapts`, adapts to other requests. `memory`, `allocator`: the library's for the CPU.
 * -ENOMEM. */
int nnb_ort_tell(nnb_kernel *k, nnb_ort_argument *arguments, uint32_t n_inputs, uint32_t n_outputs, void *memory,
                 void *allocator, int adapts);

/* ---- burst_server.c: the server end of a burst --------------------------------------------------------------
 *
 * One thread calls nnb_server_next and the functions on the request at hand. */
typedef struct nnb_server nnb_server;

#define NNB_MAX_PLANS 256
#define NNB_ANY_SLOT (-1)
#define NNB_PLAN_NEW 0x800000      /* added to the id of a packet that is seen for the first time */
#define NNB_PLAN_GUARDED 0x1000000 /* added if the plan was not admitted to its buffers: the caller takes them */
#define NNB_PLAN_KERNEL 0x2000000  /* added if the plan's kernel has run: call nnb_server_outcome */
#define NNB_PLAN_TIMED 0x4000000   /* added if the run must end by nnb_server_deadline */

/* Takes over both queues, like nnb_client_create. */
int nnb_server_create(nnb_server **out, nnb_mq *request, nnb_mq *result, uint64_t polling_window_ns,
                      uint32_t max_plans);
/* Sends the answer of the request at hand (NONE without shapes, unless nnb_server_set_result was called) and waits
 * for the next request. Answers ill-formed packets, and runs plans with a kernel. Returns the plan id, with
 * NNB_PLAN_NEW if the packet is new: read it with nnb_server_request, and keep its plan with nnb_server_keep_plan(id)
 * if that is useful. An id with NNB_PLAN_KERNEL: the run failed, or the plan was dropped meanwhile. -ERESTART: free
 * closed buffers that are idle, and call again; -EPIPE: hung up, even if the ring has requests; -EBADMSG: channel
 * corrupt; -ENOBUFS: the client takes no results. */
int nnb_server_next(nnb_server *s);
/* Steps of nnb_server_next. If try returns an id with NNB_PLAN_KERNEL, call nnb_server_run at once. It returns any
 * other id unchanged; -EAGAIN: the kernel has run, call nnb_server_next. */
int nnb_server_reply(nnb_server *s);
int nnb_server_try(nnb_server *s, uint32_t spins);
int nnb_server_run(nnb_server *s, int id);
/* Gives the outcome of the request at hand, for an id with NNB_PLAN_KERNEL: its status, and the kernel's sentence
 * (NULL: none). Call it once for each request. Returns 1 if the plan was dropped meanwhile: the kernel may end now. */
int nnb_server_outcome(nnb_server *s, int32_t *status, const char **sentence);
const nnb_request *nnb_server_request(nnb_server *s); /* the request at hand; valid until nnb_server_next */
/* Returns the deadline of the request at hand; 0: none. A request whose deadline has passed is answered in
 * nnb_server_next, with MISSED_DEADLINE_TRANSIENT. */
uint64_t nnb_server_deadline(const nnb_server *s);
/* Limits the time from taking a request to its answer. 0: only clients set limits. */
void nnb_server_limit_runs(nnb_server *s, uint64_t longest_ns);
/* Returns 1 if the client has given up the request at hand, which must be answered nevertheless. */
int nnb_server_is_revoked(const nnb_server *s);
/* Replaces the default answer, and adds the driver's time. If the channel has no room for the shapes, the status
 * becomes GENERAL_FAILURE. */
int nnb_server_set_result(nnb_server *s, const nnb_result *result);
/* Stops sending failures, because the end of the service causes them: the client will learn of this end. */
void nnb_server_keep_failures(nnb_server *s);
int nnb_server_keep_plan(nnb_server *s, uint32_t id); /* identical packets get this plan id from now on */
/* Admits the plan to its buffers before each run. The plan leaves them at its answer, with contents that are committed
 * if the status is NONE, else lost. */
int nnb_server_guard_plan(nnb_server *s, uint32_t id, nnb_uses *uses);
/* From the next request on, a kernel runs the plan, until the plan is dropped or another plan gets the id. */
int nnb_server_set_kernel(nnb_server *s, uint32_t id, nnb_kernel *kernel);
/* Gives back the buffers of the request at hand, unchanged. The function that runs it must enter them. */
void nnb_server_forgo(nnb_server *s);
/* Drops the plans that use a slot. Writes their ids (room for NNB_MAX_PLANS), with NNB_PLAN_KERNEL if the kernel runs
 * now: nnb_server_outcome reports its end. NNB_ANY_SLOT: drops all plans that use a slot; the memories remain, so a
 * plan that is being bound is kept. Returns the number of plans. Any thread. */
int nnb_server_free_slot(nnb_server *s, int32_t slot, uint32_t *ids);
/* Gives the server a socket, which is duplicated. It is rung at answers that the client awaits in an event loop. Call
 * this before the first request. */
int nnb_server_set_bell(nnb_server *s, int bell);
/* Checks that a client's socket can be a bell: -EINVAL unless it is an end of a connected pair of local stream
 * sockets and has no unread data. Afterwards nobody can send data to this socket. */
int nnb_bell_check(int fd);
void nnb_server_hang_up(nnb_server *s);             /* ends nnb_server_next with -EPIPE. Any thread, before destroy */
void nnb_server_destroy(nnb_server *s);             /* after nnb_server_next has ended for good */
void nnb_server_watch(nnb_server *s, nnb_row *row); /* like nnb_client_watch; before the first request */

/* Return how often a caller should look before it releases an interpreter lock; 0: this end never polls. */
uint32_t nnb_execution_spins(const nnb_execution *e);
uint32_t nnb_server_spins(const nnb_server *s);

/* ---- group.c: several threads serve the bursts of many clients ----------------------------------------------
 *
 * A worker is one thread's part of a group. Only that thread calls its functions. Any thread may call the others. */
typedef struct nnb_group nnb_group;
typedef struct nnb_worker nnb_worker;

#define NNB_BURST_PLANS 64 /* maximum number of plans of a server in a group */
#define NNB_MAX_BURSTS 65536
#define NNB_PRIORITIES 3          /* 0 is the highest */
#define NNB_BURST_ENDED 0x8000000 /* added to the first plan id of a burst that has ended */

/* cpus: maximum number of simultaneous runs. most_words: queues that a thread sleeps on (at most 127). -ENOMEM. */
int nnb_group_create(nnb_group **out, uint32_t cpus, uint32_t most_words);
void nnb_group_close(nnb_group *g);   /* every nnb_group_next returns -EPIPE after its present run */
void nnb_group_destroy(nnb_group *g); /* after all workers are destroyed. Allowed in a forked child */
/* Lets the workers serve a burst, until nnb_group_next has returned its NNB_BURST_ENDED and was called once more.
 * Returns the burst's number; its plan ids begin at number * NNB_BURST_PLANS. All bursts of one client share its part
 * of the processors. batcher: where requests wait at most batch_wait_ns for others, to run as one (0: do not wait, not
 * even for joint runs under way); NULL: none. It must outlive the group. -ENOMEM, -EMFILE, -ESHUTDOWN. */
int nnb_group_add(nnb_group *g, nnb_server *s, uint64_t client, uint32_t priority, nnb_batcher *batcher,
                  uint64_t batch_wait_ns);
/* Notes that the client opens no more bursts. Its account ends with its last burst. */
void nnb_group_leave(nnb_group *g, uint64_t client);
void nnb_group_wake_all(nnb_group *g);    /* lets the workers notice nnb_server_hang_up */
uint32_t nnb_group_workers(nnb_group *g); /* workers that have not been told to end */

int nnb_worker_create(nnb_worker **out, nnb_group *g);
/* The worker's unanswered request fails. If the worker leads, another one takes the lead. */
void nnb_worker_destroy(nnb_worker *w);
/* Like nnb_server_next, for the burst that is served next. Also NNB_BURST_ENDED | id: nnb_worker_ending returns the
 * reason; -EUSERS: start one more worker, then call again; -ESHUTDOWN: this worker is superfluous; -EPIPE: closed. */
int nnb_group_next(nnb_worker *w);
int nnb_worker_ending(const nnb_worker *w);
/* Steps of nnb_group_next. They return 0 or the same as nnb_group_next; -EAGAIN: call nnb_group_next. */
int nnb_group_answer(nnb_worker *w);
int nnb_group_try(nnb_worker *w, uint32_t spins);
int nnb_group_run(nnb_worker *w, int id);
int nnb_group_ran_long(const nnb_worker *w);   /* 1: the request at hand runs detached */
uint32_t nnb_group_spins(const nnb_worker *w); /* like nnb_server_spins; 0: it does not poll now */

/* ---- steps.c: one request, several steps -------------------------------------------------------------------- */

typedef struct nnb_step_argument {
    uint8_t *one;    /* value that a step works on */
    uint8_t *all;    /* values of all steps; the peer may change them at any time */
    uint64_t nbytes; /* size of one value */
    uint64_t stride; /* bytes between two values in `all`; 0: a state, which the next step reads at `all` */
} nnb_step_argument;

typedef struct nnb_steps {
    const nnb_step_argument *arguments; /* inputs first */
    uint32_t n_inputs, n;
    uint64_t count, nbytes;   /* number of steps; bytes of all arguments of one step */
    const uint32_t *gone;     /* not 0 once the client awaits no answer; NULL: unknown */
    const nnb_server *server; /* server whose request is run, or NULL */
    uint64_t deadline_ns;     /* of the request at hand; 0: none, and the next two are not used */
    uint64_t turned_ns;       /* when the present step began */
    uint64_t lasted_ns;       /* duration of the step before; not 0 before the first step */
} nnb_steps;

/* Called before each step from 0 on, and once with `count`. Copies the outputs of the step before to `all`, and the
 * inputs of `step` from `all`. 1: there is a deadline, and the step may be long, because the one before took more than
 * a millisecond. No step follows after -EPIPE (`gone`, or the client has given up the request) and -ETIMEDOUT. */
int nnb_steps_turn(nnb_steps *s, uint64_t step);
void nnb_word_raise(uint32_t *word); /* sets a word that `gone` points to */

/* ---- process_watch.c: a service must not outlive its client ------------------------------------------------- */

/* Starts a detached thread that calls _exit(0) as soon as the process of `pidfd` has ended, or the last copy of the
 * peer of the connected socket `sock_fd` is closed. -1 omits one of them. Both are duplicated. Cannot be undone.
 * -EINVAL: both are -1; -EBADF, -EMFILE, -ENOMEM, -EAGAIN: the thread could not be started. */
int nnb_exit_when_dead(int pidfd, int sock_fd);
/* Makes the kernel send this process a signal when the thread that started the process ends, even if the process is
 * stopped. An earlier end is not noticed: check getppid() afterwards. -EINVAL: no such signal. */
int nnb_signal_when_orphaned(int number);

/* ---- sandbox.c: the walls of a service process -------------------------------------------------------------- */

#define NNB_MAY_READ 1
#define NNB_MAY_WRITE 2
#define NNB_MAY_EXECUTE 4 /* for system calls: start programs */
#define NNB_MAY_CONNECT 8
#define NNB_MAY_SIGNAL 16 /* for system calls: signal any thread; Landlock restricts it to this process */

int nnb_landlock_version(void); /* 0: this kernel has no Landlock */
/* Returns a descriptor of rules that forbid all that Landlock can forbid, except TCP with MAY_CONNECT. -ENOSYS. */
int nnb_landlock_rules(uint32_t may);
/* Allows READ, WRITE or EXECUTE for a file, or for all files below a directory. `fd` may be an O_PATH descriptor. */
int nnb_landlock_allow(int rules, int fd, uint32_t may);
/* Enforces rules for ever. 1: for all threads; 0 (before version 8): for this thread and threads that it starts. */
int nnb_landlock_close(int rules);
/* Gives up all capabilities of this thread and of threads that it starts, for ever, with no_new_privs. */
int nnb_capabilities_drop(void);
/* Restricts all threads to the listed system calls, for ever. -ENOSYS: unknown processor; -EINVAL: the kernel lacks
 * the feature; -ESRCH: a thread has its own filter. */
int nnb_seccomp_close(uint32_t may);

/* ---- bench.c: the measurements that `nnburst bench` compares with all others --------------------------------
 *
 * The caller takes one clock reading per iteration: sample i is the time between its readings i and i+1.
 * warmup: iterations that are not recorded; samples: room for `count` ns. 0, -EINVAL: count 0. */

/* The caller and a server thread, each pinned to its CPU, pass one cache line to each other and back, for at most
 * 5 s. -EINVAL: a CPU that the process may not use; -ETIMEDOUT; or the errno of a failed creation. */
int nnb_bench_line(int client_cpu, int server_cpu, uint32_t warmup, uint32_t count, uint32_t *samples);
/* Measures runs of an execution on the calling thread, without a time limit. NULL: only clock readings. -EIO: a run
 * has failed. */
int nnb_bench_runs(nnb_execution *e, uint32_t count, uint32_t *samples);

#endif
