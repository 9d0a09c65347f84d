/* Running a kernel, and the one of a model that does nothing.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include <stddef.h>

#include "nnburst.h"

static int run(nnb_kernel *k, uint64_t deadline_ns)
{
    (void)k, (void)deadline_ns;
    return 0;
}

static const char *sentence(nnb_kernel *k)
{
    (void)k;
    return NULL;
}

static void destroy(nnb_kernel *k) { (void)k; }

static nnb_kernel noop = {run, sentence, destroy};

nnb_kernel *nnb_noop_kernel(void) { return &noop; }

int nnb_kernel_run(nnb_kernel *k, uint64_t deadline_ns) { return k->run(k, deadline_ns); }
