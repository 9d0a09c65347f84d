/* Short time slices for threads that serve many clients, so that each thread runs soon after a wake.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#define _GNU_SOURCE
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "nnb_group.h"

#define SHORT_NS 100000u /* the kernel's least slice */
#define RESET_ON_FORK 1u /* SCHED_FLAG_RESET_ON_FORK, which not all C libraries have */

/* The kernel's struct sched_attr, which not all C libraries have. */
typedef struct attributes {
    uint32_t size, policy;
    uint64_t flags;
    int32_t nice;
    uint32_t priority;
    uint64_t runtime, deadline, period;
} attributes;

void nnb_ask_for_short_slices(void)
{
    attributes a = {.size = sizeof(a)};
    if (syscall(SYS_sched_getattr, 0, &a, sizeof(a), 0) < 0 || a.policy != SCHED_OTHER)
        return;
    a.runtime = SHORT_NS;
    if (a.nice >= 0)                      /* the reset would undo a negative nice value, too */
        a.flags |= RESET_ON_FORK;         /* threads that this thread starts compute */
    syscall(SYS_sched_setattr, 0, &a, 0); /* the kernel may refuse: then slices stay long */
}
