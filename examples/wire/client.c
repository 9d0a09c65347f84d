/* A client of `nnburst serve` without nnburst: docs/WIRE.md is all that it knows. It opens a model by name and runs it.
 * The model has one input and one output, each of four float32. Each run prints a line, the output.
 *
 *     cc -std=c11 -O2 -Wall -o client client.c
 *     ./client $XDG_RUNTIME_DIR/nnburst/vision.sock scaling 3
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

enum { DATUM = 24, DATUMS = 1024, RING = DATUM * DATUMS, R = 0, W = 128, EVENT = 256, AT = 384 };
enum { CALL = 0, REPLY = 1, NOT_EMPTY = 2, SLOT = 0, OUTPUT = 64 };

#define REGION(offset, extent) "{'flags': 0, 'fd_index': 0, 'offset': " #offset ", 'extent': " #extent "}"
#define REGIONS REGION(0, 8) "," REGION(128, 8) "," REGION(384, 24576) "," REGION(256, 4) "," REGION(136, 48)
#define QUEUE "{'grantors': [" REGIONS "], 'quantum': 24, 'flags': 1, 'n_fds': 1}"

static int sock, pool_fd;

static void check(int ok, const char *what)
{
    if (ok)
        return;
    fprintf(stderr, "client: %s\n", what);
    exit(1);
}

/* ---- MessagePack ---------------------------------------------------------------------------------------------- */

typedef struct {
    const uint8_t *p, *end;
} value;

static uint8_t *big(uint8_t *to, uint8_t code, uint64_t number, int bytes)
{
    for (*to++ = code; bytes--;)
        *to++ = (uint8_t)(number >> 8 * bytes);
    return to;
}

/* Writes what is written in `s` as JSON, but with ' for " and @ for a value that is in MessagePack already. */
static size_t pack(uint8_t *to, const char *s, value raw)
{
    struct {
        uint8_t *at;
        uint32_t values;
    } open[8] = {0}, *top = open;
    uint8_t *begin = to;
    for (; *s; s++) {
        if (strchr("{['@0123456789", *s))
            top->values++;
        if (*s == '{' || *s == '[') {
            *++top = (__typeof__(open[0])){to, 0};
            to += 5;
        } else if (*s == '}' || *s == ']') {
            big(top->at, *s == '}' ? 0xdf : 0xdd, *s == '}' ? top->values / 2 : top->values, 4);
            top--;
        } else if (*s == '\'') {
            size_t n = strcspn(++s, "'");
            to = (uint8_t *)memcpy(big(to, 0xda, n, 2), s, n) + n;
            s += n;
        } else if (*s == '@') {
            to = (uint8_t *)memcpy(to, raw.p, (size_t)(raw.end - raw.p)) + (raw.end - raw.p);
        } else if (*s >= '0' && *s <= '9') {
            to = big(to, 0xcf, strtoull(s, (char **)&s, 10), 8);
            s--;
        }
    }
    return (size_t)(to - begin);
}

static uint64_t take(value *v, int bytes)
{
    uint64_t number = 0;
    check(v->end - v->p >= bytes, "a message ends early");
    while (bytes--)
        number = number << 8 | *v->p++;
    return number;
}

/* Reads what a value begins with. Returns its number, length or count, and how many bytes and values follow. */
static uint64_t open_value(value *v, uint64_t *bytes, uint64_t *values)
{
    uint8_t c = (uint8_t)take(v, 1);
    uint64_t n = c;
    *bytes = *values = 0;
    if (c < 0x80 || c >= 0xe0 || c == 0xc0 || c == 0xc2 || c == 0xc3)
        return n;
    if (c < 0x90 || c >= 0xde)
        return *values = 2 * (n = c < 0x90 ? c & 15u : take(v, 2 << (c - 0xde))), n;
    if (c < 0xa0 || c >= 0xdc)
        return *values = c < 0xa0 ? c & 15u : take(v, 2 << (c - 0xdc));
    if (c < 0xc0 || c >= 0xd9)
        return *bytes = c < 0xc0 ? c & 31u : take(v, 1 << (c - 0xd9));
    if (c >= 0xc4 && c <= 0xc6)
        return *bytes = take(v, 1 << (c - 0xc4));
    check(c >= 0xca && c <= 0xd3, "a message has something unknown");
    return take(v, c <= 0xcb ? 4 << (c - 0xca) : 1 << ((c - 0xcc) & 3));
}

static value after(value v)
{
    for (uint64_t left = 1, bytes, values; left; left += values - 1) {
        open_value(&v, &bytes, &values);
        check(bytes <= (uint64_t)(v.end - v.p), "a message ends early");
        v.p += bytes;
    }
    return v;
}

