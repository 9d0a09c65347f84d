/* A bell: a socket that becomes readable when there are answers for a client that awaits them in an event loop.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * An eventfd is unsuitable: the client shares the open file, and could make writes to it block for ever. Closing a
 * network socket may take long (SO_LINGER), and closing a local one also closes sockets in its unread messages. So a
 * bell is an end of a connected pair of local sockets that has received nothing, and can receive nothing any more.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include "nnb_internal.h"

int nnb_bell_check(int fd)
{
    int domain = 0, type = 0, waiting = 0;
    struct sockaddr_storage peer;
    socklen_t n = sizeof(int), m = sizeof(int), k = sizeof(peer);
    if (getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &domain, &n) < 0 || getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &m) < 0 ||
        domain != AF_UNIX || type != SOCK_STREAM || getpeername(fd, (struct sockaddr *)&peer, &k) < 0 ||
        shutdown(fd, SHUT_RD) < 0 || ioctl(fd, FIONREAD, &waiting) < 0 || waiting)
        return -EINVAL;
    return 0;
}

int nnb_bell_copy(int *copy, int fd)
{
    *copy = fd < 0 ? -1 : fcntl(fd, F_DUPFD_CLOEXEC, 0);
    return fd >= 0 && *copy < 0 ? -errno : 0;
}

void nnb_bell_ring(int fd)
{
    /* Errors are ignored: a full bell is readable already, and a closed bell harms only its owner. */
    (void)!send(fd, "", 1, MSG_DONTWAIT | MSG_NOSIGNAL);
}

void nnb_bell_hush(int fd)
{
    char bytes[64];
    while (recv(fd, bytes, sizeof(bytes), MSG_DONTWAIT) == sizeof(bytes))
        ;
}
