/* Descriptors whose closing may block are closed by threads, however many are stuck; sockets do not get stuck. A forked
 * child closes with threads of its own. */
#include "check.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

enum { MOST = 128, MORE = 200 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t change = PTHREAD_COND_INITIALIZER;
static pthread_t main_thread;
static int stuck, open_for_all, in_place, apart;

int __real_close(int fd);
int __wrap_close(int fd);

/* Closes files of other threads only when a test lets them go on. */
int __wrap_close(int fd)
{
    int type;
    socklen_t n = sizeof(type);
    int is_socket = getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &n) == 0;
    int is_main = pthread_equal(pthread_self(), main_thread);
    pthread_mutex_lock(&lock);
    if (is_main) {
        in_place++;
    } else if (!is_socket) {
        stuck++;
        pthread_cond_broadcast(&change);
        while (!open_for_all)
            pthread_cond_wait(&change, &lock);
    }
    pthread_mutex_unlock(&lock);
    int rc = __real_close(fd);
    pthread_mutex_lock(&lock);
    apart += !is_main;
    pthread_cond_broadcast(&change);
    pthread_mutex_unlock(&lock);
    return rc;
}

static void drop(int flag)
{
    int fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
    CHECK(fd >= 0);
    nnb_fd_drop((void *)(intptr_t)(fd | flag));
}

static void wait_for(const int *count, int wanted)
{
    pthread_mutex_lock(&lock);
    while (*count < wanted)
        pthread_cond_wait(&change, &lock);
    pthread_mutex_unlock(&lock);
}

/* A socket that has more to say than its peer hears, and would wait for an hour with that. */
static int lingering(int listener, const struct sockaddr_in *at)
{
    static const char bytes[1 << 16];
    struct linger hour = {1, 3600};
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    CHECK(fd >= 0);
    CHECK_EQ(connect(fd, (const struct sockaddr *)at, sizeof(*at)), 0);
    CHECK(accept(listener, NULL, NULL) >= 0); /* never read from */
    while (send(fd, bytes, sizeof(bytes), MSG_DONTWAIT | MSG_NOSIGNAL) > 0) {
    }
    CHECK_EQ(setsockopt(fd, SOL_SOCKET, SO_LINGER, &hour, sizeof(hour)), 0);
    return fd;
}

/* A child of fork() has none of the threads that are stuck in its parent, and does not wait for them. */
static void fork_while_all_are_stuck(void)
{
    pthread_mutex_lock(&lock); /* so that the child may use it */
    pid_t child = fork();
    CHECK(child >= 0);
    pthread_mutex_unlock(&lock);
    if (child == 0) {
        watchdog();
        change = (pthread_cond_t)PTHREAD_COND_INITIALIZER; /* the old one counts waiters that are not here */
        stuck = apart = 0;
        open_for_all = 1;
        drop(NNB_FD_MAY_BLOCK);
        wait_for(&apart, 1);
        _exit(stuck == 1 ? 0 : 1);
    }
    int status;
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK_EQ(status, 0);
}

int main(void)
{
    watchdog();
    main_thread = pthread_self();
    drop(0);
    CHECK_EQ(in_place, 1);
    for (int i = 0; i < MORE; i++)
        drop(NNB_FD_MAY_BLOCK); /* goes on although none of them ends */
    wait_for(&stuck, MOST);
    CHECK_EQ(in_place, 1);

    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t n = sizeof(at);
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), small = 2048;
    CHECK_EQ(setsockopt(listener, SOL_SOCKET, SO_RCVBUF, &small, sizeof(small)), 0);
    CHECK_EQ(bind(listener, (struct sockaddr *)&at, n), 0);
    CHECK_EQ(listen(listener, 8), 0);
    CHECK_EQ(getsockname(listener, (struct sockaddr *)&at, &n), 0);
    for (int i = 0; i < MOST + 2; i++)
        nnb_fd_drop((void *)(intptr_t)(lingering(listener, &at) | NNB_FD_MAY_BLOCK));
    wait_for(&apart, MOST + 2); /* beside the files, which are stuck */
    CHECK_EQ(in_place, 1);

    fork_while_all_are_stuck();

    pthread_mutex_lock(&lock);
    open_for_all = 1;
    pthread_cond_broadcast(&change);
    pthread_mutex_unlock(&lock);
    wait_for(&apart, MOST + 2 + MORE);
    CHECK_EQ(stuck, MORE);
    CHECK_EQ(in_place, 1);
    return 0;
}