static uint64_t number(value v) { return open_value(&v, &(uint64_t){0}, &(uint64_t){0}); }

static int is(value v, const char *s)
{
    uint64_t bytes, values;
    open_value(&v, &bytes, &values);
    return bytes == strlen(s) && (uint64_t)(v.end - v.p) >= bytes && !memcmp(v.p, s, bytes);
}

static value get(value v, const char *name)
{
    uint64_t bytes, values, n = open_value(&v, &bytes, &values);
    for (; n--; v = after(after(v)))
        if (is(v, name))
            return after(v);
    check(0, name);
    return v;
}

static void say(const char *what, value v)
{
    uint64_t bytes, values;
    open_value(&v, &bytes, &values);
    fprintf(stderr, "client: %s: %.*s\n", what, (int)bytes, (const char *)v.p);
    exit(1);
}

/* ---- the control socket --------------------------------------------------------------------------------------- */

static void send_message(uint8_t kind, uint32_t number, const char *text, value raw, const int *fds, int n_fds)
{
    static uint8_t data[8 + 65536 + 4096];
    union {
        struct cmsghdr head;
        char room[CMSG_SPACE(2 * sizeof(int))];
    } rights = {.head = {CMSG_LEN((size_t)n_fds * sizeof(int)), SOL_SOCKET, SCM_RIGHTS}};
    memcpy(data, (uint8_t[4]){kind, 0, (uint8_t)n_fds, 0}, 4);
    memcpy(data + 4, &number, 4);
    struct iovec part = {data, 8 + pack(data + 8, text, raw)};
    struct msghdr m = {.msg_iov = &part, .msg_iovlen = 1};
    if (n_fds) {
        m.msg_control = &rights;
        m.msg_controllen = CMSG_SPACE((size_t)n_fds * sizeof(int));
        memcpy(CMSG_DATA(&rights.head), fds, (size_t)n_fds * sizeof(int));
    }
    check(sendmsg(sock, &m, MSG_NOSIGNAL) >= 0, "the service has gone");
}

/* Receives a message; serves it and returns 0 if it is a call, else returns 1. */
static int receive(value *v)
{
    static uint8_t data[8 + 65536];
    uint32_t number;
    ssize_t n = recv(sock, data, sizeof data, 0);
    check(n >= 8, "the service has gone");
    check(data[1] == 0, "a body is in a file");
    memcpy(&number, data + 4, 4);
    *v = (value){data + 8, data + n};
    if (data[0] == REPLY)
        return 1;
    if (data[0] != CALL)
        say("refused", get(*v, "message"));
    if (is(get(*v, "call"), "ending"))
        say("the service ends", get(*v, "reason"));
    check(is(get(*v, "call"), "get_memories"), "the service calls something unknown");
    send_message(REPLY, number, /* of the only slot */
                 "{'call': 'get_memories.reply', 'status': 0,"
                 " 'memories': [{'kind': 'ashmem', 'size': 4096, 'prot': 3, 'offset': 0}]}",
                 (value){0}, &pool_fd, 1);
    return 0;
}

/* Calls the service with what `format` and the rest say; `raw` stands for the @ in it. Returns the reply. */
static value call(value raw, const int *fds, int n_fds, const char *format, ...)
{
    char text[4096];
    value v;
    va_list rest;
    va_start(rest, format);
    check(vsnprintf(text, sizeof text, format, rest) < (int)sizeof text, "a message is too long");
    va_end(rest);
    send_message(CALL, 1, text, raw, fds, n_fds); /* one after the other: all may have one number */
    while (!receive(&v))
        ;
    return v;
}

/* ---- queues --------------------------------------------------------------------------------------------------- */

static uint8_t *shared(size_t size, int *fd)
{
    *fd = memfd_create("client", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    size = (size + 4095) & ~(size_t)4095;
    check(*fd >= 0 && !ftruncate(*fd, (off_t)size), "no memory");
    check(!fcntl(*fd, F_ADD_SEALS, F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW), "no seals");
    void *p = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, *fd, 0);
    check(p != MAP_FAILED, "no memory");
    return p;
}

static _Atomic uint64_t *counter(uint8_t *queue, int at) { return (_Atomic uint64_t *)(queue + at); }

