/* Threads without signals, and destructors of descriptors: finalisers of the interpreter could be interrupted.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#define _GNU_SOURCE
#include <limits.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "nnb_internal.h"

int nnb_start_thread(pthread_t *joined, void *(*run)(void *), void *argument)
{
    pthread_t detached;
    pthread_attr_t attr;
    sigset_t all, before;
    sigfillset(&all); /* signals go to threads that can run handlers */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_attr_init(&attr);
    if (joined)
        pthread_attr_setstacksize(&attr, PTHREAD_STACK_MIN + 65536);
    else
        pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
    int rc = -pthread_create(joined ? joined : &detached, &attr, run, argument);
    pthread_attr_destroy(&attr);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return rc;
}

int nnb_fd_socket_maker(int fd)
{
    int domain = 0, type = 0;
    struct ucred maker = {0};
    socklen_t n = sizeof domain, m = sizeof type, k = sizeof maker;
    if (getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &domain, &n) < 0)
        return -errno;
    if (domain != AF_UNIX || getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &m) < 0 || type != SOCK_STREAM ||
        getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &maker, &k) < 0 || maker.pid < 0)
        return 0;
    return maker.pid;
}

/* ---- closing what may block ------------------------------------------------------------------------------------ */

#ifndef sigev_notify_thread_id
#define sigev_notify_thread_id _sigev_un._tid
#endif

#define MOST_CLOSERS 128
#define PATIENCE_NS 10000000 /* the longest time that a socket may linger */

typedef struct left {
    struct left *next;
    int fd;
} left;

typedef struct undertakers {
    left *first, **last;
    uint32_t threads;
    int of_sockets;
} undertakers;

static pthread_mutex_t closing = PTHREAD_MUTEX_INITIALIZER;
static undertakers of_files = {.last = &of_files.first}, of_sockets = {.last = &of_sockets.first, .of_sockets = 1};
static pthread_once_t prepared = PTHREAD_ONCE_INIT;

static void before_fork(void) { pthread_mutex_lock(&closing); }
static void after_fork_in_parent(void) { pthread_mutex_unlock(&closing); }

static void after_fork_in_child(void) /* the child has no closing threads: its copies stay open */
{
    of_files = (undertakers){.last = &of_files.first};
    of_sockets = (undertakers){.last = &of_sockets.first, .of_sockets = 1};
    pthread_mutex_unlock(&closing);
}

static void ignore(int number) { (void)number; }

/* Installs a handler of SIGURG, unless the program has one. Without a handler, a signal ends no system call. */
static void prepare(void)
{
    struct sigaction has, none = {.sa_handler = ignore, .sa_flags = SA_RESTART};
    pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
    if (sigaction(SIGURG, NULL, &has) == 0 && !(has.sa_flags & SA_SIGINFO) &&
        (has.sa_handler == SIG_DFL || has.sa_handler == SIG_IGN))
        sigaction(SIGURG, &none, NULL);
}

/* A signal ends the lingering of close(), even of sockets in a local socket's queue that it closes. The signal is
 * repeated, because the first one may come before close() waits. */
static void close_in_time(int fd, timer_t *alarm)
{
    static const struct itimerspec often = {{0, PATIENCE_NS}, {0, PATIENCE_NS}}, never;
    if (alarm)
        timer_settime(*alarm, 0, &often, NULL);
    close(fd);
    if (alarm)
        timer_settime(*alarm, 0, &never, NULL);
}

static left *take(undertakers *u)
{
    pthread_mutex_lock(&closing);
    left *next = u->first;
    if (!next) {
        u->threads--;
    } else if (!(u->first = next->next)) {
        u->last = &u->first;
    }
    pthread_mutex_unlock(&closing);
    return next;
}

static void *bury(void *kind)
{
    undertakers *u = kind;
    timer_t timer, *alarm = NULL;
    if (u->of_sockets) {
        struct sigevent event = {.sigev_notify = SIGEV_THREAD_ID, .sigev_signo = SIGURG};
        event.sigev_notify_thread_id = (pid_t)syscall(SYS_gettid);
        alarm = timer_create(CLOCK_MONOTONIC, &event, &timer) == 0 ? &timer : NULL;
        sigset_t urgent;
        sigemptyset(&urgent);
        sigaddset(&urgent, SIGURG);
        pthread_sigmask(SIG_UNBLOCK, &urgent, NULL);
    }
    for (left *next; (next = take(u)); free(next))
        close_in_time(next->fd, alarm);
    if (alarm)
        timer_delete(*alarm);
    return NULL;
}

static void leave_to_thread(int fd)
{
    left *one = malloc(sizeof(*one));
    if (!one) /* leak the descriptor: closing it here could block */
        return;
    *one = (left){NULL, fd};
    pthread_once(&prepared, prepare);
    undertakers *u = nnb_fd_socket_maker(fd) == -ENOTSOCK ? &of_files : &of_sockets;
    pthread_mutex_lock(&closing);
    *u->last = one;
    u->last = &one->next;
    int wanted = u->threads < MOST_CLOSERS;
    u->threads += (uint32_t)wanted;
    pthread_mutex_unlock(&closing);
    if (wanted && nnb_start_thread(NULL, bury, u) < 0) { /* a running thread or the next drop will close it */
        pthread_mutex_lock(&closing);
        u->threads--;
        pthread_mutex_unlock(&closing);
    }
}

void nnb_fd_drop(void *owned)
{
    intptr_t fd = (intptr_t)owned;
    if (fd < NNB_FD_MAY_BLOCK)
        close((int)fd); /* has no effect for a negative errno */
    else
        leave_to_thread((int)(fd - NNB_FD_MAY_BLOCK));
}
