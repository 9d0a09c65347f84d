/* What a group needs of a burst's server; private to burst_server.c and group*.c.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef NNB_SERVER_H
#define NNB_SERVER_H

#include "nnb_channel.h"

/* The channel of requests. The thread that has the server at the time may poll it. */
nnb_channel *nnb_server_inbox(nnb_server *s);
/* Where answers go out. */
nnb_channel *nnb_server_outbox(nnb_server *s);
/* Tells that no thread of its own polls it: such time does not count as polling. */
void nnb_server_share_thread(nnb_server *s);
/* The kernel of the request at hand, which has not run; and the end of it if it has run together with others. */
nnb_kernel *nnb_server_kernel(const nnb_server *s);
int nnb_server_ran(nnb_server *s, int id);
void nnb_server_ran_together(nnb_server *s, uint32_t n); /* with so many, itself included */
/* 1 if the last request could run so: the next one is likely to be like it. */
int nnb_server_joins(const nnb_server *s);

#endif