static void publish(uint8_t *queue, uint32_t packet[][6], unsigned datums)
{
    _Atomic uint32_t *event = (_Atomic uint32_t *)(queue + EVENT);
    uint64_t w = atomic_load_explicit(counter(queue, W), memory_order_relaxed);
    for (unsigned i = 0; i < datums; i++)
        memcpy(queue + AT + (w + DATUM * i) % RING, packet[i], DATUM);
    atomic_store_explicit(counter(queue, W), w + DATUM * datums, memory_order_release);
    atomic_thread_fence(memory_order_seq_cst);
    if (!(atomic_load(event) & NOT_EMPTY) && !(atomic_fetch_or(event, NOT_EMPTY) & NOT_EMPTY))
        syscall(SYS_futex, event, FUTEX_WAKE_BITSET, INT32_MAX, NULL, NULL, NOT_EMPTY);
}

/* Takes a result packet and returns its status. Calls of the service are served meanwhile. */
static int32_t result(uint8_t *queue)
{
    _Atomic uint32_t *event = (_Atomic uint32_t *)(queue + EVENT);
    uint64_t r = atomic_load_explicit(counter(queue, R), memory_order_relaxed), w;
    for (;;) {
        uint32_t old = atomic_fetch_and(event, ~(uint32_t)NOT_EMPTY);
        atomic_thread_fence(memory_order_seq_cst);
        if ((w = atomic_load_explicit(counter(queue, W), memory_order_acquire)) != r)
            break;
        if (poll(&(struct pollfd){.fd = sock, .events = POLLIN}, 1, 0) > 0)
            check(!receive(&(value){0}), "an answer to no call");
        struct timespec t;
        clock_gettime(CLOCK_MONOTONIC, &t); /* for FUTEX_WAIT_BITSET a moment, not a duration */
        t.tv_nsec += 10000000;
        t.tv_sec += t.tv_nsec / 1000000000;
        t.tv_nsec %= 1000000000;
        syscall(SYS_futex, event, FUTEX_WAIT_BITSET, old & ~(uint32_t)NOT_EMPTY, &t, NULL, NOT_EMPTY);
    }
    uint32_t first[6];
    memcpy(first, queue + AT + r % RING, DATUM);
    check((first[0] & 255) == 0 && first[2] >= 2 && first[2] * DATUM <= w - r, "a result packet is malformed");
    atomic_store_explicit(counter(queue, R), r + first[2] * DATUM, memory_order_release);
    return (int32_t)first[3];
}

/* ---- the program ---------------------------------------------------------------------------------------------- */

int main(int argc, char **argv)
{
    check(argc == 4, "usage: client SOCKET MODEL RUNS");
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    strncpy(address.sun_path, argv[1], sizeof address.sun_path - 1);
    sock = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    check(!connect(sock, (struct sockaddr *)&address, sizeof address), "no service there");

    const value none = {0};
    call(none, NULL, 0, "{'call': 'hello', 'version': [1, 0], 'pid': %d}", getpid());
    value devices = get(call(none, NULL, 0, "{'call': 'list_devices'}"), "devices");
    uint64_t bytes, values, device = 0, n = open_value(&devices, &bytes, &values);
    for (; device < n && !is(get(devices, "name"), "nnburst-named"); device++)
        devices = after(devices);
    value model =
        get(call(none, NULL, 0, "{'call': 'import_model', 'device': %d, 'source': 'name:%s'}", (int)device, argv[2]),
            "model");
    model.end = after(model).p;
    value reply = call(model, NULL, 0, "{'call': 'prepare_model', 'device': %d, 'model': @, 'job': {}}", (int)device);
    int prepared = (int)number(get(reply, "prepared_model")), fds[2];

    uint8_t *requests = shared(AT + RING, &fds[0]), *results = shared(AT + RING, &fds[1]);
    float *pool = (float *)shared(4096, &pool_fd);
    reply = call(none, fds, 2,
                 "{'call': 'configure_execution_burst', 'prepared_model': %d, 'callback': 1,"
                 " 'request_channel': " QUEUE ", 'result_channel': " QUEUE "}",
                 prepared);
    int burst = (int)number(get(reply, "burst"));

    for (int run = 0; run < atoi(argv[3]); run++) {
        for (int i = 0; i < 4; i++)
            pool[i] = (float)(run + i);
        publish(requests, (uint32_t[5][6]){{0, 5, 1, 1, 1}, {1, 0, 0, 0, 16}, {3, 0, 0, OUTPUT, 16}, {5, SLOT}, {6}},
                5);
        if (result(results))
            say("a run failed", get(call(none, NULL, 0, "{'call': 'failure_reason', 'burst': %d}", burst), "reason"));
        const float *y = pool + OUTPUT / 4;
        printf("%g %g %g %g\n", (double)y[0], (double)y[1], (double)y[2], (double)y[3]);
    }
    call(none, NULL, 0, "{'call': 'goodbye'}");
    return 0;
}
