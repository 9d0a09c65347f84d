/* The turn between two steps of one request: outputs go to their places, and the next inputs are fetched.
 *
 * SPDX-License-Identifier: Apache-2.0
 */

#include "nnb_internal.h"

#define LONG_NS 1000000u

int nnb_steps_turn(nnb_steps *s, uint64_t step)
{
    const nnb_step_argument *a = s->arguments, *outputs = a + s->n_inputs, *end = a + s->n;
    if (step > 0)
        for (const nnb_step_argument *o = outputs; o < end; o++)
            memcpy(o->all + (step - 1) * o->stride, o->one, o->nbytes);
    if (step == s->count)
        return 0;
    if (s->gone && nnb_load32_relaxed((const nnb_a32 *)s->gone)) /* relaxed: no other data depends on it */
        return -EPIPE;
    if (s->server && nnb_server_is_revoked(s->server))
        return s->deadline_ns ? -ETIMEDOUT : -EPIPE;
    if (s->deadline_ns) {
        uint64_t now = nnb_now_ns();
        if (now >= s->deadline_ns)
            return -ETIMEDOUT;
        if (step > 0)
            s->lasted_ns = now - s->turned_ns;
        s->turned_ns = now;
    }
    for (const nnb_step_argument *i = a; i < outputs; i++)
        memcpy(i->one, i->all + step * i->stride, i->nbytes);
    return s->deadline_ns && s->lasted_ns > LONG_NS;
}

void nnb_word_raise(uint32_t *word) { nnb_store32_relaxed((nnb_a32 *)word, 1); }
