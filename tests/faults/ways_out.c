/* Ways out of a service process, for the native code of a device: one row per way.
 *
 * `try_way` returns 0 if a way is open, and else the errno. Outside of a sandbox a row does no harm: it touches what the
 * test has made, asks a question, or has an argument that the kernel refuses with another errno than EPERM and EACCES.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

static char secret[512], folder[512], code[512];
static int root, own_code, client_pidfd, plain_socket;
static pid_t client;
static char text[1024];

/* Before the door is closed: `here` has a folder "private" with a file "secret", and a folder "code". */
void begin(const char *here, int pid)
{
    snprintf(secret, sizeof secret, "%s/private/secret", here);
    snprintf(folder, sizeof folder, "%s/private", here);
    snprintf(code, sizeof code, "%s/code/module.py", here);
    client = pid;
    root = open("/", O_PATH | O_DIRECTORY);
    own_code = open(code, O_RDONLY);
    client_pidfd = (int)syscall(434, pid, 0);
    plain_socket = socket(AF_UNIX, SOCK_STREAM, 0);
}

static const char *say(const char *form, const char *what)
{
    snprintf(text, sizeof text, form, what);
    return text;
}

static const char *of_client(const char *what)
{
    snprintf(text, sizeof text, "/proc/%d/%s", (int)client, what);
    return text;
}

static const char *of_descriptor(int fd, const char *below)
{
    snprintf(text, sizeof text, "/proc/self/fd/%d%s", fd, below);
    return text;
}

static long closed(long fd)
{
    return fd < 0 ? fd : close((int)fd);
}

static long child(unsigned long flags)
{
    long pid = syscall(SYS_clone, flags, 0, 0, 0, 0);
    if (pid == 0)
        _exit(0);
    return pid < 0 ? pid : 0;
}

static long affinity(void) /* refused without a word: what counts is that nothing changes */
{
    unsigned long before[16] = {0}, after[16] = {0}, one[16] = {0};
    syscall(SYS_sched_getaffinity, client, sizeof before, before);
    one[0] = before[0] & -before[0];
    long rc = syscall(SYS_sched_setaffinity, client, sizeof one, one);
    syscall(SYS_sched_getaffinity, client, sizeof after, after);
    if (rc == 0 && memcmp(before, after, sizeof before) == 0) {
        errno = EPERM;
        return -1;
    }
    syscall(SYS_sched_setaffinity, client, sizeof before, before);
    return rc;
}

static long real_time(void) /* which a limit may allow: above that */
{
    struct rlimit most;
    getrlimit(RLIMIT_RTPRIO, &most);
    struct {
        uint32_t size, policy;
        uint64_t flags;
        int32_t nice;
        uint32_t priority;
        uint64_t runtime, deadline, period;
    } fifo = {48, SCHED_FIFO, 0, 0, (uint32_t)(most.rlim_cur + 1), 0, 0, 0}, usual = {.size = 48};
    if (most.rlim_cur >= 99) {
        errno = EPERM;
        return -1;
    }
    long rc = syscall(SYS_sched_setattr, 0, &fifo, 0);
    return rc < 0 ? rc : syscall(SYS_sched_setattr, 0, &usual, 0);
}

static long raise_limit(void) /* to write its memory into a file when it ends: 0 inside */
{
    struct rlimit most;
    getrlimit(RLIMIT_CORE, &most);
    most.rlim_max += most.rlim_max != RLIM_INFINITY;
    return setrlimit(RLIMIT_CORE, &most);
}

static long from_memory(void)
{
    int fd = memfd_create("program", MFD_CLOEXEC);
    long rc = syscall(SYS_execveat, fd, "", NULL, NULL, AT_EMPTY_PATH); /* empty: ENOEXEC */
    int why = errno;
    close(fd);
    errno = why;
    return rc;
}

static long handle(void)
{
    struct {
        struct file_handle head;
        unsigned char rest[128];
    } h = {.head = {.handle_bytes = 128}};
    int mount;
    if (name_to_handle_at(AT_FDCWD, secret, &h.head, &mount, 0) < 0 && errno != EOPNOTSUPP)
        return -1;
    return closed(open_by_handle_at(root, &h.head, O_RDONLY));
}

static struct {
    uint64_t flags, mode, resolve;
} how = {O_RDONLY, 0, 0};

