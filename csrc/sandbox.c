/* The walls of a service process: Landlock for objects with names, seccomp for system calls, and no capabilities.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * A wall is closed once and for ever. Seccomp cannot see behind pointers, so Landlock checks names of files, and no
 * process may make sockets: a datagram socket could send to any address. A call that is not in the table fails with
 * EPERM. A few calls look dangerous but are not, because other calls are missing: no call acts on a pidfd, and
 * ftruncate has no file that is open for writing. The code before the wall is short enough to be read.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/audit.h>
#include <linux/capability.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <netinet/in.h>
#include <sched.h>
#include <signal.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "nnburst.h"

/* ---- Landlock -------------------------------------------------------------------------------------------------- */

/* Numbers of system calls that older headers lack. */
enum { LANDLOCK_CREATE = 444, LANDLOCK_ADD = 445, LANDLOCK_RESTRICT = 446 };
#define RULE_PATH_BENEATH 1
#define RESTRICT_ALL_THREADS (1u << 3) /* version 8 */
#define NEWEST_LANDLOCK 8

/* clang-format off */
enum {
    FS_EXECUTE = 1 << 0, FS_WRITE_FILE = 1 << 1, FS_READ_FILE = 1 << 2, FS_READ_DIR = 1 << 3, FS_REMOVE_DIR = 1 << 4,
    FS_REMOVE_FILE = 1 << 5, FS_MAKE_DIR = 1 << 7, FS_MAKE_REG = 1 << 8, FS_REFER = 1 << 13, FS_TRUNCATE = 1 << 14,
    FS_IOCTL_DEV = 1 << 15,
    OF_FILES = FS_EXECUTE | FS_WRITE_FILE | FS_READ_FILE | FS_TRUNCATE | FS_IOCTL_DEV,
};
/* clang-format on */

struct ruleset {
    uint64_t fs, net, scoped;
};

int nnb_landlock_version(void)
{
    long n = syscall(LANDLOCK_CREATE, NULL, 0, 1);
    return n < 0 ? 0 : (int)n;
}

/* Returns the rights on files that a version of Landlock knows. Newer versions have added rights. */
static uint64_t rights_of(int version)
{
    int bits = version >= 5 ? 16 : version >= 3 ? 15 : version >= 2 ? 14 : 13;
    return (1u << bits) - 1;
}

int nnb_landlock_rules(uint32_t may)
{
    int version = nnb_landlock_version();
    if (version < 1)
        return -ENOSYS;
    struct ruleset r = {.fs = rights_of(version)};
    size_t size = sizeof r.fs;
    if (version >= 4) {
        r.net = may & NNB_MAY_CONNECT ? 0 : 3; /* bind and connect TCP */
        size += sizeof r.net;
    }
    if (version >= 6) {
        r.scoped = 3; /* no abstract sockets of outside processes, and no signals to them */
        size += sizeof r.scoped;
    }
    long fd = syscall(LANDLOCK_CREATE, &r, size, 0);
    return fd < 0 ? -errno : (int)fd;
}

int nnb_landlock_allow(int rules, int fd, uint32_t may)
{
    struct stat found;
    if (fstat(fd, &found) < 0)
        return -errno;
    uint64_t rights = 0;
    if (may & NNB_MAY_READ)
        rights |= FS_READ_FILE | FS_READ_DIR;
    if (may & NNB_MAY_WRITE)
        rights |= FS_WRITE_FILE | FS_TRUNCATE | FS_MAKE_REG | FS_MAKE_DIR | FS_REMOVE_FILE | FS_REMOVE_DIR | FS_REFER;
    if (may & NNB_MAY_EXECUTE)
        rights |= FS_EXECUTE;
    struct {
        uint64_t rights;
        int32_t parent;
    } __attribute__((packed)) rule = {rights & rights_of(nnb_landlock_version()), fd};
    if (!S_ISDIR(found.st_mode))
        rule.rights &= OF_FILES;
    return syscall(LANDLOCK_ADD, rules, RULE_PATH_BENEATH, &rule, 0) < 0 ? -errno : 0;
}

