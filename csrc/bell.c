/* A bell: a socket that becomes readable when answers are there for a client that awaits them in an event loop.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * Not an eventfd: whether a write to one waits is a flag of the open file, which the client shares and may change, so it
 * could keep a thread of the service for ever. How a datagram is sent is the sender's own choice.
 */
#define _GNU_SOURCE
#include <sys/socket.h>

#include "nnb_internal.h"

void nnb_bell_ring(int fd)
{
    /* Full: it is readable already. Gone, or no socket at all: its owner's loss. */
    (void)!send(fd, "", 1, MSG_DONTWAIT | MSG_NOSIGNAL);
}
