/* A client and a server of one burst, on one mapping, for tests.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef BURST_PAIR_H
#define BURST_PAIR_H

#include "check.h"
#include "nnb_server.h"

typedef struct burst_pair {
    nnb_client *client;
    nnb_server *server;
    nnb_mq *request, *result; /* the client's handles: for looking at the rings, and for forging */
} burst_pair;

/* A second handle on the same mapping, as the other process would have on its own. ThreadSanitizer sees both ends
 * touch the same addresses this way. */
static inline nnb_mq *second_handle(const nnb_mq *q)
{
    nnb_mq *copy = malloc(sizeof(*copy));
    CHECK(copy != NULL);
    *copy = *q;
    copy->maps = NULL;
    copy->n_maps = 0;
    return copy;
}

static inline burst_pair new_pair_as(uint32_t layout, uint64_t length, uint64_t client_window_ns,
                                     uint64_t server_window_ns)
{
    uint32_t options = NNB_MQ_EXCLUSIVE | NNB_MQ_SEALED;
    burst_pair p;
    p.request = new_queue(length, NNB_DATUM_SIZE, NNB_SYNCHRONIZED, layout, options);
    p.result = new_queue(length, NNB_DATUM_SIZE, NNB_SYNCHRONIZED, layout, options);
    nnb_mq *request = second_handle(p.request), *result = second_handle(p.result);
    CHECK_EQ(nnb_client_create(&p.client, p.request, p.result, client_window_ns), 0);
    CHECK_EQ(nnb_server_create(&p.server, request, result, server_window_ns, 8), 0);
    return p;
}

static inline burst_pair new_pair(uint64_t length, uint64_t client_window_ns, uint64_t server_window_ns)
{
    return new_pair_as(NNB_LAYOUT_LINES, length, client_window_ns, server_window_ns);
}

/* The server first: its handles are views of the client's mapping. */
static inline void end_pair(burst_pair *p)
{
    nnb_server_destroy(p->server);
    nnb_client_destroy(p->client);
}

/* Two inputs, one output, two pools; `tag` tells requests apart. */
static inline nnb_execution *new_execution(nnb_client *c, uint32_t tag)
{
    nnb_argument arguments[3] = {{0, 0, tag, 16, 2, 0}, {1, 0, 0, 0, 0, 2}, {0, 1, 64, 16, 1, 2}};
    uint32_t dims[3] = {2, 2, 4};
    int32_t pools[2] = {7, 9};
    nnb_request r = {2, 1, 2, 3, arguments, dims, pools, 0};
    nnb_execution *e;
    CHECK_EQ(nnb_execution_create(&e, c, &r), 0);
    return e;
}

static inline int run_to_end(nnb_execution *e)
{
    int rc = nnb_execution_run(e);
    while (rc == -ERESTART)
        rc = nnb_execution_resume(e);
    return rc;
}

#endif
