/* nnburst C core: burst execution over fast message queues in shared memory.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * Conventions
 *   - Functions return 0 or a count on success and a negative errno on failure.
 *   - Deadlines are absolute CLOCK_MONOTONIC nanoseconds; 0 means none.
 *   - A call that waits returns -ERESTART about every 100 ms, and at once when a signal arrives, so that an
 *     interpreter can run its signal handlers. Call it (or the function that its comment names) again to continue.
 *   - Sizes are bytes, counts are elements.
 *   - Handles are not thread-safe unless the comment says so.
 */
#ifndef NNBURST_H
#define NNBURST_H

#include <stddef.h>
#include <stdint.h>

/* ---- memory_map.c ------------------------------------------------------------------------------------------- */

#define NNB_SEALS_FIXED_SIZE 0x7 /* F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW */

/* Creates a memfd of `size` zero bytes with the seals, which cannot be executed. Returns the fd. */
int nnb_memfd_create(const char *name, uint64_t size, int seals);
int nnb_seals(int fd);             /* F_SEAL_*, or 0 when the file type has none */
int64_t nnb_fd_size(int fd);       /* of a file, a device or a dma-buf */
int64_t nnb_fd_filesystem(int fd); /* statfs f_type */

/* A range of a file. If guarded, a fault (a peer truncates the file, a file system is full) maps zeros and counts. */
typedef struct nnb_mapping {
    uint8_t *addr; /* first byte asked for; `offset` need not be page-aligned */
    uint64_t size;
    void *base; /* what mmap returned, and its length */
    uint64_t length;
    int32_t guard; /* index in the guard table, -1: not guarded */
} nnb_mapping;

/* Maps `size` bytes at `offset`. prot: PROT_READ and/or PROT_WRITE. guarded: the caller looks at nnb_map_faults after
 * each use. The fd may be closed afterwards. -EINVAL: size 0; -EOVERFLOW: beyond the end; or the errno of mmap. */
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
/* Closes a descriptor, given as a pointer: a destructor for cffi. A thread closes one that may block. A negative errno
 * in its place is ignored. */
void nnb_fd_drop(void *fd);

/* ---- event_flag.c: a 32-bit word in shared memory, each bit a sticky notification ---------------------------- */

/* Sets the bits of `mask`, and wakes waiters on those that were not pending: 1; 0: all were. */
int nnb_event_wake(uint32_t *word, uint32_t mask);

/* Consumes the pending bits of `mask` into *state, or sleeps once until one is set. 0: at least one bit; -ETIMEDOUT;
 * -EAGAIN: the word changed meanwhile; -EINTR: signal or spurious wake; -ERESTART; -EINVAL: null or mask 0. */
int nnb_event_wait(uint32_t *word, uint32_t mask, uint32_t *state, uint64_t deadline_ns);

/* As nnb_event_wait, but goes on after -EAGAIN, and a signal is -ERESTART. A pending bit wins over a passed
 * deadline. */
int nnb_event_wait_retry(uint32_t *word, uint32_t mask, uint32_t *state, uint64_t deadline_ns);

uint64_t nnb_now_ns(void); /* CLOCK_MONOTONIC */

/* ---- message_queue.c: FMQ ----------------------------------------------------------------------------------- */

#define NNB_SYNCHRONIZED 1u   /* one writer, one reader; never loses */
#define NNB_UNSYNCHRONIZED 2u /* one writer, many readers; overwrites */

#define NNB_EVENT_NOT_FULL 1u
#define NNB_EVENT_NOT_EMPTY 2u

enum { NNB_GRANTOR_READ, NNB_GRANTOR_WRITE, NNB_GRANTOR_DATA, NNB_GRANTOR_EVENT, NNB_GRANTOR_INTENT };
#define NNB_GRANTOR_STAMP 4 /* of a synchronized queue, in the place of the intent */
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

/* Fills `out` (room for 5) with the grantors of a queue in one file and returns how many; *region_size: bytes of that
 * file, whole pages. with_event: 0 or 1 (only COMPAT can go without). -EINVAL: count or quantum 0, unknown flavour or
 * layout; -EOVERFLOW: too large for the format. */
int nnb_mq_layout(uint64_t count, uint32_t quantum, uint32_t flavour, uint32_t layout, int with_event, nnb_grantor *out,
                  uint64_t *region_size);

typedef struct nnb_mq nnb_mq;

#define NNB_MQ_RESET 1u /* set the counters to zero (sync: both; unsync: write counter) */
/* This handle is the only writer (or reader) from its first write (or read) on: it keeps its own counter in private
 * memory, and detects a peer or another handle that changes the shared one. Without it, handles may take turns. */
#define NNB_MQ_EXCLUSIVE 2u
#define NNB_MQ_SEALED 4u /* refuse files that could be truncated (-EPERM) */

/* Attaches to a queue of that quantum and flavour. The fds are not kept. An unsynchronized reader of read-only files
 * gets a read-only handle. -EINVAL: too few or ill-formed grantors; -EOVERFLOW: beyond the end of the file; -EPERM:
 * not sealed; or the errno of mmap. Nothing is left mapped on failure. */
