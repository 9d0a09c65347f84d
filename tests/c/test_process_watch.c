/* A process that watches another ends with it, and one that could not watch says so. */
#include "check.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/wait.h>

#define NO_DESCRIPTOR 9999

static void ends_with_the_peer(int with_socket)
{
    int sockets[2], ends[2];
    CHECK_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, sockets), 0);
    CHECK_EQ(pipe(ends), 0); /* readable at its end, as a pidfd is when its process ends */
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        close(sockets[0]);
        close(ends[1]);
        if (nnb_exit_when_dead(with_socket ? -1 : ends[0], with_socket ? sockets[1] : -1) < 0)
            _exit(2);
        close(sockets[1]); /* the watch has copies */
        close(ends[0]);
        for (;;)
            pause();
    }
    close(sockets[1]);
    close(ends[0]);
    if (with_socket)
        close(sockets[0]);
    else
        CHECK_EQ(write(ends[1], "x", 1), 1);
    int status;
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK_EQ(status, 0);
    close(ends[1]);
    if (!with_socket)
        close(sockets[0]);
}

int main(void)
{
    watchdog();
    CHECK_EQ(nnb_exit_when_dead(-1, -1), -EINVAL);
    CHECK_EQ(nnb_exit_when_dead(-1, NO_DESCRIPTOR), -EBADF);
    CHECK_EQ(nnb_exit_when_dead(NO_DESCRIPTOR, -1), -EBADF);
    CHECK_EQ(nnb_exit_when_dead(NO_DESCRIPTOR, 0), -EBADF);
    ends_with_the_peer(1);
    ends_with_the_peer(0);
    return 0;
}
