/* Descriptors are closed by the thread that drops them, or by one of their own if that may block; up to 32 of those. */
#include "check.h"

#include <fcntl.h>
#include <unistd.h>

enum { MOST = 128 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t change = PTHREAD_COND_INITIALIZER;
static pthread_t main_thread;
static int stuck, open_for_all, in_place, apart;

int __real_close(int fd);
int __wrap_close(int fd);

/* Closes of other threads wait until a test lets them go on. */
int __wrap_close(int fd)
{
    pthread_mutex_lock(&lock);
    if (pthread_equal(pthread_self(), main_thread)) {
        in_place++;
    } else {
        stuck++;
        pthread_cond_broadcast(&change);
        while (!open_for_all) pthread_cond_wait(&change, &lock);
        apart++;
        pthread_cond_broadcast(&change);
    }
    pthread_mutex_unlock(&lock);
    return __real_close(fd);
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
    while (*count < wanted) pthread_cond_wait(&change, &lock);
    pthread_mutex_unlock(&lock);
}

int main(void)
{
    main_thread = pthread_self();
    drop(0);
    CHECK_EQ(in_place, 1);
    for (int i = 0; i < MOST; i++) drop(NNB_FD_MAY_BLOCK); /* goes on although none of them ends */
    wait_for(&stuck, MOST);
    CHECK_EQ(in_place, 1);
    drop(NNB_FD_MAY_BLOCK); /* one too many */
    CHECK_EQ(in_place, 2);
    pthread_mutex_lock(&lock);
    open_for_all = 1;
    pthread_cond_broadcast(&change);
    pthread_mutex_unlock(&lock);
    wait_for(&apart, MOST);
    for (int before = in_place;; before = in_place) { /* they count themselves out after closing */
        drop(NNB_FD_MAY_BLOCK);
        if (in_place == before) break;
        usleep(1000);
    }
    wait_for(&apart, MOST + 1);
    return 0;
}
