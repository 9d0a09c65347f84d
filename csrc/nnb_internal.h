/* Shared by the C files, not by users of the core.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef NNB_INTERNAL_H
#define NNB_INTERNAL_H

#include "nnb_atomic.h"
#include "nnburst.h"

#define NNB_SLICE_NS 100000000u /* longest wait inside one call */

struct nnb_mq {
    uint8_t *ring;
    uint64_t size; /* bytes, a multiple of quantum */
    uint64_t capacity;
    uint32_t quantum;
    uint32_t flavour;
    uint32_t options;
    int corrupt; /* sticky */
    int read_only;
    nnb_a64 *w, *r; /* shared; for an unsynchronized queue r points at own_r */
    nnb_a64 *intent; /* NULL when the layout has none */
    uint32_t *event;
    /* Private counters. Exclusive handles trust only these for their own role; w_off, r_off = counter mod size. */
    uint64_t own_w, w_off, own_r, r_off;
    uint64_t seen_w, seen_r; /* last validated value of the peer's counter (exclusive handles) */
    nnb_a64 private_r;
    uint64_t tx_write, tx_read; /* elements begun and not yet committed */
    nnb_mapping *maps;          /* one per fd */
    uint32_t n_maps;
};

/* Refreshes the view of the peer's counter on an exclusive synchronized handle and returns the bytes that can be
 * read, or -EBADMSG. Hot: called in the polling loop. */
static inline int64_t nnb_mq_poll(struct nnb_mq *q)
{
    uint64_t w = nnb_load_acquire(q->w); /* SYNC POINT: commit_write <-> available_to_read */
    uint64_t used = w - q->own_r;
    if (__builtin_expect(used == 0, 1))
        return 0;
    if (q->corrupt || used > q->size || used % q->quantum) {
        q->corrupt = 1;
        return -74; /* -EBADMSG */
    }
    q->seen_w = w;
    return (int64_t)used;
}

#endif