int nnb_landlock_close(int rules)
{
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0)
        return -errno;
    if (nnb_landlock_version() >= NEWEST_LANDLOCK && syscall(LANDLOCK_RESTRICT, rules, RESTRICT_ALL_THREADS) == 0)
        return 1;
    return syscall(LANDLOCK_RESTRICT, rules, 0) < 0 ? -errno : 0;
}

/* ---- capabilities ---------------------------------------------------------------------------------------------- */

int nnb_capabilities_drop(void)
{
    prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0);
    for (int each = 0; prctl(PR_CAPBSET_DROP, each, 0, 0, 0) == 0; each++) /* fails without CAP_SETPCAP */
        ;
    struct __user_cap_header_struct head = {_LINUX_CAPABILITY_VERSION_3, 0};
    struct __user_cap_data_struct none[_LINUX_CAPABILITY_U32S_3] = {{0}};
    return syscall(SYS_capset, &head, none) < 0 ? -errno : 0;
}

/* ---- seccomp --------------------------------------------------------------------------------------------------- */

#if defined __x86_64__
#define ARCH AUDIT_ARCH_X86_64
#define RSEQ 334
#define PREADV2 327
#elif defined __aarch64__
#define ARCH AUDIT_ARCH_AARCH64
#define RSEQ 293
#define PREADV2 286
#else
#define ARCH 0
#define RSEQ 0
#define PREADV2 0
#endif
#define ENOSYS_FROM 470 /* newer calls than this list knows: libraries test if they exist */
#define X32 0x40000000u
#define NAMESPACES \
    (CLONE_NEWNS | CLONE_NEWCGROUP | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET)
#define FAILS(number) (SECCOMP_RET_ERRNO | (number))
#define OWN_PID 0xffffffffu

/* A call, and the arguments that it may have. Each check is (argument & mask) == value for the lower half of the
 * argument: the kernel uses no more of these arguments. `may`: the right that a service needs for the call. */
struct row {
    long number;
    uint32_t may;
    uint32_t act; /* 0: the call is allowed */
    struct {
        uint8_t argument_1; /* counted from 1, 0: none */
        uint32_t mask, value;
    } check[3];
};

/* clang-format off */
#define CALL(name) {SYS_##name, 0, 0, {{0}}}
#define NEW(name, number) {number, 0, 0, {{0}}} /* some headers lack these */
#define CALL_IF(name, n, mask, value) {SYS_##name, 0, 0, {{(n) + 1, mask, value}}}
#define CALL_FOR(may, name) {SYS_##name, may, 0, {{0}}}
#define NOT(act, name) {SYS_##name, 0, act, {{0}}}
#define EXACT 0xffffffffu
#define INET (AF_INET | AF_INET6) /* 2 and 10: they differ in one bit */
#define SOCKET(type, protocol) \
    {SYS_socket, NNB_MAY_CONNECT, 0, {{1, ~(INET ^ AF_INET), AF_INET}, {2, 0xf, type}, {3, EXACT, protocol}}}

