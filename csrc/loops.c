/* Loops over elements in memory, one after the other: a kernel.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * What a loop computes is a function that its maker names, such as the inner loop of a function of NumPy's, which needs no
 * interpreter; the few steps between such functions, from one type to another, are loops of this file.
 */
#include <stdlib.h>

#include "nnb_internal.h"

typedef struct loops {
    nnb_kernel kernel;
    nnb_a32 is_cancelled;
    uint32_t n;
    nnb_loop loops[];
} loops;

static void go(const nnb_loop *l)
{
    for (uint64_t i = 0; i < l->times; i++) {
        char *args[NNB_LOOP_ARGS]; /* the function may change them */
        for (int k = 0; k < NNB_LOOP_ARGS; k++)
            args[k] = l->args[k] ? l->args[k] + (intptr_t)i * l->hops[k] : NULL;
        l->function(args, l->counts, l->strides, l->data);
    }
}

static int run(nnb_kernel *k, uint64_t deadline_ns)
{
    const loops *all = (const loops *)k;
    for (uint32_t i = 0; i < all->n; i++) {
        if (nnb_load32_relaxed(&all->is_cancelled) || (deadline_ns && nnb_now_ns() >= deadline_ns))
            return NNB_MISSED_DEADLINE;
        go(&all->loops[i]);
    }
    return 0;
}

static const char *sentence(nnb_kernel *k)
{
    (void)k;
    return "the execution's deadline has passed";
}

static void destroy(nnb_kernel *k) { free(k); }

int nnb_loops_create(nnb_kernel **out, const nnb_loop *list, uint32_t n)
{
    loops *all = calloc(1, sizeof(*all) + n * sizeof(*list));
    if (!all)
        return -ENOMEM;
    all->kernel = (nnb_kernel){.run = run, .sentence = sentence, .destroy = destroy};
    all->n = n;
    memcpy(all->loops, list, n * sizeof(*list));
    *out = &all->kernel;
    return 0;
}

void nnb_loops_cancel(nnb_kernel *k) { nnb_store32_relaxed(&((loops *)k)->is_cancelled, 1); }

/* ---- from one type to another ------------------------------------------------------------------------------------- */

void nnb_loop_take(char **args, const intptr_t *counts, const intptr_t *strides, void *table)
{
    const uint8_t *codes = (const uint8_t *)args[0];
    if (strides[1] == 1)
        for (intptr_t i = 0; i < counts[0]; i++)
            args[1][i] = ((const char *)table)[codes[i]];
    else
        for (intptr_t i = 0; i < counts[0]; i++)
            ((double *)(void *)args[1])[i] = ((const double *)table)[codes[i]];
}

static double element(const char *at, char type)
{
    switch (type) {
    case 'B':
        return *(const uint8_t *)at;
    case 'b':
        return *(const int8_t *)at;
    case 'H':
        return *(const uint16_t *)(const void *)at;
    case 'h':
        return *(const int16_t *)(const void *)at;
    case 'f':
        return (double)*(const float *)(const void *)at;
    default:
        return *(const double *)(const void *)at;
    }
}

void nnb_loop_centre(char **args, const intptr_t *counts, const intptr_t *strides, void *data)
{
    const nnb_centre *centre = data;
    const char *from = args[0];
    for (intptr_t i = 0; i < counts[0]; i++, from += strides[0]) {
        double value = element(from, centre->type) - centre->zero_point;
        if (strides[1] == sizeof(float))
            ((float *)(void *)args[1])[i] = (float)value;
        else
            ((double *)(void *)args[1])[i] = value;
    }
}

void nnb_loop_store(char **args, const intptr_t *counts, const intptr_t *strides, void *data)
{
    const double *from = (const double *)(const void *)args[0];
    uint32_t zero_point = (uint32_t)((const nnb_centre *)data)->zero_point;
    for (intptr_t i = 0; i < counts[0]; i++) {
        uint32_t code = (uint32_t)(int32_t)from[i] + zero_point; /* drops the fraction; what is too long is cut */
        if (strides[1] == 1)
            ((uint8_t *)args[1])[i] = (uint8_t)code;
        else
            ((uint16_t *)(void *)args[1])[i] = (uint16_t)code;
    }
}
