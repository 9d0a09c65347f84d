/* What every C test needs: CHECK, a watchdog, threads, a queue in a memfd.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef CHECK_H
#define CHECK_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "nnburst.h"

#define CHECK(condition)                                                           \
    do {                                                                           \
        if (!(condition)) {                                                        \
            fprintf(stderr, "%s:%d: CHECK(%s)\n", __FILE__, __LINE__, #condition); \
            _exit(1);                                                              \
        }                                                                          \
    } while (0)

/* Compares two integers and shows both. */
#define CHECK_EQ(got, want)                                                                          \
    do {                                                                                             \
        long long got_ = (long long)(got), want_ = (long long)(want);                                \
        if (got_ != want_) {                                                                         \
            fprintf(stderr, "%s:%d: %s is %lld, not %lld\n", __FILE__, __LINE__, #got, got_, want_); \
            _exit(1);                                                                                \
        }                                                                                            \
    } while (0)

#define SKIP(reason)                   \
    do {                               \
        printf("     (%s)\n", reason); \
        return 77;                     \
    } while (0)

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define UNDER_SANITIZER 1
#else
#define UNDER_SANITIZER 0
#endif

/* A hang is a failure: SIGALRM ends the program. */
static inline void watchdog(void)
{
    const char *patience = getenv("NNBURST_TEST_PATIENCE");
    alarm(patience ? (unsigned)atoi(patience) : 60);
}

static inline pthread_t start(void *(*function)(void *), void *argument)
{
    pthread_t thread;
    CHECK_EQ(pthread_create(&thread, NULL, function, argument), 0);
    return thread;
}

static inline void finish(pthread_t thread) { CHECK_EQ(pthread_join(thread, NULL), 0); }

/* Both ends of these tests are threads on one handle and so on one mapping: only then can ThreadSanitizer see that
 * they touch the same memory. One thread writes, one reads. */
static inline nnb_mq *new_queue(uint64_t count, uint32_t quantum, uint32_t flavour, uint32_t layout, uint32_t options)
{
    nnb_grantor grantors[5];
    uint64_t size;
    int n = nnb_mq_layout(count, quantum, flavour, layout, 1, grantors, &size);
    CHECK(n >= 4);
    int fd = nnb_memfd_create("test", size, NNB_SEALS_FIXED_SIZE);
    CHECK(fd >= 0);
    nnb_mq *q;
    CHECK_EQ(nnb_mq_open(&q, grantors, (uint32_t)n, &fd, 1, quantum, flavour, options | NNB_MQ_RESET), 0);
    close(fd);
    return q;
}

#endif