int nnb_mq_open(nnb_mq **out, const nnb_grantor *grantors, uint32_t n_grantors, const int *fds, uint32_t n_fds,
                uint32_t quantum, uint32_t flavour, uint32_t options);
void nnb_mq_close(nnb_mq *q);   /* NULL is fine */
void nnb_mq_inherit(nnb_mq *q); /* a forked child takes up the handle's role where the parent has left it */

uint64_t nnb_mq_capacity(const nnb_mq *q); /* elements */
uint32_t nnb_mq_quantum(const nnb_mq *q);
int nnb_mq_is_read_only(const nnb_mq *q);
uint32_t *nnb_mq_event_word(const nnb_mq *q); /* NULL if the queue has none */
/* Shared counters, in bytes, as any peer could write them; for tests and tools. */
uint64_t *nnb_mq_write_counter(const nnb_mq *q);
uint64_t *nnb_mq_read_counter(const nnb_mq *q); /* unsynchronized: the handle's private one */

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

/* As write and read, but wait for room or data. word: NULL for the queue's own. The read waits for the bits of
 * write_notification and wakes those of read_notification, the write the reverse. -ETIMEDOUT; -ERESTART; -EINVAL: no
 * word, no bits to wait for, or an unsynchronized queue; or the errors above. */
int nnb_mq_read_blocking(nnb_mq *q, void *data, uint64_t count, uint32_t read_notification, uint32_t write_notification,
                         uint64_t deadline_ns, uint32_t *word);
int nnb_mq_write_blocking(nnb_mq *q, const void *data, uint64_t count, uint32_t read_notification,
                          uint32_t write_notification, uint64_t deadline_ns, uint32_t *word);

/* ---- burst_wire.c: FmqRequestDatum / FmqResultDatum --------------------------------------------------------- */

#define NNB_DATUM_SIZE 24
#define NNB_MIN_CHANNEL 4u     /* datums of the smallest channel that is accepted */
#define NNB_MAX_CHANNEL 65536u /* and of the largest: each end keeps room for a packet that fills it */
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
    NNB_DROPPED,     /* results that came after their request had been given up */
    NNB_PLAN_HITS,   /* requests that were already bound */
    NNB_PLAN_MISSES, /* requests that had to be decoded and bound */
    NNB_SLOT_MISSES, /* memories that were fetched from the client */
    NNB_FALLBACKS,   /* executions without a burst */
    NNB_COMPILED,    /* models prepared from their definition */
    NNB_RESTORED,    /* models prepared from cache files */
    NNB_SAVED,       /* models saved in cache files */
    NNB_REJECTED,    /* cache files that were not what was saved */
    NNB_MODELS,      /* prepared models, open and closed */
    NNB_BURSTS,      /* bursts, open and closed */
    NNB_BATCHED,     /* requests that ran together with others, */
    NNB_BATCHES,     /* and in how many runs */
};
enum { NNB_QUEUE_WAIT, NNB_EXECUTION, NNB_SPIN, NNB_ROUND_TRIP };
#define NNB_HISTOGRAMS 4
#ifndef NNB_BUCKETS     /* a model checker has less of each */
#define NNB_COUNTERS 20 /* room for a few more */
#define NNB_BUCKETS 528
#define NNB_LABEL 72
#endif

/* Nanoseconds. Bucket i counts durations from nnb_bucket_start(i) to below the start of the next. */
typedef struct nnb_histogram {
    uint64_t count, sum, max;
    uint64_t buckets[NNB_BUCKETS];
} nnb_histogram;

/* One thing that is watched. One thread at a time writes it; any process that maps it may read it. */
typedef struct nnb_row {
    uint64_t number; /* never used again in its memory; 0: the row is free */
    uint64_t parent; /* number of the row that this one is added to when it ends */
    uint64_t since_ns;
    uint32_t kind;
    uint32_t client_pid;
    uint32_t client_uid;
    uint32_t has_left; /* not 0: the client awaits no more answers; the row stays until the last run ends */
    char label[NNB_LABEL];
    uint64_t counters[NNB_COUNTERS];
    nnb_histogram histograms[NNB_HISTOGRAMS];
} nnb_row;

/* Before the rows, each of which begins at a multiple of row_bytes after NNB_PAGE_HEADER. */
typedef struct nnb_page {
    char magic[8]; /* NNB_PAGE_MAGIC, written last */
    uint32_t version;
    uint32_t row_bytes;
    uint32_t n_rows;
    uint32_t n_used; /* rows from there on were never used */
    uint32_t pid;
    uint32_t reserved;
    uint64_t since_ns;
    uint64_t unwatched; /* things for which no row was free */
    char name[NNB_LABEL];
} nnb_page;
#define NNB_PAGE_HEADER 4096
#define NNB_PAGE_VERSION 2

