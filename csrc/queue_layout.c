/* Where the parts of a new queue go in its file. Attaching accepts any layout (message_queue.c draws this one).
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#define _GNU_SOURCE
#include <errno.h>
#include <string.h>
#include <unistd.h>

#include "nnb_internal.h"

#define LINE NNB_CACHE_LINE

static uint64_t align_up(uint64_t v, uint64_t to) { return (v + to - 1) & ~(to - 1); }

int nnb_mq_layout(uint64_t count, uint32_t quantum, uint32_t flavour, uint32_t layout, int with_event,
                  nnb_grantor *out, uint64_t *region_size)
{
    if (!count || !quantum || !out || !region_size || layout > NNB_LAYOUT_STAMPED ||
        (flavour != NNB_SYNCHRONIZED && flavour != NNB_UNSYNCHRONIZED))
        return -EINVAL;
    if (!with_event && layout != NNB_LAYOUT_COMPAT)
        return -EINVAL;
    /* Offsets are 32 bits wide in the format and signed in one of its dialects. */
    if (count > (uint64_t)INT32_MAX / quantum)
        return -EOVERFLOW;
    uint64_t bytes = count * quantum, end;
    int n = 3;
    memset(out, 0, sizeof(*out) * 5);
    out[NNB_GRANTOR_READ].extent = out[NNB_GRANTOR_WRITE].extent = 8;
    out[NNB_GRANTOR_DATA].extent = bytes;
    if (layout == NNB_LAYOUT_COMPAT) {
        out[NNB_GRANTOR_WRITE].offset = 8;
        out[NNB_GRANTOR_DATA].offset = 16;
        end = align_up(16 + bytes, 8);
        if (with_event) {
            out[NNB_GRANTOR_EVENT].offset = (uint32_t)end;
            out[NNB_GRANTOR_EVENT].extent = 4;
            end += 4;
            n = 4;
        }
    } else {
        out[NNB_GRANTOR_WRITE].offset = LINE;
        out[NNB_GRANTOR_EVENT].offset = 2 * LINE;
        out[NNB_GRANTOR_EVENT].extent = 4;
        out[NNB_GRANTOR_DATA].offset = 3 * LINE;
        end = 3 * LINE + bytes;
        n = 4;
        if (flavour == NNB_UNSYNCHRONIZED) {
            out[NNB_GRANTOR_INTENT].offset = LINE + 8;
            out[NNB_GRANTOR_INTENT].extent = 8;
            n = 5;
        } else if (layout == NNB_LAYOUT_STAMPED) {
            out[NNB_GRANTOR_STAMP].offset = LINE + 8;
            out[NNB_GRANTOR_STAMP].extent = NNB_STAMP_BYTES;
            n = 5;
        }
    }
    *region_size = align_up(end, (uint64_t)sysconf(_SC_PAGESIZE));
    return end > INT32_MAX ? -EOVERFLOW : n;
}