struct way {
    const char *name;
    long (*go)(void);
};

#define WAY(id, expression) static long way_##id(void) { return (long)(expression); }
#define CALL(id, ...) WAY(id, syscall(SYS_##id, ##__VA_ARGS__))
#define WAYS                                                                                                           \
    X(open_file, closed(open(secret, O_RDONLY)))                                                                       \
    X(open_from_root, closed(openat(root, secret + 1, O_RDONLY)))                                                      \
    X(openat2, closed(syscall(437, root, secret + 1, &how, sizeof how)))                                               \
    X(open_through_link, closed(open(say("%s.link", code), O_RDONLY)))                                                 \
    X(open_through_own_root, closed(open(say("/proc/self/root%s", secret), O_RDONLY)))                                 \
    X(open_through_working_directory, closed(open("/proc/self/cwd/../../../../..", O_RDONLY | O_DIRECTORY)))                        \
    X(open_through_descriptor, closed(open(of_descriptor(root, secret), O_RDONLY)))                                    \
    X(open_through_root_of_client, closed(open(of_client("root/etc/passwd"), O_RDONLY)))                               \
    X(open_password_file, closed(open("/etc/passwd", O_RDONLY)))                                                       \
    X(list_directory, closed(open(folder, O_RDONLY | O_DIRECTORY)))                                                    \
    X(list_root, closed(open("/", O_RDONLY | O_DIRECTORY)))                                                            \
    X(memory_of_client, closed(open(of_client("mem"), O_RDWR)))                                                        \
    X(environment_of_client, closed(open(of_client("environ"), O_RDONLY)))                                             \
    X(maps_of_client, closed(open(of_client("maps"), O_RDONLY)))                                                       \
    X(descriptors_of_client, closed(open(of_client("fd"), O_RDONLY | O_DIRECTORY)))                                    \
    X(file_handle, handle())                                                                                           \
    X(io_uring, closed(syscall(425, 1, NULL)))                                                                         \
    X(aio, syscall(SYS_io_setup, 0, NULL))                                                                             \
    X(create_beside_code, closed(open(say("%s.new", code), O_CREAT | O_WRONLY, 0600)))                                 \
    X(write_code, closed(open(code, O_WRONLY)))                                                                        \
    X(write_code_through_descriptor, closed(open(of_descriptor(own_code, ""), O_RDWR)))                                \
    X(truncate_by_name, truncate(code, 1 << 20))                                                                       \
    X(temporary_file, closed(open("/tmp", O_TMPFILE | O_RDWR, 0600)))                                                  \
    X(shared_memory_file, closed(open("/dev/shm", O_TMPFILE | O_RDWR, 0600)))                                          \
    X(make_directory, mkdir(say("%s/made", folder), 0700))                                                             \
    X(remove_file, unlink(say("%s/removed", folder)))                                                                  \
    X(rename_file, rename(secret, secret))                                                                             \
    X(link_file, linkat(AT_FDCWD, secret, AT_FDCWD, say("%s.hard", code), 0))                                          \
    X(symbolic_link, symlinkat(secret, AT_FDCWD, say("%s.soft", code)))                                                \
    X(make_fifo, mknodat(AT_FDCWD, say("%s.fifo", code), S_IFIFO | 0600, 0))                                           \
    X(change_mode, fchmodat(AT_FDCWD, code, 0600, 0))                                                                  \
    X(change_mode_of_descriptor, fchmod(own_code, 0600))                                                               \
    X(change_owner, fchownat(AT_FDCWD, code, -1, -1, 0))                                                               \
    X(change_times, utimensat(AT_FDCWD, code, NULL, 0))                                                                \
    X(set_attribute, syscall(SYS_setxattr, code, "user.x", NULL, 0, 4096))                                             \
    X(wait_for_many, closed(syscall(SYS_epoll_create1, 0)))                                                            \
    X(watch_descriptor, syscall(SYS_epoll_ctl, -1, 1, -1, NULL))                                                       \
    X(watch_files, closed(syscall(SYS_inotify_init1, IN_FLAGS)))                                                       \
    X(watch_mounts, closed(syscall(SYS_fanotify_init, -1, 0)))                                                         \
    X(change_directory, fchdir(root))                                                                                  \
    X(change_root, chroot(code))                                                                                       \
    X(fork, child(SIGCHLD))                                                                                            \
    X(vfork, child(CLONE_VFORK | SIGCHLD))                                                                             \
    X(child_in_namespace, child(CLONE_NEWIPC | SIGCHLD))                                                               \
    X(clone3, syscall(435, NULL, 0))                                                                                   \
    X(execute, syscall(SYS_execve, "/nothing", NULL, NULL))                                                            \
    X(execute_from_memory, from_memory())                                                                              \
    X(trace_client, syscall(SYS_ptrace, 0x4206 /* SEIZE */, client, 1, 0))                                             \
    X(read_memory_of_client, syscall(SYS_process_vm_readv, client, NULL, 0, NULL, 0, 0))                               \
    X(write_memory_of_client, syscall(SYS_process_vm_writev, client, NULL, 0, NULL, 0, 0))                             \
    X(descriptor_of_client, closed(syscall(438, client_pidfd, 0, 0)))                                                  \
    X(signal_client, kill(client, 0))                                                                                  \
    X(signal_group, kill(0, 0))                                                                                        \
    X(signal_thread_of_client, syscall(SYS_tgkill, client, client, 0))                                                 \
    X(signal_any_thread, syscall(SYS_tkill, client, 0))                                                                \
    X(queue_signal, syscall(SYS_rt_sigqueueinfo, client, 0, NULL))                                                     \
    X(signal_by_pidfd, syscall(424, client_pidfd, 0, NULL, 0))                                                         \
    X(signals_of_descriptors, fcntl(plain_socket, F_SETOWN, client))                                                   \
    X(compare_with_client, syscall(SYS_kcmp, client, client, 1, 0, 0))                                                 \
    X(pin_client, affinity())                                                                                          \
    X(priority_of_client, syscall(SYS_setpriority, 0, client, 0))                                                      \
    X(scheduler_of_client, syscall(SYS_sched_setscheduler, client, 0, NULL))                                           \
    X(attributes_of_client, syscall(SYS_sched_setattr, client, NULL, 0))                                               \
    X(real_time, real_time())                                                                                          \
    X(raise_limit, raise_limit())                                                                                      \
    X(limits_of_client, syscall(SYS_prlimit64, client, 7, NULL, NULL))                                                 \
    X(disk_priority_of_client, syscall(SYS_ioprio_set, 1, client, 0))                                                  \
    X(pages_of_client, syscall(SYS_move_pages, client, 0, NULL, NULL, NULL, 0))                                        \
    X(advise_client, syscall(440, client_pidfd, NULL, 0, 0, 0))                                                        \
    X(internet_socket, closed(socket(AF_INET, SOCK_STREAM, 0)))                                                        \
    X(datagram_socket, closed(socket(AF_INET, SOCK_DGRAM, 0)))                                                         \
    X(internet_6_socket, closed(socket(AF_INET6, SOCK_STREAM, 0)))                                                     \
    X(raw_socket, closed(socket(AF_INET, SOCK_RAW, 1)))                                                                \
    X(packet_socket, closed(socket(AF_PACKET, SOCK_RAW, 0)))                                                           \
    X(netlink_socket, closed(socket(AF_NETLINK, SOCK_RAW, 0)))                                                         \
    X(local_socket, closed(socket(AF_UNIX, SOCK_STREAM, 0)))                                                           \
    X(local_datagram_socket, closed(socket(AF_UNIX, SOCK_DGRAM, 0)))                                                   \
    X(datagram_pair, syscall(SYS_socketpair, AF_UNIX, SOCK_DGRAM, 0, NULL))                                            \
    X(machine_socket, closed(socket(40 /* VSOCK */, SOCK_STREAM, 0)))                                                  \
    X(cipher_socket, closed(socket(38 /* ALG */, SOCK_SEQPACKET, 0)))                                                  \
    X(connect, syscall(SYS_connect, plain_socket, NULL, 0))                                                            \
    X(bind, syscall(SYS_bind, plain_socket, NULL, 0))                                                                  \
    X(listen, syscall(SYS_listen, -1, 0))                                                                              \
    X(mount, syscall(SYS_mount, NULL, NULL, NULL, 0, NULL))                                                            \
    X(unmount, syscall(SYS_umount2, NULL, 0))                                                                          \
    X(move_root, syscall(SYS_pivot_root, NULL, NULL))                                                                  \
    X(open_tree, closed(syscall(428, -1, NULL, 0)))                                                                    \
    X(new_file_system, closed(syscall(430, NULL, 0)))                                                                  \
    X(move_mount, syscall(429, -1, NULL, -1, NULL, 0))                                                                 \
    X(bpf, syscall(SYS_bpf, -1, NULL, 0))                                                                              \
    X(perf, closed(syscall(SYS_perf_event_open, NULL, 0, -1, -1, 0)))                                                  \
    X(page_faults, closed(syscall(SYS_userfaultfd, -1)))                                                               \
    X(keys, syscall(SYS_keyctl, -1, 0, 0, 0, 0))                                                                       \
    X(add_key, syscall(SYS_add_key, NULL, NULL, NULL, 0, 0))                                                           \
    X(request_key, syscall(SYS_request_key, NULL, NULL, NULL, 0))                                                      \
    X(new_user_namespace, syscall(SYS_unshare, CLONE_NEWUSER))                                                         \
    X(enter_namespace, syscall(SYS_setns, client_pidfd, 0))                                                            \
    X(kernel_log, syscall(SYS_syslog, 3, NULL, 0))                                                                     \
    X(host_name, syscall(SYS_sethostname, NULL, -1))                                                                   \
    X(clock, syscall(SYS_clock_settime, -1, NULL))                                                                     \
    X(quota, syscall(SYS_quotactl, -1, NULL, 0, NULL))                                                                 \
    X(swap, syscall(SYS_swapoff, NULL))                                                                                \
    X(personality, syscall(SYS_personality, 0xffffffff))                                                               \
    X(become_other_user, setresuid(-1, -1, -1))                                                                        \
    X(capabilities, syscall(SYS_capset, NULL, NULL))                                                                   \
    X(new_filter, syscall(SYS_seccomp, 0, -1, NULL))                                                                   \
    X(traced_by_all, syscall(SYS_prctl, 0x59616d61 /* SET_PTRACER */, 0, 0, 0, 0))                                     \
    X(outlive_client, syscall(SYS_prctl, 1 /* SET_PDEATHSIG */, SIGKILL, 0, 0, 0))                                     \
    X(shared_segment, syscall(SYS_shmget, 0, 0, 0))                                                                    \
    X(lock_segment, syscall(SYS_shmctl, -1, 11 /* SHM_LOCK */, NULL))                                                  \
    X(message_queue, syscall(SYS_msgget, 0, 0))                                                                        \
    X(semaphores, syscall(SYS_semget, 0, -1, 0))                                                                       \
    X(named_queue, syscall(SYS_mq_open, NULL, 0, 0, NULL))                                                             \
    X(type_into_terminal, syscall(SYS_ioctl, 2, 0x5412 /* TIOCSTI */, NULL))                                           \
    X(widen_pipe, fcntl(own_code, 1031 /* F_SETPIPE_SZ */, 1 << 20))                                                   \
    X(lease, fcntl(own_code, 1024 /* F_SETLEASE */, 2))                                                                \
    X(note_of_directory, fcntl(own_code, 1026 /* F_NOTIFY */, 0))
#define IN_FLAGS 0

#define X(id, expression) WAY(id, expression)
WAYS
#undef X
#define X(id, expression) {#id, way_##id},
static const struct way ways[] = {WAYS};
#undef X

const char *name_of_way(unsigned i)
{
    return i < sizeof ways / sizeof *ways ? ways[i].name : NULL;
}

int try_way(unsigned i)
{
    errno = 0;
    return ways[i].go() < 0 ? errno : 0;
}

/* What kills the process. */
int try_deadly(unsigned i)
{
    switch (i) {
    case 0: return (int)syscall(SYS_init_module, NULL, 0, NULL);
    case 1: return (int)syscall(SYS_delete_module, NULL, 0);
    case 2: return (int)syscall(SYS_kexec_load, 0, 0, NULL, -1);
    case 3: return (int)syscall(SYS_reboot, 0, 0, 0, NULL);
#ifdef __x86_64__
    case 4: return (int)syscall(0x40000000 | SYS_getpid); /* of the x32 calls */
    case 5: { /* of a 32-bit program */
        int rc;
        __asm__ volatile("int $0x80" : "=a"(rc) : "a"(20) : "memory", "r8", "r9", "r10", "r11");
        return rc;
    }
#endif
    }
    return 0;
}
