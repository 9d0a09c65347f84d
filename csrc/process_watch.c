/* A thread that ends this process when the process it works for is gone.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * An interpreter thread could not do it while another one holds the interpreter lock. Both descriptors are needed:
 * the socket stays open as long as any fork of the client holds a copy; the pidfd misses a client that lets go.
 *
 * A process that is stopped (SIGSTOP, a debugger) runs no thread, so the kernel is asked as well for a signal at the
 * end of its parent. PR_SET_PDEATHSIG speaks of the *thread* that started this process. SIGKILL: the parent starts it
 * from one that lives until this process has ended. SIGCONT: it works for another process, and looks again.
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
            _exit(1); /* it cannot watch any longer, and must not be orphaned */
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
    for (int i = 0; i < 2; i++) { /* the caller may close its own; poll ignores negative ones */
        fds[i].fd = given[i] < 0 ? -1 : fcntl(given[i], F_DUPFD_CLOEXEC, 3);
        rc = rc || given[i] < 0 || fds[i].fd >= 0 ? rc : -errno;
    }
    /* A pidfd becomes readable when the process ends. The socket's data belong to others: POLLHUP alone. */
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
