/* Shared memory objects: sealed memfds, and mappings that survive if a peer truncates the file.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * The SIGBUS guard
 *   If a mapped file is truncated, an access beyond its end raises SIGBUS and would end the process. So does an access
 *   to a page for which a full file system has no room. A sealed memfd (F_SEAL_SHRINK) needs no guard. Another object
 *   is entered in a fixed table if the caller that maps it checks the count of faults after each use: a device after
 *   its runs, a queue after its transactions. The handler maps anonymous zero memory over the missing page and counts
 *   the fault; then the instruction is repeated. Faults elsewhere go to the handler that was installed before. A view
 *   for the program itself has no guard, because its writes would be lost without notice.
 *
 *   The handler runs in any thread that touched the page, at any instruction. It takes no lock, allocates nothing and
 *   calls only mmap, sigaction and tgkill. The table never moves. An entry is claimed with one compare-and-swap,
 *   becomes visible with one release store and is withdrawn *before* the pages are unmapped. So the handler never maps
 *   zeros over a range that has a new owner.
 */
#define _GNU_SOURCE
#include "nnb_atomic.h"
#include "nnburst.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/memfd.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>

#ifndef MFD_NOEXEC_SEAL /* older headers lack it */
#define MFD_NOEXEC_SEAL 0x8u
#endif
#define HUGETLBFS_MAGIC_NUMBER 0x958458f6L

/* ---- objects -------------------------------------------------------------------------------------------------- */

int nnb_memfd_create(const char *name, uint64_t size, int seals)
{
    if (size == 0)
        return -EINVAL;
    if (size > INT64_MAX)
        return -EOVERFLOW;
    int fd = (int)syscall(SYS_memfd_create, name, MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_NOEXEC_SEAL);
    /* Before Linux 6.3 the flag is unknown. The memfd is then executable, which does no harm. */
    if (fd < 0 && errno == EINVAL)
        fd = (int)syscall(SYS_memfd_create, name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0)
        return -errno;
    if (ftruncate(fd, (off_t)size) != 0 || fcntl(fd, F_ADD_SEALS, seals) != 0) {
        int error = errno;
        close(fd);
        return -error;
    }
    return fd;
}

int nnb_seals(int fd)
{
    int seals = fcntl(fd, F_GET_SEALS);
    if (seals >= 0)
        return seals;
    return errno == EINVAL ? 0 : -errno; /* a file system without seals */
}

int64_t nnb_fd_size(int fd)
{
    struct stat st;
    if (fstat(fd, &st) != 0)
        return -errno;
    if (S_ISREG(st.st_mode))
        return st.st_size;
    /* Only lseek tells the size of dma-bufs and block devices. Restore the position, which may be shared. */
    off_t here = lseek(fd, 0, SEEK_CUR);
    off_t end = lseek(fd, 0, SEEK_END);
    if (end < 0)
        return errno == ESPIPE ? -ENODEV : -errno;
    if (here >= 0)
        lseek(fd, here, SEEK_SET);
    return end;
}

int64_t nnb_fd_filesystem(int fd)
{
    struct statfs fs;
    if (fstatfs(fd, &fs) != 0)
        return -errno;
    /* The number has 32 bits, but some machines extend its sign: CIFS has the top bit. */
    return (int64_t)((uint64_t)fs.f_type & 0xffffffffu);
}

/* ---- the guard table ------------------------------------------------------------------------------------------ */

#ifndef GUARDS
#define GUARDS 4096
#endif

/* States of an entry: `turn` modulo 3. Each step adds one, so that no value of `turn` occurs twice. */
enum { GUARD_FREE, GUARD_CLAIMED, GUARD_ARMED, GUARD_STATES };

typedef struct guard {
    nnb_a64 turn;
    nnb_a64 base;
    nnb_a64 end;
    nnb_a64 granule; /* page size of the object: each fault replaces so many bytes */
    nnb_a64 prot;
    nnb_a64 faults;
} guard;

static guard guards[GUARDS];

static struct sigaction previous_action;

/* Ends the process as without this handler. With the default action, the faulting instruction is repeated, so that
 * the core dump shows the right place. A SIGBUS that was *sent* is sent again. */