static const struct row table[] = {
    /* Runs: waiting, waking, clocks that the vDSO lacks. These are first because the list is read from the top. */
    CALL(futex), CALL(sched_yield), CALL(clock_gettime), CALL(clock_nanosleep), CALL(nanosleep), CALL(clock_getres),
    CALL(gettimeofday), CALL(ppoll), CALL(pselect6), CALL(restart_syscall),
    NEW(futex_waitv, 449), /* for a listener of many bursts */

    /* Memory. Code may be mapped, because libraries are loaded late and libffi makes machine code. So this table does
     * not decide which code an attacker can run. */
    CALL(brk), CALL(mmap), CALL(munmap), CALL(mremap), CALL(mprotect), CALL(madvise), CALL(msync), CALL(memfd_create),
    CALL(membarrier), CALL(mlock), CALL(munlock), CALL(mincore),

    /* Threads, but no processes. clone3 has its flags in memory, where seccomp cannot check them, so the C library must
     * use clone. */
    CALL_IF(clone, 0, CLONE_THREAD | NAMESPACES, CLONE_THREAD),
    {435 /* clone3 */, 0, FAILS(ENOSYS), {{0}}},
    CALL(set_robust_list), NEW(rseq, RSEQ), CALL(set_tid_address), CALL(gettid), CALL(getpid),
    CALL(getppid), CALL(waitid), /* is the client its child? */ CALL(exit), CALL(exit_group), CALL(getcpu), CALL(sched_getaffinity), CALL(sched_getattr),
    CALL(sched_getscheduler), CALL(sched_getparam), CALL(sched_get_priority_max), CALL(sched_get_priority_min),
    CALL_IF(sched_setaffinity, 0, EXACT, 0), CALL_IF(sched_setattr, 0, EXACT, 0), /* of the calling thread alone */
    NOT(FAILS(0), sched_setaffinity), /* faked: else ONNX Runtime logs errors at length */

    /* Signals to this process: abort(), and a handler that restores the default action. */
    CALL(rt_sigaction), CALL(rt_sigprocmask), CALL(rt_sigreturn), CALL(rt_sigtimedwait), CALL(rt_sigsuspend),
    CALL(rt_sigpending), CALL(sigaltstack), CALL_IF(tgkill, 0, EXACT, OWN_PID), CALL_IF(kill, 0, EXACT, OWN_PID),
#ifndef __GLIBC__
    CALL_FOR(NNB_MAY_SIGNAL, tkill), /* for raise(), abort() and pthread_kill() of musl */
#endif
    CALL(timer_create), CALL(timer_settime), CALL(timer_delete), CALL(timer_gettime), /* time limits of closes */
    CALL(setitimer), CALL(getitimer),

    /* Descriptors that this process has. */
    CALL(read), CALL(readv), CALL(pread64), CALL(preadv), NEW(preadv2, PREADV2), CALL(write), CALL(writev),
    CALL(pwrite64), CALL(pwritev), NEW(pwritev2, PREADV2 + 1),
    CALL(lseek), CALL(close), NEW(close_range, 436), CALL(dup), CALL(dup3), CALL(fstat), CALL(fstatfs), CALL(ftruncate),
    CALL(fallocate), CALL(fadvise64), CALL(fsync), CALL(fdatasync), CALL(eventfd2), CALL(pipe2),
    /* No F_SETOWN, which makes the kernel send signals. No leases, and no notifications of file changes. */
    CALL_IF(fcntl, 1, EXACT, F_GETFL), CALL_IF(fcntl, 1, EXACT, F_SETFL), CALL_IF(fcntl, 1, EXACT, F_GETFD),
    CALL_IF(fcntl, 1, EXACT, F_SETFD), CALL_IF(fcntl, 1, EXACT, F_DUPFD), CALL_IF(fcntl, 1, EXACT, F_DUPFD_CLOEXEC),
    CALL_IF(fcntl, 1, EXACT, F_ADD_SEALS), CALL_IF(fcntl, 1, EXACT, F_GET_SEALS),
    CALL_IF(fcntl, 1, EXACT, 5), CALL_IF(fcntl, 1, EXACT, 6), CALL_IF(fcntl, 1, EXACT, 7), /* locks of a process */
    CALL_IF(fcntl, 1, EXACT, 36), CALL_IF(fcntl, 1, EXACT, 37), CALL_IF(fcntl, 1, EXACT, 38), /* locks of open files */
    /* No TIOCSTI: standard error may be the user's terminal. */
    CALL_IF(ioctl, 1, EXACT, 0x5401),     /* TCGETS: is it a terminal? */
    CALL_IF(ioctl, 1, EXACT, 0x541b),     /* FIONREAD */
    CALL_IF(ioctl, 1, EXACT, 0x5411),     /* SIOCOUTQ: bytes that the client has not read */
    CALL_IF(ioctl, 1, EXACT, 0x5421),     /* FIONBIO */
    CALL_IF(ioctl, 1, EXACT, 0x5450),     /* FIONCLEX */
    CALL_IF(ioctl, 1, EXACT, 0x5451),     /* FIOCLEX */
    CALL_IF(ioctl, 1, EXACT, 0x40086200), /* DMA_BUF_IOCTL_SYNC */

    /* Files by name, checked by Landlock. Calls that it does not check are missing (modes, owners, times). */
    CALL(openat), CALL(newfstatat), CALL(statx), CALL(readlinkat), CALL(faccessat), NEW(faccessat2, 439),
    CALL(getdents64), CALL(statfs), CALL(getcwd), CALL(mkdirat), CALL(unlinkat), CALL(renameat2), CALL(linkat),
    CALL(umask),

    /* Sockets that this process has, such as the client's: SOCK_SEQPACKET, whose messages have no address. A client may
     * also send a datagram socket, whose messages have one: only Landlock forbids abstract addresses. */
    CALL(sendmsg), CALL(recvmsg), CALL(sendto), CALL(recvfrom), CALL(getsockopt), CALL(setsockopt), CALL(getsockname),
    CALL(getpeername), CALL(shutdown),
    {SYS_socketpair, 0, 0, {{1, EXACT, AF_UNIX}, {2, 0xf, SOCK_STREAM}}}, /* for fences */
    NEW(pidfd_open, 434), /* to notice a client's end; no allowed call can do more with it */

    /* Questions about this process. */
    CALL(getuid), CALL(geteuid), CALL(getgid), CALL(getegid), CALL(getresuid), CALL(getresgid), CALL(getgroups),
    CALL(getrusage), CALL(times), CALL(uname), CALL(sysinfo), CALL(getrandom), CALL_IF(prlimit64, 0, EXACT, 0),
    CALL_IF(prctl, 0, EXACT, PR_SET_NAME), CALL_IF(prctl, 0, EXACT, PR_GET_NAME),
    CALL_IF(prctl, 0, EXACT, 0x53564d41), /* PR_SET_VMA: names memory */

#ifdef __x86_64__
    /* Calls that aarch64 never had, and that C libraries of x86-64 still use. */
    CALL(open), CALL(stat), CALL(lstat), CALL(access), CALL(readlink), CALL(mkdir), CALL(rmdir), CALL(unlink), CALL(link), CALL(rename),
    CALL(renameat), CALL(getdents), CALL(poll), CALL(select), CALL(pipe), CALL(dup2),
    CALL(eventfd), CALL(getrlimit), CALL(time), CALL(pause), CALL(getpgrp),
    CALL_IF(arch_prctl, 0, 0xfffffff0u, 0x1020), /* ARCH_*_XCOMP_*: permission to use AMX */
#else
    CALL(renameat),
#endif

    /* For devices that start programs, which get the same walls. */
    CALL_FOR(NNB_MAY_EXECUTE, execve), CALL_FOR(NNB_MAY_EXECUTE, wait4),
    CALL_FOR(NNB_MAY_EXECUTE, setsid), CALL_FOR(NNB_MAY_EXECUTE, setpgid), CALL_FOR(NNB_MAY_EXECUTE, getpgid),
    CALL_FOR(NNB_MAY_EXECUTE, chdir), CALL_FOR(NNB_MAY_EXECUTE, kill), CALL_FOR(NNB_MAY_EXECUTE, tgkill),
    CALL_FOR(NNB_MAY_EXECUTE, tkill),
    {SYS_clone, NNB_MAY_EXECUTE, 0, {{1, NAMESPACES, 0}}},
#ifdef __x86_64__
    CALL_FOR(NNB_MAY_EXECUTE, vfork), CALL_FOR(NNB_MAY_EXECUTE, fork), CALL_FOR(NNB_MAY_EXECUTE, arch_prctl),
#endif

    /* For devices that use the network: TCP and UDP, but no other sockets; and epoll, with which their libraries wait.
     * Others lack epoll, because the kernel limits its watches per user, not per process. */
    CALL_FOR(NNB_MAY_CONNECT, epoll_create1), CALL_FOR(NNB_MAY_CONNECT, epoll_ctl),
    CALL_FOR(NNB_MAY_CONNECT, epoll_pwait),
#ifdef __x86_64__
    CALL_FOR(NNB_MAY_CONNECT, epoll_create), CALL_FOR(NNB_MAY_CONNECT, epoll_wait),
#endif
    CALL_FOR(NNB_MAY_CONNECT, connect), CALL_FOR(NNB_MAY_CONNECT, bind), CALL_FOR(NNB_MAY_CONNECT, listen),
    CALL_FOR(NNB_MAY_CONNECT, accept), CALL_FOR(NNB_MAY_CONNECT, accept4), CALL_FOR(NNB_MAY_CONNECT, sendmmsg),
    SOCKET(SOCK_STREAM, 0), SOCKET(SOCK_STREAM, IPPROTO_TCP), SOCKET(SOCK_DGRAM, 0), SOCKET(SOCK_DGRAM, IPPROTO_UDP),

    /* No library calls these, so a call ends the process at once. */
    NOT(SECCOMP_RET_KILL_PROCESS, init_module), NOT(SECCOMP_RET_KILL_PROCESS, finit_module),
    NOT(SECCOMP_RET_KILL_PROCESS, delete_module), NOT(SECCOMP_RET_KILL_PROCESS, kexec_load),
    NOT(SECCOMP_RET_KILL_PROCESS, reboot),
};
/* clang-format on */