uint32_t nnb_bucket_of(uint64_t ns);
uint64_t nnb_bucket_start(uint32_t bucket);
void nnb_histogram_add(nnb_histogram *h, uint64_t ns, uint64_t weight); /* weight: how many events it stands for */
void nnb_row_count(nnb_row *row, uint32_t which, uint64_t n);
/* Copies the fields of `head` above the counters into a free row, then its number. */
void nnb_row_open(nnb_row *row, const nnb_row *head, uint64_t number);
/* Frees a row that no thread writes any more; its numbers are added to `above`, if there is one. */
void nnb_row_close(nnb_row *row, nnb_row *above);
/* Copies a row. `out` is zero before. 0: the row is free, or changed hands meanwhile. */
int nnb_row_look(nnb_row *out, const nnb_row *row);

/* One run of a client, as both ends saw it. Nanoseconds of CLOCK_MONOTONIC; 0: not known. */
typedef struct nnb_trace_entry {
    uint64_t sent, taken, answered, received;
    uint64_t run; /* number of the run, from 1 */
    uint64_t thread;
    int32_t status;
    uint32_t together; /* requests that ran as one, 63: or more; 0: it ran alone */
} nnb_trace_entry;

/* The last `room` runs that were timed: the i-th of all, from 0, is in entries[i % room]. */
typedef struct nnb_trace {
    uint64_t noted; /* how many have been */
    uint64_t room;
    nnb_trace_entry *entries;
} nnb_trace;

/* ---- burst_endpoint.c: the client end of a burst ------------------------------------------------------------ */

/* One caller waits at a time; a second one gets -EBUSY. Errors of all calls: -EPIPE: hung up while the request was on
 * its way; -ENOTCONN: before it was sent; -ESHUTDOWN: closed; -ECHILD: in a forked child; -EBADMSG: corrupt for
 * good. */
typedef struct nnb_client nnb_client;

/* Takes over both queues (synchronized, exclusive, 24-byte quantum, with event word), also on failure.
 * polling_window_ns: how long to poll before sleeping, 0 never polls. */
int nnb_client_create(nnb_client **out, nnb_mq *request, nnb_mq *result, uint64_t polling_window_ns);
/* Tells the client, before its first request, that the peer answers any number of requests in turn and rings bells
 * (nnb_client_arm). bell: a socket that this end rings for itself; duplicated; -1: none. */
int nnb_client_set_pipelined(nnb_client *c, int bell);
void nnb_client_hang_up(nnb_client *c); /* ends every wait: the peer is gone. Any thread, before nnb_client_destroy */
/* Unmaps the queues. Idempotent. -EBUSY while an execution is in flight (it has been told to stop: try again);
 * -EDEADLK if it is this thread's own, below a signal handler: nnb_client_destroy will unmap them. */
int nnb_client_close(nnb_client *c);
void nnb_client_destroy(nnb_client *c);      /* close + free; NULL is fine; harmless in a forked child */
int nnb_client_is_free(const nnb_client *c); /* 1 if nothing runs on it now. A hint: this may change at once */
int nnb_client_is_sound(nnb_client *c);      /* 0: closed or corrupt. A hint: 1 while another thread waits in it */
/* Counts into the row from now on, before the first run. The row outlives the client's use. */
void nnb_client_watch(nnb_client *c, nnb_row *row);
/* Notes each `every`-th run in the trace, which outlives the use. After nnb_client_watch; no run is in flight. */
void nnb_client_trace(nnb_client *c, nnb_trace *trace, uint32_t every);

/* A request, serialised once, to be run many times. The client must outlive it. */
typedef struct nnb_execution nnb_execution;
int nnb_execution_create(nnb_execution **out, nnb_client *c, const nnb_request *request);
void nnb_execution_destroy(nnb_execution *e);
/* Adds a second request, of as many datums: each run that ends with NONE passes the turn to the other one. */
int nnb_execution_alternate(nnb_execution *e, const nnb_request *other);
/* Gives each argument another length, then as many dimensions as before. -EALREADY: it is running. */
int nnb_execution_resize(nnb_execution *e, const uint32_t *sizes, uint32_t n);
uint32_t nnb_execution_turn(const nnb_execution *e);                   /* 1: the second request is sent next */
void nnb_execution_ran_elsewhere(nnb_execution *e, int status);        /* a run without the channel ended so */
void nnb_execution_set_timeout(nnb_execution *e, uint64_t timeout_ns); /* per run; 0: none */

/* Moves the execution elsewhere: each later run here ends with -ESTALE before anything is sent. On an error it stays:
 * -EALREADY: it runs; -EAGAIN: a run was given up, and may still write. One caller at a time. */
int nnb_execution_leave(nnb_execution *e);
void nnb_execution_return(nnb_execution *e);             /* undoes nnb_execution_leave */
uint64_t nnb_execution_deadline(const nnb_execution *e); /* of the last run that was started; 0: none */

/* Brings the deadlines of all runs of this process nearer, for tests. Waiting runs notice it after a slice at
 * most. */