static void default_action(int sig, const siginfo_t *info)
{
    struct sigaction action = {.sa_handler = SIG_DFL};
    sigaction(sig, &action, NULL);
    if (info->si_code <= 0)
        syscall(SYS_tgkill, getpid(), (pid_t)syscall(SYS_gettid), sig);
}

static void chain(int sig, siginfo_t *info, void *context)
{
    if (previous_action.sa_flags & SA_SIGINFO) {
        previous_action.sa_sigaction(sig, info, context);
    } else if (previous_action.sa_handler == SIG_IGN) {
        /* As in the kernel, a real fault cannot be ignored. */
        if (info->si_code > 0)
            default_action(sig, info);
    } else if (previous_action.sa_handler == SIG_DFL) {
        default_action(sig, info);
    } else {
        previous_action.sa_handler(sig);
    }
}

typedef struct guarded {
    uint64_t base, end, granule;
    int prot;
} guarded;

/* Copies an entry for the handler. All fields come from one owner. 0: the entry has no owner. */
static int look_at(guard *g, guarded *out)
{
    uint64_t turn = nnb_load_acquire(&g->turn); /* SYNC POINT: guard_add <-> absorb */
    if (turn % GUARD_STATES != GUARD_ARMED)
        return 0;
    out->base = nnb_load_relaxed(&g->base);
    out->end = nnb_load_relaxed(&g->end);
    out->granule = nnb_load_relaxed(&g->granule);
    out->prot = (int)nnb_load_relaxed(&g->prot);
    nnb_fence_acquire();                       /* SYNC POINT: guard_add <-> absorb */
    return nnb_load_relaxed(&g->turn) == turn; /* else another thread changes the entry for its mapping */
}

static int lay_zeros(guard *g, const guarded *m, uint64_t address)
{
    /* The raw system call, because a sanitizer's wrapper of mmap may not be called in a signal handler. */
    long page = syscall(SYS_mmap, m->base + (address - m->base) / m->granule * m->granule, m->granule, m->prot,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0L);
    if (page == -1)
        return 0;
    nnb_add_relaxed(&g->faults, 1);
    return 1;
}

static int absorb(uint64_t address)
{
    guarded m;
    for (uint32_t i = 0; i < GUARDS; i++)
        if (look_at(&guards[i], &m) && address >= m.base && address < m.end)
            return lay_zeros(&guards[i], &m, address);
    return 0;
}

/* Returns 1 if a load from the address would fault: the kernel reads the set before it checks `how`. */
static int is_gone(uint64_t address)
{
    return syscall(SYS_rt_sigprocmask, ~0, address, NULL, sizeof(uint64_t)) < 0 && errno == EFAULT;
}

/* Maps zeros over all missing pages in guarded ranges. */
static int absorb_all(void)
{
    int found = 0;
    guarded m;
    for (uint32_t i = 0; i < GUARDS; i++) {
        if (!look_at(&guards[i], &m))
            continue;
        for (uint64_t address = m.end; address > m.base;) {
            address -= m.granule;
            if (is_gone(address))
                found |= lay_zeros(&guards[i], &m, address);
            /* A truncated file lacks its last pages, so stop at an existing page, unless zeros were mapped there before. */
            else if (!nnb_load_relaxed(&guards[i].faults))
                break;
        }
    }
    return found;
}

/* A handler that was installed later, e.g. by faulthandler.enable(), reports a fault, restores this handler and sends
 * the signal again, without the address. So this handler maps zeros over all missing pages, and the process goes on. */
static void on_sigbus(int sig, siginfo_t *info, void *context)
{
    int saved_errno = errno;
    int own = info->si_code <= 0 && info->si_pid == getpid();
    if (!(info->si_code > 0 ? absorb((uintptr_t)info->si_addr) : own && absorb_all()))
        chain(sig, info, context);
    errno = saved_errno;
}

static void install_handler(void)
{
    struct sigaction action = {.sa_sigaction = on_sigbus, .sa_flags = SA_SIGINFO | SA_ONSTACK | SA_RESTART};
    sigemptyset(&action.sa_mask);
    /* Read the old action first, because the new handler may run as soon as it is installed. */
    sigaction(SIGBUS, NULL, &previous_action);
    sigaction(SIGBUS, &action, NULL);
}