#define ROWS (sizeof table / sizeof *table)
#define MOST 12 /* maximum instructions of a row */
#define LOAD(field) (struct sock_filter) BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, field))
#define RETURN(act) (struct sock_filter) BPF_STMT(BPF_RET | BPF_K, act)
#define IF(how, value, yes, no) (struct sock_filter) BPF_JUMP(BPF_JMP | (how) | BPF_K, value, yes, no)

/* Writes the instructions of a row. The call's number is loaded before them, and again at their end. */
static int compile(struct sock_filter *at, const struct row *row)
{
    struct sock_filter *const begin = at++;
    int checks = 0;
    for (int i = 0; i < 3 && row->check[i].argument_1; i++, checks++) {
        uint32_t value = row->check[i].value == OWN_PID ? (uint32_t)getpid() : row->check[i].value;
        *at++ = LOAD(args[row->check[i].argument_1 - 1]); /* the lower half, as both machines are little-endian */
        *at++ = (struct sock_filter)BPF_STMT(BPF_ALU | BPF_AND | BPF_K, row->check[i].mask);
        *at++ = IF(BPF_JEQ, value, 0, 0); /* the jump is set below, when its target is known */
    }
    *at++ = RETURN(row->act ? row->act : SECCOMP_RET_ALLOW);
    for (struct sock_filter *check = begin + 3; check < at - 1; check += 3)
        check->jf = (uint8_t)(at - 1 - check);
    if (checks)
        *at++ = LOAD(nr);
    *begin = IF(BPF_JEQ, (uint32_t)row->number, 0, (uint8_t)(at - begin - 1));
    return (int)(at - begin);
}