void nnb_skip_time(uint64_t ns);

/* Runs once: send, wait, decode. Returns the status of the result (>= 0) or -EALREADY: it is running; -EBUSY: another
 * one is; -ESTALE: it has left; -ETIMEDOUT: given up, a late result will be dropped; -ECANCELED: the time was over
 * before it could be sent; -ENOBUFS: no room in the request channel, nothing was sent; -ERESTART: call
 * nnb_execution_resume to continue waiting or nnb_execution_abandon to give up; or as above. */
int nnb_execution_run(nnb_execution *e);
int nnb_execution_resume(nnb_execution *e);
void nnb_execution_abandon(nnb_execution *e); /* does nothing unless this thread's run is in flight */
/* Steps of nnb_execution_run: send; look at most `spins` times (-EAGAIN if nothing came). */
int nnb_execution_start(nnb_execution *e);
int nnb_execution_try(nnb_execution *e, uint32_t spins);
/* Starts, and looks for as long as an interpreter lock may be kept. -EAGAIN: continue with nnb_execution_resume. */
int nnb_execution_begin(nnb_execution *e);
/* Sets how many datums the answer may have (default: all of the channel, so that nothing else is in flight). Several
 * executions may be in flight; one that does not fit beside the others waits in this end, in order. */
void nnb_execution_set_answer(nnb_execution *e, uint32_t n);
void nnb_execution_set_windows(nnb_execution *e, uint32_t n); /* windows to poll before a sleep, default 1 */
/* Starts the one (NULL: none) and waits for the other, which was started so before; 0 at once if it was not.
 * -EALREADY: `started` is in flight; -EAGAIN: continue with nnb_execution_resume(awaited); or as run. */
int nnb_execution_advance(nnb_execution *started, nnb_execution *awaited);
/* Gives up one that was started so, without waiting. -EBUSY: another thread waits in the burst. */
int nnb_execution_drop(nnb_execution *e);
/* Starts a run without a caller that waits: polls for a window, but not beyond that moment of CLOCK_MONOTONIC (0: not
 * at all). nnb_client_land will return `tag`, not 0. -EAGAIN: it is in flight; -ERESTART: likewise, but the moment
 * came before the window was over; -EBUSY: not started, another thread waits for an answer: the bell will ring when
 * that is over; -EALREADY: it was in flight before; or as nnb_execution_run. */
int nnb_execution_launch(nnb_execution *e, uint64_t tag, uint64_t until_ns);
/* Continues polling for one that is in flight. -EINVAL: it is not, with this tag, or has landed; or as launch. */
int nnb_execution_watch(nnb_execution *e, uint64_t tag, uint64_t until_ns);
/* Steps of launch and watch: begin, or regain, which looks as begin does; after -EAGAIN, look. */
int nnb_execution_regain(nnb_execution *e, uint64_t tag);
int nnb_execution_look(nnb_execution *e, uint64_t tag, uint64_t until_ns);
int nnb_execution_flies(const nnb_execution *e); /* 1 if it was started, and its end was not reported */
/* Takes back a launched run that was not sent yet, or any if the burst is over: it will not land. -EALREADY: it will,
 * as soon as the service finds that it is not awaited; -EBUSY: as launch. */
int nnb_execution_withdraw(nnb_execution *e);
/* Returns the tag of an execution that has landed; -EAGAIN: none has; -EBUSY: as launch. */
int64_t nnb_client_land(nnb_client *c);
/* Has the bell ring at the next answer that is not found by polling. 1: land first; -EBUSY: as launch. */
int nnb_client_arm(nnb_client *c);
void nnb_bell_hush(int fd); /* takes all rings out of a bell's other end; never waits */
/* Returns the status of the last run's result, or a negative errno if it could not be sent. */
int nnb_execution_status(const nnb_execution *e);
/* Returns the result of the last run, valid until the next; status -1 if none came through the channel. */
const nnb_result *nnb_execution_result(const nnb_execution *e);

/* ---- buffer_admission.c: users of driver-managed buffers ------------------------------------------------------
 *
 * The state of a process's buffers and of the requests that use them; their bytes are the caller's. Any thread. In a
 * forked child buffers that other threads used are free, and what they were writing is lost. */

#define NNB_MAX_RANK 64

typedef struct nnb_buffer nnb_buffer;
typedef struct nnb_uses nnb_uses;

/* Counts `more` events that make views stale (moved bytes, new dimensions, closing). Returns their number. */
uint64_t nnb_gate_moves(uint64_t more);

typedef struct nnb_buffer_state {
    uint64_t generation; /* counts changes of the contents */
    int32_t is_initialised;
    int32_t is_closed;
    int32_t is_idle;
} nnb_buffer_state;

int nnb_buffer_create(nnb_buffer **out); /* without contents. -ENOMEM */
void nnb_buffer_destroy(nnb_buffer *b);  /* requests that use it keep it */
void nnb_buffer_look(nnb_buffer *b, nnb_buffer_state *out);
void nnb_buffer_close(nnb_buffer *b); /* admits no more users; those at work continue. Idempotent */

