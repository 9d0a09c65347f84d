/* Between two steps of one request: outputs go to their places, the next inputs are fetched.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#include <string.h>

#include "nnburst.h"

void nnb_steps_turn(const nnb_steps *s, uint64_t step)
{
    const nnb_step_argument *a = s->arguments, *outputs = a + s->n_inputs, *end = a + s->n;
    if (step > 0)
        for (const nnb_step_argument *o = outputs; o < end; o++)
            memcpy(o->all + (step - 1) * o->nbytes, o->one, o->nbytes);
    if (step < s->count)
        for (const nnb_step_argument *i = a; i < outputs; i++)
            memcpy(i->one, i->all + step * i->nbytes, i->nbytes);
}
