/* An entry of the guard table is armed, withdrawn and armed again for another range, while the handler looks up
 * addresses: it takes for its own what this thread's range holds and nothing that never was in a range. */
#define _SIGNAL_H /* the handler is called by hand: what installs it only has to compile */
#define _SYS_VFS_H
#define _SYS_STATFS_H
#include "model.h"

typedef struct siginfo {
    int si_code, si_pid;
    void *si_addr;
} siginfo_t;
typedef int sigset_t;
struct sigaction {
    void (*sa_sigaction)(int, siginfo_t *, void *);
    void (*sa_handler)(int);
    int sa_flags;
    sigset_t sa_mask;
};
struct statfs {
    long f_type, f_bsize;
};
struct stat {
    long st_mode, st_size;
};
#define S_ISREG(mode) ((mode) == 0)
enum { SIGBUS = 7, SA_SIGINFO = 4, SA_ONSTACK = 8, SA_RESTART = 16 };
#define SIG_DFL ((void (*)(int))0)
#define SIG_IGN ((void (*)(int))1)
#define sigaction(...) 0
#define sigemptyset(...) 0
#define fstatfs(fd, fs) ((fs)->f_type = (fs)->f_bsize = 0)
#define fstat(fd, st) ((st)->st_mode = 0)
#define fcntl(...) 0
#define ftruncate(...) 0
#define sysconf(name) 4096
#define getpid() 1
#define mprotect(...) 0
#define model_SYS_mmap(...) 0
#define model_SYS_tgkill(...) 0
#define model_SYS_gettid(...) 0
#define model_SYS_rt_sigprocmask(...) 0
#define model_SYS_memfd_create(...) 0

#define GUARDS 2
#include "memory_map.c"

#define FIRST 0x1000u
#define SECOND 0x5000u
#define LENGTH 0x1000u

static void *come_and_go(void *unused)
{
    int index = guard_add((void *)(uintptr_t)FIRST, LENGTH, LENGTH, 0);
    assert(index >= 0 && absorb(FIRST + 4) == 1);
    guard_remove(index);
    return unused;
}

static void *come(void *unused)
{
    assert(guard_add((void *)(uintptr_t)SECOND, LENGTH, LENGTH, 0) >= 0 && absorb(SECOND + 4) == 1);
    return unused;
}

static void *fault_elsewhere(void *unused)
{
    assert(absorb(FIRST + 2 * LENGTH) == 0); /* between the two */
    return unused;
}

int main(void)
{
    pthread_t a, b, c;
    pthread_create(&a, NULL, come_and_go, NULL);
    pthread_create(&b, NULL, come, NULL);
    pthread_create(&c, NULL, fault_elsewhere, NULL);
    return 0;
}