/* Where the contents of a buffer are, and their dimensions. Its users look there; one that writes may change them. */
typedef struct nnb_buffer_contents {
    uint8_t *place;
    uint64_t room; /* bytes there */
    uint32_t rank, dims[NNB_MAX_RANK];
} nnb_buffer_contents;
nnb_buffer_contents *nnb_buffer_contents_of(nnb_buffer *b);
/* Gives the contents that are being written these dimensions; others than before count as a move. -EINVAL: too many. */
int nnb_buffer_settle(nnb_buffer *b, uint32_t rank, const int64_t *dims);

/* The buffers of one request, each at most once. -ENOMEM. */
int nnb_uses_create(nnb_uses **out, nnb_buffer *const *reading, uint32_t n_reading, nnb_buffer *const *writing,
                    uint32_t n_writing);
nnb_uses *nnb_uses_share(nnb_uses *u); /* one more nnb_uses_destroy is needed */
void nnb_uses_destroy(nnb_uses *u);
/* Takes all buffers or none. 0, -ESHUTDOWN: one was closed; -EAGAIN: one was in use until the deadline (0: now). */
int nnb_uses_enter(nnb_uses *u, uint64_t deadline_ns);
/* Notes that views made over the buffers at this number of moves are good until there are more. NNB_ANYWHERE: each
 * run looks where the contents are. */
#define NNB_ANYWHERE 0xfffffffffffffffeu
void nnb_uses_settle(nnb_uses *u, uint64_t moves);
/* Takes all buffers and returns 1, if nothing moved, nothing is in use and all that is read has contents; else 0. */
int nnb_uses_admit(nnb_uses *u);

#define NNB_UNCHANGED 0 /* what becomes of the contents of the buffers that were written */
#define NNB_COMMITTED 1
#define NNB_LOST 2

/* Gives all back. Returns 1 if one of them is closed and now idle: its bytes can be freed. */
int nnb_uses_leave(nnb_uses *u, int outcome);

/* ---- kernel.c ---------------------------------------------------------------------------------------------------
 *
 * A kernel runs a bound request without an interpreter, again and again: its maker's struct begins with this. Its
 * resources live as long as it. One run at a time, each on any thread. */
typedef struct nnb_kernel nnb_kernel;
struct nnb_kernel {
    /* 0 or a positive status; -ENOSPC: a buffer needs more room, and the owner finishes the run. */
    int (*run)(nnb_kernel *k, uint64_t deadline_ns);
    const char *(*sentence)(nnb_kernel *k); /* why the last run failed, valid until the next one; NULL: not known */
    void (*destroy)(nnb_kernel *k);         /* called by the owner, once it runs no more */
    struct nnb_batch *batch;                /* the batch that it may run in; NULL: it runs alone */
    void *const *arguments;                 /* for the batch: places of its inputs, then outputs */
    /* NULL, or returns the outputs of the last run, which ended with 0 or NNB_OUTPUT_INSUFFICIENT_SIZE. */
    const struct nnb_result *(*result)(nnb_kernel *k);
    /* NULL, or binds it to another request with the same pools. -EINVAL: it differs in more than dimensions, or does
     * not fit the model; -ENOSPC: an argument needs more room: nothing has changed. -EIO: run it no more. */
    int (*adapt)(nnb_kernel *k, const struct nnb_request *request);
};

/* Requests of one shape that run as one: their arguments are put one behind the other. */
typedef struct nnb_batch {
    uint32_t most; /* requests */
    uint32_t n_inputs, n_arguments;
    const uint64_t *nbytes;   /* of each argument of one request, */
    uint8_t *const *stacks;   /* and where those of all lie */
    nnb_kernel *const *runs;  /* runs[n] runs the first n of them, from 2 on */
    uint32_t n_failed, rests; /* failures in a row; runs that are not tried after them */
} nnb_batch;

/* Runs 2 to `most` requests of one batch, one thread at a time. The more often it fails, the less often it is
 * tried. */
int nnb_batch_run(nnb_kernel *const *kernels, uint32_t n, uint64_t deadline_ns);

/* The place where requests of one model wait for each other. Zero at first; outlives its group. */
#define NNB_MOST_BATCHED 128
typedef struct nnb_batcher {
    uint32_t most;    /* requests that run as one, at most NNB_MOST_BATCHED */
    uint64_t wait_ns; /* the longest wait of a request */
    /* used by the leader alone */
    struct nnb_queue *queues;               /* that have it, */
    uint32_t n_queues, n_ready, n_expected; /* ... with a request, ... or perhaps before the wait is over */
    uint64_t since_ns, began_ns;            /* the first has been ready; the last ones that ran together were taken */
    uint32_t held;                          /* 1 + the priority of those that a worker runs together; 0: none */
    struct nnb_batcher *next_freed;
} nnb_batcher;

int nnb_kernel_run(nnb_kernel *k, uint64_t deadline_ns);
nnb_kernel *nnb_kernel_noop(void); /* does nothing; has no owner */

