/* A thread that ends this process when the process that it works for has ended.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * A Python thread cannot do this while another thread has the interpreter lock. Both descriptors are needed: the
 * socket stays open as long as a fork of the client has a copy; the pidfd misses a client that closes the socket.
 *
 * A stopped process (SIGSTOP, a debugger) runs no thread, so the kernel also sends a signal at the end of the parent.
 * PR_SET_PDEATHSIG refers to the *thread* that started this process. With SIGKILL, that thread must outlive this
 * process. With SIGCONT, this process works for another one, and checks again whether that one lives.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "nnb_internal.h"

static void *watch_thread(void *fds)
{
    for (;;) {
        int n = poll(fds, 2, -1);
        if (n < 0 && errno != EINTR && errno != EAGAIN)
            _exit(1); /* without the watch, this process could be orphaned */
        if (n > 0)
            _exit(0);
    }
    return NULL;
}

int nnb_exit_when_dead(int pidfd, int sock_fd)
{
    int rc = 0, given[] = {pidfd, sock_fd};
    if (pidfd < 0 && sock_fd < 0)
        return -EINVAL;
    struct pollfd *fds = calloc(2, sizeof *fds);
    if (!fds)
        return -ENOMEM;
    for (int i = 0; i < 2; i++) { /* the caller may close its descriptors; poll ignores negative ones */
        fds[i].fd = given[i] < 0 ? -1 : fcntl(given[i], F_DUPFD_CLOEXEC, 3);
        rc = rc || given[i] < 0 || fds[i].fd >= 0 ? rc : -errno;
    }
    /* A pidfd becomes readable when the process ends. Of the socket, only POLLHUP counts: its data are for others. */
    fds[0].events = POLLIN;
    if (!rc && !(rc = nnb_start_thread(NULL, watch_thread, fds)))
        return 0;
    for (int i = 0; i < 2; i++)
        if (fds[i].fd >= 0)
            close(fds[i].fd);
    free(fds);
    return rc;
}

int nnb_signal_when_orphaned(int number) { return prctl(PR_SET_PDEATHSIG, number) < 0 ? -errno : 0; }
