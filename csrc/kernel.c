/* Runs of a kernel, and of several kernels as one.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include <string.h>

#include "nnburst.h"

#define MOST_DOUBLED 10u /* a batch that always fails is tried once in a thousand runs */

int nnb_kernel_run(nnb_kernel *k, uint64_t deadline_ns) { return k->run(k, deadline_ns); }

static int do_nothing(nnb_kernel *k, uint64_t deadline_ns)
{
    (void)k;
    (void)deadline_ns;
    return 0;
}

nnb_kernel *nnb_kernel_noop(void)
{
    static nnb_kernel noop = {.run = do_nothing};
    return &noop;
}

int nnb_batch_run(nnb_kernel *const *kernels, uint32_t n, uint64_t deadline_ns)
{
    nnb_batch *b = kernels[0]->batch;
    if (b->rests) {
        b->rests--;
        return -1;
    }
    for (uint32_t a = 0; a < b->n_inputs; a++)
        for (uint32_t i = 0; i < n; i++)
            memcpy(b->stacks[a] + i * b->nbytes[a], kernels[i]->arguments[a], b->nbytes[a]);
    int status = b->runs[n]->run(b->runs[n], deadline_ns);
    for (uint32_t a = b->n_inputs; !status && a < b->n_arguments; a++)
        for (uint32_t i = 0; i < n; i++)
            memcpy(kernels[i]->arguments[a], b->stacks[a] + i * b->nbytes[a], b->nbytes[a]);
    if (!status)
        b->n_failed = 0;
    else
        b->rests = (1u << (b->n_failed < MOST_DOUBLED ? b->n_failed++ : MOST_DOUBLED)) - 1;
    return status;
}