/* ---- ort.c: a graph of ONNX Runtime, bound to its arguments ------------------------------------------------- */

typedef struct nnb_copy {
    void *to;
    const void *from;
    uint64_t nbytes;
    uint64_t as_bool; /* bytes other than 0 become 1; then both may be the same memory */
} nnb_copy;

/* A kernel that makes some copies, runs the binding, and makes the others if that has succeeded. `api` is the
 * library's table of functions. What is given has to outlive the kernel. -ENOMEM. */
int nnb_ort_create(nnb_kernel **out, void *const *api, void *session, void *binding, const nnb_copy *copies,
                   uint32_t n_before, uint32_t n_after);
/* Ends its present run between two nodes, and every later one before the first. Any thread; never waits. */
void nnb_ort_cancel(nnb_kernel *k);

#define NNB_ANY_RANK UINT32_MAX

typedef struct nnb_ort_argument {
    const char *name;         /* NULL: the request leaves it out */
    uint8_t *place;           /* where the library has it, or an output of unknown dimensions is copied to */
    uint64_t room;            /* bytes there, which no other argument has */
    const uint32_t *declared; /* dimensions in the model, or that the buffer was made with, 0: open */
    uint32_t n_declared;      /* NNB_ANY_RANK: their number is open, too */
    uint32_t n_given, pool_index, offset; /* in the request: dimensions, and where it lies */
    int32_t element;                      /* its type, as ONNX counts them, */
    uint32_t element_size;
    int32_t copy;  /* of the kernel's copies, the one between `place` and the client's memory; -1: none */
    int32_t value; /* an output of unknown dimensions: which one of those that the library has; -1: known */
    uint32_t is_sufficient, rank; /* whether there was room for it in the last run */
    int64_t dims[NNB_MAX_RANK];   /* of the request, or the last run */
    nnb_buffer *buffer; /* NULL: it lies in a pool; else place, room and an input's dimensions are the buffer's */
    int64_t growth[NNB_MAX_RANK]; /* of an output in a buffer: its dimensions less those of the run before, */
    uint32_t is_steady;           /* twice the same: so it is expected again */
} nnb_ort_argument;

/* Finishes a run that ended with -ENOSPC, now that the buffers have room; returns as a run. */
int nnb_ort_take(nnb_kernel *k);
/* Gives the kernel its arguments, in the request's order, to own and to change. It then reports unknown dimensions of
 * outputs, and adapts to other requests if `adapts`. `memory`, `allocator`: the library's, for the processor.
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
#define NNB_PLAN_GUARDED 0x1000000 /* added if the plan has buffers and was not admitted: enter and leave by hand */
#define NNB_PLAN_KERNEL 0x2000000  /* added if the plan's kernel has run: look at nnb_server_outcome */
#define NNB_PLAN_TIMED 0x4000000   /* added if the run has to end by nnb_server_deadline */

/* Takes over both queues, as nnb_client_create does. */
int nnb_server_create(nnb_server **out, nnb_mq *request, nnb_mq *result, uint64_t polling_window_ns,
                      uint32_t max_plans);
/* Sends the answer of the request at hand (NONE without shapes, unless nnb_server_set_result was called) and waits
 * for the next one. Ill-formed packets are answered here, and plans with a kernel are run here. Returns the plan id,
 * with NNB_PLAN_NEW if the packet is new: then read it with nnb_server_request and, if it is worth it,
 * nnb_server_keep_plan(id). An id with NNB_PLAN_KERNEL: the run failed, or the plan was dropped meanwhile. -ERESTART:
 * call again, and free closed buffers that are idle; -EPIPE: hung up, whatever is in the ring; -EBADMSG: channel
 * corrupt; -ENOBUFS: the client takes no results. */
int nnb_server_next(nnb_server *s);
/* Steps of nnb_server_next. An id with NNB_PLAN_KERNEL that try returns has to be run at once; -EAGAIN: it ran, call
 * nnb_server_next. Any other id is returned as it is. */
int nnb_server_reply(nnb_server *s);
int nnb_server_try(nnb_server *s, uint32_t spins);
int nnb_server_run(nnb_server *s, int id);
/* Gives the outcome of the request at hand, for an id with NNB_PLAN_KERNEL: its status, and the kernel's sentence
 * (NULL: none). Call it once for each. Returns 1 if its plan was dropped meanwhile: the kernel may end now. */
int nnb_server_outcome(nnb_server *s, int32_t *status, const char **sentence);
const nnb_request *nnb_server_request(nnb_server *s); /* the request at hand; valid until nnb_server_next */
/* Returns the deadline of the request at hand; 0: none. A request whose deadline has passed is answered in
 * nnb_server_next, with MISSED_DEADLINE_TRANSIENT. */
