/* What a group needs of a burst's server: its channels, and the parts of a run.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef NNB_SERVER_H
#define NNB_SERVER_H

#include "nnb_channel.h"

/* requests; the thread that has the server at the time may poll it */
nnb_channel *nnb_server_inbox(nnb_server *s);
/* answers */
nnb_channel *nnb_server_outbox(nnb_server *s);
/* Notes that no thread of its own polls it: such time does not count as polling. */
void nnb_server_share_thread(nnb_server *s);
/* Return the kernel of the request at hand, which has not run; end it, if it has run together with others. */
nnb_kernel *nnb_server_kernel(const nnb_server *s);
int nnb_server_ran(nnb_server *s, int id);
void nnb_server_ran_together(nnb_server *s, uint32_t n); /* so many, itself included */
/* Returns 1 if the last request could run so: the next one is likely to be like it. */
int nnb_server_joins(const nnb_server *s);

#endif
