/* Letting go of a descriptor, where nothing of the interpreter may run: its finalisers can be interrupted half-way.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <sys/socket.h>
#include <unistd.h>

#include "nnb_internal.h"
#include "nnburst.h"

int nnb_start_detached(void *(*run)(void *), void *argument)
{
    pthread_t thread;
    pthread_attr_t attr;
    sigset_t all, before;
    sigfillset(&all); /* signals are for the threads that have handlers to run */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_attr_init(&attr);
    pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
    int rc = -pthread_create(&thread, &attr, run, argument);
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

/* Threads that are in close(). If so many are stuck, closing is done in place, without the interpreter lock: whoever
 * goes on to send such descriptors waits for them himself. */
#define MOST_CLOSERS 128
static nnb_a32 closers;

static void *close_apart(void *fd)
{
    close((int)(intptr_t)fd);
    nnb_add32_relaxed(&closers, (uint32_t)-1);
    return NULL;
}

void nnb_fd_drop(void *owned)
{
    intptr_t fd = (intptr_t)owned & ~NNB_FD_MAY_BLOCK;
    if (fd != (intptr_t)owned) {
        if (nnb_add32_relaxed(&closers, 1) < MOST_CLOSERS && nnb_start_detached(close_apart, (void *)fd) == 0)
            return;
        nnb_add32_relaxed(&closers, (uint32_t)-1);
    }
    close((int)fd);
}