static int guard_add(void *base, uint64_t length, uint64_t granule, int prot)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, install_handler);
    for (uint32_t i = 0; i < GUARDS; i++) {
        guard *g = &guards[i];
        uint64_t turn = nnb_load_relaxed(&g->turn);
        /* SYNC POINT: arm <-> claim */
        if (turn % GUARD_STATES != GUARD_FREE || !nnb_cas_acquire(&g->turn, turn, turn + 1))
            continue;
        nnb_fence_release(); /* SYNC POINT: guard_add <-> absorb */
        nnb_store_relaxed(&g->base, (uintptr_t)base);
        nnb_store_relaxed(&g->end, (uintptr_t)base + length);
        nnb_store_relaxed(&g->granule, granule);
        nnb_store_relaxed(&g->prot, (uint64_t)prot);
        nnb_store_relaxed(&g->faults, 0);
        nnb_add_release(&g->turn, 1); /* SYNC POINTS: guard_add <-> absorb, arm <-> claim */
        return (int)i;
    }
    return -ENOMEM;
}

static void guard_remove(int index) { nnb_add_relaxed(&guards[index].turn, 1); }

/* ---- mapping --------------------------------------------------------------------------------------------------- */

/* Returns the page size of the object: the machine's, or the huge page size of a hugetlb file. */
static uint64_t granule_of(int fd)
{
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    struct statfs fs;
    if (fstatfs(fd, &fs) == 0 && (unsigned long)fs.f_type == HUGETLBFS_MAGIC_NUMBER)
        return (uint64_t)fs.f_bsize;
    return page;
}

int nnb_map(nnb_mapping *out, int fd, uint64_t offset, uint64_t size, int prot, int guarded)
{
    *out = (nnb_mapping){.guard = -1};
    if (size == 0 || (prot & ~(PROT_READ | PROT_WRITE)) != 0)
        return -EINVAL;
    int64_t object = nnb_fd_size(fd);
    if (object < 0)
        return (int)object;
    /* mmap accepts a region beyond the end, and accesses fault later. */
    if (offset > (uint64_t)object || size > (uint64_t)object - offset)
        return -EOVERFLOW;
    int seals = nnb_seals(fd);
    if (seals < 0)
        return seals;

    uint64_t granule = granule_of(fd);
    uint64_t slop = offset % granule; /* mmap needs a page-aligned offset */
    uint64_t length = (slop + size + granule - 1) / granule * granule;
    void *base = mmap(NULL, length, prot, MAP_SHARED, fd, (off_t)(offset - slop));
    if (base == MAP_FAILED)
        return -errno;

    int index = -1;
    /* Despite seals, there may be no free huge page at a fault. */
    if (guarded && (!(seals & F_SEAL_SHRINK) || granule != (uint64_t)sysconf(_SC_PAGESIZE))) {
        index = guard_add(base, length, granule, prot);
        if (index < 0) {
            munmap(base, length);
            return index;
        }
    }
    *out = (nnb_mapping){.addr = (uint8_t *)base + slop, .size = size, .base = base, .length = length, .guard = index};
    return 0;
}

void nnb_unmap(nnb_mapping *m)
{
    if (m == NULL || m->base == NULL)
        return;
    if (m->guard >= 0)
        guard_remove(m->guard); /* first, so that the handler no longer uses the range */
    munmap(m->base, m->length);
    *m = (nnb_mapping){.guard = -1};
}

uint64_t nnb_map_faults(const nnb_mapping *m)
{
    if (m->guard < 0)
        return 0;
    return nnb_load_relaxed(&guards[m->guard].faults);
}

int nnb_make_read_only(void *address, uint64_t length) { return mprotect(address, length, PROT_READ) < 0 ? -errno : 0; }

int nnb_give_back(void *address, uint64_t length)
{
    if (mprotect(address, length, PROT_NONE) < 0)
        return -errno;
    return madvise(address, length, MADV_DONTNEED) < 0 ? -errno : 0;
}
