/* A peer truncates a mapped file: every thread reads zeros instead of dying, and the faults are counted. */
#define _GNU_SOURCE
#include "check.h" /* first: asks for GNU extensions */

#include <stdatomic.h>
#include <sys/mman.h>

#define THREADS 4
#define PAGES 64

static nnb_mapping mapping;
static uint64_t page;
static atomic_int next_part;

static void *reader(void *argument)
{
    (void)argument;
    uint64_t begin = (uint64_t)atomic_fetch_add(&next_part, 1) * (PAGES / THREADS) * page, sum = 0;
    for (uint64_t i = 0; i < PAGES / THREADS * page; i++)
        sum += ((volatile uint8_t *)mapping.addr)[begin + i];
    CHECK_EQ(sum, 0);
    return NULL;
}

/* Maps and unmaps all the time: guard entries come and go while others fault. */
static void *churn(void *argument)
{
    atomic_int *stop = argument;
    int fd = memfd_create("churn", 0);
    CHECK_EQ(ftruncate(fd, (off_t)page), 0);
    while (!atomic_load(stop)) {
        nnb_mapping m;
        CHECK_EQ(nnb_map(&m, fd, 0, page, PROT_READ | PROT_WRITE, 1), 0);
        m.addr[0] = 1;
        CHECK_EQ(nnb_map_faults(&m), 0);
        nnb_unmap(&m);
    }
    close(fd);
    return NULL;
}

int main(void)
{
    if (UNDER_SANITIZER)
        SKIP("sanitizers handle SIGBUS themselves");
    watchdog();
    page = (uint64_t)sysconf(_SC_PAGESIZE);
    atomic_int stop = 0;
    pthread_t busy = start(churn, &stop);
    for (int round = 0; round < 50; round++) {
        int fd = memfd_create("victim", 0);
        CHECK_EQ(ftruncate(fd, (off_t)(PAGES * page)), 0);
        CHECK_EQ(nnb_map(&mapping, fd, 0, PAGES * page, PROT_READ | PROT_WRITE, 1), 0);
        CHECK(mapping.guard >= 0);
        memset(mapping.addr, 0xAA, PAGES * page);
        CHECK_EQ(ftruncate(fd, 0), 0);
        atomic_store(&next_part, 0);
        pthread_t threads[THREADS];
        for (int i = 0; i < THREADS; i++)
            threads[i] = start(reader, NULL);
        for (int i = 0; i < THREADS; i++)
            finish(threads[i]);
        CHECK_EQ(nnb_map_faults(&mapping), PAGES);
        mapping.addr[5 * page] = 3; /* writable, and private from now on */
        CHECK_EQ(mapping.addr[5 * page], 3);
        nnb_unmap(&mapping);
        close(fd);
    }
    atomic_store(&stop, 1);
    finish(busy);
    return 0;
}