int nnb_seccomp_close(uint32_t may)
{
    if (!ARCH)
        return -ENOSYS;
    static struct sock_filter code[8 + MOST * ROWS];
    struct sock_filter *at = code;
    *at++ = LOAD(arch);
    *at++ = IF(BPF_JEQ, ARCH, 1, 0);
    *at++ = RETURN(SECCOMP_RET_KILL_PROCESS); /* calls of another machine have other numbers */
    *at++ = LOAD(nr);
    *at++ = IF(BPF_JGE, X32, 0, 1);
    *at++ = RETURN(SECCOMP_RET_KILL_PROCESS);
    for (size_t i = 0; i < ROWS; i++)
        if ((table[i].may & may) == table[i].may)
            at += compile(at, &table[i]);
    *at++ = IF(BPF_JGE, ENOSYS_FROM, 0, 1);
    *at++ = RETURN(FAILS(ENOSYS));
    *at++ = RETURN(FAILS(EPERM));
    struct sock_fprog program = {(unsigned short)(at - code), code};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0)
        return -errno;
    /* SPEC_ALLOW, because before Linux 5.16 a filter would slow down every thread. */
    long rc = syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC | SECCOMP_FILTER_FLAG_SPEC_ALLOW,
                      &program);
    return rc < 0 ? -errno : rc ? -ESRCH : 0;
}
