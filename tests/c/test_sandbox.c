/* The walls without Python: what native code inside cannot do, what it still can, and how it dies. */
#include "check.h"

#include "../faults/ways_out.c"

#include <ftw.h>
#include <sys/wait.h>

static char here[] = "/tmp/nnburst-walls-XXXXXX";

/* As `close_door` of nnburst/service/process/sandbox.py. 77: this kernel, or emulator, has no seccomp. */
static void close_door(void)
{
    const char *readable[] = {"/proc/self", say("%s/code", here)};
    int rules = nnb_landlock_rules(0);
    CHECK(rules >= 0);
    for (int i = 0; i < 2; i++)
        CHECK_EQ(nnb_landlock_allow(rules, open(readable[i], O_PATH), NNB_MAY_READ), 0);
    CHECK_EQ(setrlimit(RLIMIT_CORE, &(struct rlimit){0, 0}), 0);
    CHECK(nnb_landlock_close(rules) >= 0);
    close(rules);
    CHECK_EQ(nnb_capabilities_drop(), 0);
    int rc = nnb_seccomp_close(NNB_MAY_SIGNAL);
    if (rc == -EINVAL || rc == -ENOSYS)
        _exit(77);
    CHECK_EQ(rc, 0);
}

static int count_open(int quietly)
{
    int is_open = 0, refused = 0;
    for (unsigned i = 0; name_of_way(i); i++) {
        int why = try_way(i);
        if (why == EPERM || why == EACCES || why == ENOSYS) {
            refused++;
            continue;
        }
        is_open++;
        if (!quietly)
            fprintf(stderr, "%s: errno %d\n", name_of_way(i), why);
    }
    printf("     %s a sandbox: %d refused, %d open\n", quietly ? "without" : "in", refused, is_open);
    fflush(stdout);
    return is_open;
}

static int ways_out(int unused)
{
    (void)unused;
    begin(here, getppid());
    close_door();
    return count_open(0) > 0;
}

static int ways_without_walls(int unused)
{
    (void)unused;
    begin(here, getppid());
    return count_open(1) < 60;
}

static volatile sig_atomic_t signals;
static void count_signal(int number) { signals += number == SIGUSR1; }
static void *wait_for_signal(void *unused)
{
    while (!signals)
        usleep(1); /* a call in which ThreadSanitizer delivers signals */
    return unused;
}

static int still_works(int unused)
{
    (void)unused;
    begin(here, getppid());
    close_door();
    nnb_mq_close(new_queue(6, 4, NNB_SYNCHRONIZED, NNB_LAYOUT_LINES, 0));
    CHECK_EQ(signal(SIGUSR1, count_signal) == SIG_ERR, 0);
    pthread_t thread = start(wait_for_signal, NULL);
    CHECK_EQ(pthread_kill(thread, SIGUSR1), 0);
    finish(thread);
    CHECK_EQ(raise(SIGUSR1), 0);
    CHECK_EQ(kill(getpid(), SIGUSR1), 0);
    CHECK_EQ(signals, 3);
    int pair[2];
    char byte = 1;
    CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, pair), 0);
    CHECK_EQ(send(pair[0], &byte, 1, 0), 1);
    CHECK_EQ(read(pair[1], &byte, 1), 1);
    CHECK_EQ(closed(open(code, O_RDONLY)), 0);
    CHECK_EQ(closed(open("/proc/self/status", O_RDONLY)), 0);
    free(memset(malloc(1 << 24), 1, 1 << 24));
    CHECK_EQ(usleep(1), 0);
    CHECK_EQ(syscall(999), -1); /* newer than the list */
    CHECK_EQ(errno, ENOSYS);
    return 0;
}

static void *abort_here(void *unused)
{
    (void)unused;
    abort();
}

static int aborts(int in_thread)
{
    close_door();
    if (in_thread)
        finish(start(abort_here, NULL));
    abort();
}

static int deadly(int number)
{
    close_door();
    return try_deadly((unsigned)number), 0;
}

/* What a function in a process of its own comes to: its exit code, or minus its signal. */
static int outcome(int (*function)(int), int argument)
{
    int status;
    pid_t pid = fork();
    if (pid == 0) {
        watchdog();
        _exit(function(argument));
    }
    CHECK(pid > 0);
    CHECK_EQ(waitpid(pid, &status, 0), pid);
    return WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status);
}

static int all(int unused)
{
    int inside = outcome(ways_out, unused);
    if (inside == 77)
        SKIP("there is no seccomp here");
    CHECK_EQ(inside, 0);
    CHECK(geteuid() || outcome(ways_without_walls, 0) == 0); /* most are closed to an ordinary user anyway */
    CHECK_EQ(outcome(still_works, 0), 0);
    for (int in_thread = 0; in_thread < 2; in_thread++)
        CHECK_EQ(outcome(aborts, in_thread), -SIGABRT);
    for (int number = 0; number < 4; number++)
        CHECK_EQ(outcome(deadly, number), -SIGSYS);
#ifdef __x86_64__
    CHECK_EQ(outcome(deadly, 4), -SIGSYS);
    int other = outcome(deadly, 5); /* a kernel without calls of 32 bits does not know it */
    CHECK(other == -SIGSYS || other == -SIGSEGV);
#endif
    return 0;
}

static int forget(const char *path, const struct stat *found, int kind, struct FTW *where)
{
    (void)found, (void)kind, (void)where;
    return remove(path);
}

int main(void)
{
    if (nnb_landlock_version() < 6)
        SKIP("this kernel has not all walls");
    CHECK(mkdtemp(here));
    const char *directories[] = {"private", "code"}, *files[] = {"private/secret", "private/removed", "code/module.py"};
    char path[64], target[64];
    for (int i = 0; i < 2; i++)
        snprintf(path, sizeof path, "%s/%s", here, directories[i]), mkdir(path, 0700);
    for (int i = 0; i < 3; i++)
        snprintf(path, sizeof path, "%s/%s", here, files[i]), closed(open(path, O_CREAT | O_WRONLY, 0600));
    snprintf(path, sizeof path, "%s/code/module.py.link", here);
    snprintf(target, sizeof target, "%s/private/secret", here);
    int linked = symlink(target, path), result = outcome(all, 0);
    CHECK_EQ(nftw(here, forget, 8, FTW_DEPTH | FTW_PHYS), 0);
    CHECK_EQ(linked, 0);
    return result < 0 ? 1 : result;
}