uint64_t nnb_server_deadline(const nnb_server *s);
/* Sets the time within which each request has to be answered after it was taken. 0: no limit of the server's own. */
void nnb_server_limit_runs(nnb_server *s, uint64_t longest_ns);
/* 1 if the client has given up the request at hand, which has to be answered all the same. */
int nnb_server_is_revoked(const nnb_server *s);
/* Replaces the default answer. The driver's time is filled in here. Too many shapes for the channel:
 * GENERAL_FAILURE. */
int nnb_server_set_result(nnb_server *s, const nnb_result *result);
/* Keeps failures from being answered: the client learns of the service's end, which causes them. */
void nnb_server_keep_failures(nnb_server *s);
int nnb_server_keep_plan(nnb_server *s, uint32_t id); /* an identical packet has this plan id from now on */
/* Has the plan admitted to its buffers before it is run. It leaves them when it is answered: committed if the status
 * is NONE, else lost. */
int nnb_server_guard_plan(nnb_server *s, uint32_t id, nnb_uses *uses);
/* Has a kernel run the plan after the request at hand, until another plan has the id or it is dropped. */
int nnb_server_set_kernel(nnb_server *s, uint32_t id, nnb_kernel *kernel);
/* Leaves the buffers of the request at hand as they are; its runner has to enter them. */
void nnb_server_forgo(nnb_server *s);
/* Drops the plans that use a slot and writes their ids (room for NNB_MAX_PLANS), with NNB_PLAN_KERNEL if the kernel
 * runs at the moment: nnb_server_outcome says when it has ended. NNB_ANY_SLOT: all that use one; the memories stay,
 * so a plan that is being bound meanwhile is kept. Returns how many. Any thread. */
int nnb_server_free_slot(nnb_server *s, int32_t slot, uint32_t *ids);
/* Gives the server a socket, which is duplicated, to ring at answers that the client awaits in an event loop. Before the
 * first request. */
int nnb_server_set_bell(nnb_server *s, int bell);
/* Checks that a client's socket can be a bell: -EINVAL unless it is an end of a connected pair of local stream
 * sockets and nothing waits in it. After that nothing can be sent to it. */
int nnb_bell_check(int fd);
void nnb_server_hang_up(nnb_server *s);             /* ends nnb_server_next with -EPIPE. Any thread, before destroy */
void nnb_server_destroy(nnb_server *s);             /* after nnb_server_next has ended for good */
void nnb_server_watch(nnb_server *s, nnb_row *row); /* as nnb_client_watch; before the first request */

/* Return how often try is worth calling before releasing an interpreter lock; 0 if this end never polls. */
uint32_t nnb_execution_spins(const nnb_execution *e);
uint32_t nnb_server_spins(const nnb_server *s);

/* ---- group.c: several threads serve the bursts of many clients ----------------------------------------------
 *
 * A worker is one thread's part of a group; only that thread calls the functions on it. The rest: any thread. */
typedef struct nnb_group nnb_group;
typedef struct nnb_worker nnb_worker;

#define NNB_BURST_PLANS 64 /* plans that a server in a group may have at most */
#define NNB_MAX_BURSTS 65536
#define NNB_PRIORITIES 3          /* 0 is the highest */
#define NNB_BURST_ENDED 0x8000000 /* added to the first id of a burst whose burst is over */

/* cpus: runs under way at a time. most_words: queues that a thread sleeps on (at most 127). -ENOMEM. */
int nnb_group_create(nnb_group **out, uint32_t cpus, uint32_t most_words);
void nnb_group_close(nnb_group *g);   /* every nnb_group_next ends with -EPIPE, once its present run is over */
void nnb_group_destroy(nnb_group *g); /* after all workers are destroyed. Harmless in a forked child */
/* Has the workers serve a burst, until nnb_group_next has returned its NNB_BURST_ENDED and was called once more.
 * Returns its number: its plans have the ids from number * NNB_BURST_PLANS on. Requests of one client share what it
 * gets, until it leaves. batcher: NULL, or where its requests wait so long for others, to run together with them (0:
 * neither for these nor for those that run so); outlives the group. -ENOMEM, -EMFILE, -ESHUTDOWN. */
int nnb_group_add(nnb_group *g, nnb_server *s, uint64_t client, uint32_t priority, nnb_batcher *batcher,
                  uint64_t batch_wait_ns);
/* Notes that the client opens no other burst. Its account is forgotten with its last one. */
void nnb_group_leave(nnb_group *g, uint64_t client);
void nnb_group_wake_all(nnb_group *g);    /* has the workers look, after nnb_server_hang_up */
uint32_t nnb_group_workers(nnb_group *g); /* workers that have not been told to end */

int nnb_worker_create(nnb_worker **out, nnb_group *g);
/* A request that it has not answered fails; if it leads, another worker takes the lead. */
void nnb_worker_destroy(nnb_worker *w);
/* As nnb_server_next, for the burst that is served next. Also NNB_BURST_ENDED | id: then nnb_worker_ending says why;
 * -EUSERS: start one more worker, then call again; -ESHUTDOWN: this worker is not needed any more; -EPIPE: closed. */
