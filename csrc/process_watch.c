/* A thread that ends this process when the process it works for is gone.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * Why in C: an interpreter thread could not do it while another one holds the interpreter lock in a long computation.
 * Why both descriptors: the socket alone would stay open as long as any fork of the client holds a copy; the pidfd alone
 * would not notice a client that merely lets go.
 *
 * A process that is stopped (SIGSTOP, a debugger) runs no thread, so the kernel is asked as well for a signal at the end
 * of its parent. PR_SET_PDEATHSIG speaks of the *thread* that started this process. SIGKILL: the parent starts it from
 * one that lives until this process has ended. SIGCONT: the parent is not what it works for, and may go before it; this
 * process then looks again.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "nnb_internal.h"
#include "nnburst.h"

struct watch {
    int pidfd;
    int sock;
};

static void *watch_thread(void *arg)
{
    struct watch w = *(struct watch *)arg;
    free(arg);
    /* A pidfd becomes readable when the process ends. The socket is asked for nothing but POLLHUP, which is always
     * reported: its data belong to others. poll ignores negative descriptors. */
    struct pollfd fds[2] = {{.fd = w.pidfd, .events = POLLIN}, {.fd = w.sock, .events = 0}};
    for (;;) {
        int n = poll(fds, 2, -1);
        if (n < 0 && errno != EINTR && errno != EAGAIN)
            _exit(1); /* cannot watch any longer: better gone than orphaned */
        if (n > 0)
            _exit(0);
    }
    return NULL;
}

int nnb_exit_when_dead(int pidfd, int sock_fd)
{
    if (pidfd < 0 && sock_fd < 0)
        return -EINVAL;
    struct watch *w = malloc(sizeof *w);
    if (!w)
        return -ENOMEM;
    /* Copies, so that the caller may close its own whenever it likes. */
    w->pidfd = pidfd < 0 ? -1 : fcntl(pidfd, F_DUPFD_CLOEXEC, 3);
    int rc = pidfd >= 0 && w->pidfd < 0 ? -errno : 0;
    w->sock = sock_fd < 0 || rc ? -1 : fcntl(sock_fd, F_DUPFD_CLOEXEC, 3);
    if (!rc && sock_fd >= 0 && w->sock < 0)
        rc = -errno;
    if (!rc)
        rc = nnb_start_detached(watch_thread, w);
    if (rc) {
        if (w->pidfd >= 0)
            close(w->pidfd);
        if (w->sock >= 0)
            close(w->sock);
        free(w);
    }
    return rc;
}

int nnb_signal_when_orphaned(int number)
{
    return prctl(PR_SET_PDEATHSIG, number) < 0 ? -errno : 0;
}
