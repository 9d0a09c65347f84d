/* The functions of a burst's server that a group uses: access to channels, and the parts of a run.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef NNB_SERVER_H
#define NNB_SERVER_H

#include "nnb_channel.h"

/* The channel of requests. The thread that has the server may poll it. */
nnb_channel *nnb_server_inbox(nnb_server *s);
/* The channel of answers. */
nnb_channel *nnb_server_outbox(nnb_server *s);
/* Notes that the thread which polls this server also serves others, so that its time does not count as polling. */
void nnb_server_share_thread(nnb_server *s);
/* Returns the kernel of the request at hand, which has not run. */
nnb_kernel *nnb_server_kernel(const nnb_server *s);
int nnb_server_ran(nnb_server *s, int id);               /* ends a request that ran together with others */
void nnb_server_ran_together(nnb_server *s, uint32_t n); /* n: requests of the joint run, this one included */
/* Returns 1 if the last request could run together with others: the next one is likely to be able to, too. */
int nnb_server_joins(const nnb_server *s);

#endif