int nnb_group_next(nnb_worker *w);
int nnb_worker_ending(const nnb_worker *w);
/* Steps of nnb_group_next: 0 or what it returns; -EAGAIN: call nnb_group_next. */
int nnb_group_answer(nnb_worker *w);
int nnb_group_try(nnb_worker *w, uint32_t spins);
int nnb_group_run(nnb_worker *w, int id);
int nnb_group_ran_long(const nnb_worker *w);   /* the request at hand, beside the others */
uint32_t nnb_group_spins(const nnb_worker *w); /* 0: this worker does not poll now */

/* ---- steps.c: one request, several steps -------------------------------------------------------------------- */

typedef struct nnb_step_argument {
    uint8_t *one;    /* what a step works on */
    uint8_t *all;    /* those of all steps; the peer may change them at any time */
    uint64_t nbytes; /* of one */
    uint64_t stride; /* from one to the next of all; 0: a state, which the next step reads there */
} nnb_step_argument;

typedef struct nnb_steps {
    const nnb_step_argument *arguments; /* inputs first */
    uint32_t n_inputs, n;
    uint64_t count, nbytes;   /* steps; bytes of one, all arguments together */
    const uint32_t *gone;     /* not 0 once nobody awaits any answer; NULL: that cannot be known */
    const nnb_server *server; /* whose request is run; NULL: none's */
    uint64_t deadline_ns;     /* of the request at hand, 0: none */
    uint64_t turned_ns;       /* when the step at hand began; with a deadline only, as is the next */
    uint64_t lasted_ns;       /* the step before; not 0 before the first one */
} nnb_steps;

/* Before each step from 0 on, and once with `count`: copies the outputs of the step before to their places, and the
 * inputs of `step` from theirs. 1: there is a deadline, and the step may be long (the one before took over a
 * millisecond). No step follows -EPIPE: `gone`, or the client has given the request up; -ETIMEDOUT. */
int nnb_steps_turn(nnb_steps *s, uint64_t step);
void nnb_word_raise(uint32_t *word); /* makes a word what `gone` waits for */

/* ---- process_watch.c: a service must not outlive its client ------------------------------------------------- */

/* Starts a detached thread that calls _exit(0) as soon as the process of `pidfd` has ended or the peer of the
 * connected socket `sock_fd` has closed its last copy; -1 leaves one of them out. Both are duplicated. Cannot be
 * undone. -EINVAL: both -1; -EBADF, -EMFILE, -ENOMEM, -EAGAIN: the thread could not be started. */
int nnb_exit_when_dead(int pidfd, int sock_fd);
/* Has the kernel send this process a signal when the thread that started it ends, also while it is stopped. An end
 * before the call is not seen: ask getppid() afterwards. -EINVAL: no such signal. */
int nnb_signal_when_orphaned(int number);

/* ---- sandbox.c: the walls of a service process -------------------------------------------------------------- */

#define NNB_MAY_READ 1
#define NNB_MAY_WRITE 2
#define NNB_MAY_EXECUTE 4 /* of calls: start programs */
#define NNB_MAY_CONNECT 8
#define NNB_MAY_SIGNAL 16 /* of calls: any thread by its number, which Landlock keeps to this process */

int nnb_landlock_version(void); /* 0: this kernel has no Landlock */
/* Returns a descriptor of rules that forbid all that Landlock can, but TCP to what may CONNECT. -ENOSYS. */
int nnb_landlock_rules(uint32_t may);
/* Allows to READ, WRITE or EXECUTE what lies beneath a directory, or a file. `fd` may be of O_PATH. */
int nnb_landlock_allow(int rules, int fd, uint32_t may);
/* Puts rules into force for ever. 1: for all threads; 0 (before version 8): for this one and those that it starts. */
int nnb_landlock_close(int rules);
/* Gives up all capabilities of this thread, and so of those that it starts: for ever, with no_new_privs. */
int nnb_capabilities_drop(void);
/* Lets all threads make only the calls of the list, for ever. -ENOSYS: not on this processor; -EINVAL: not with this
 * kernel; -ESRCH: a thread has a filter of its own. */
int nnb_seccomp_close(uint32_t may);

/* ---- bench.c: what `nnburst bench` compares everything else with -------------------------------------------
 *
 * The caller takes one clock reading per iteration: sample i is the time between its readings i and i+1.
 * warmup: iterations that are not recorded; samples: room for `count` ns. 0, -EINVAL: count 0. */

/* One cache line that the caller and a server thread, pinned to a CPU each, hand to each other, there and back, for 5
 * s at most. -EINVAL: a CPU that the process may not use; -ETIMEDOUT; or the errno of what could not be created. */
int nnb_bench_line(int client_cpu, int server_cpu, uint32_t warmup, uint32_t count, uint32_t *samples);
/* Runs of an execution, on the calling thread, however long they take; NULL: clock readings alone. -EIO: one has
 * failed. */
int nnb_bench_runs(nnb_execution *e, uint32_t count, uint32_t *samples);

#endif
