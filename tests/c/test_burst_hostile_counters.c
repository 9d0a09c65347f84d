/* Forged counters: each end notices, says -EBADMSG for good, and touches nothing outside the ring. */
#include "burst_pair.h"

static const uint64_t forged[] = {1, 23, 25, 24 * 33, 1u << 20, 1ull << 63, UINT64_MAX, UINT64_MAX - 23, UINT64_MAX / 2,
                                  12};

int main(void)
{
    watchdog();
    for (size_t i = 0; i < sizeof forged / sizeof *forged; i++) {
        /* the service forges the write counter of the results */
        burst_pair p = new_pair(32, 0, 0);
        nnb_execution *e = new_execution(p.client, 1);
        CHECK_EQ(nnb_execution_start(e), 0);
        *nnb_mq_write_counter(p.result) = forged[i];
        CHECK_EQ(nnb_execution_resume(e), -EBADMSG);
        *nnb_mq_write_counter(p.result) = 0;
        CHECK_EQ(nnb_execution_run(e), -EBADMSG);
        nnb_execution_destroy(e);
        end_pair(&p);

        /* the client forges the write counter of the requests */
        p = new_pair(32, 0, 0);
        *nnb_mq_write_counter(p.request) = forged[i];
        CHECK_EQ(nnb_server_try(p.server, 1), -EBADMSG);
        *nnb_mq_write_counter(p.request) = 0;
        CHECK_EQ(nnb_server_try(p.server, 1), -EBADMSG);
        end_pair(&p);

        /* the service forges the read counter of the requests: found when the ring seems full */
        p = new_pair(8, 0, 0);
        e = new_execution(p.client, 1); /* 10 datums of 8 */
        *nnb_mq_read_counter(p.request) = forged[i];
        CHECK_EQ(nnb_execution_run(e), -ENOBUFS);
        nnb_execution_destroy(e);
        end_pair(&p);

        /* each forges the write counter that is the other's own: the next send overwrites it, and nothing is lost */
        p = new_pair(32, 0, 0);
        e = new_execution(p.client, 1);
        *nnb_mq_write_counter(p.request) = forged[i];
        CHECK_EQ(nnb_execution_start(e), 0);
        CHECK_EQ(*nnb_mq_write_counter(p.request), 10 * NNB_DATUM_SIZE);
        CHECK(nnb_server_try(p.server, 1) >= 0);
        *nnb_mq_write_counter(p.result) = forged[i];
        CHECK_EQ(nnb_server_reply(p.server), 0);
        CHECK_EQ(nnb_execution_resume(e), 0);
        nnb_execution_destroy(e);
        end_pair(&p);

        /* each forges the read counter that is the other's own: found when it is moved */

        p = new_pair(32, 0, 0);
        e = new_execution(p.client, 1);
        CHECK_EQ(nnb_execution_start(e), 0);
        *nnb_mq_read_counter(p.request) = forged[i];
        CHECK_EQ(nnb_server_try(p.server, 1), -EBADMSG);
        CHECK_EQ(nnb_server_try(p.server, 1), -EBADMSG);
        nnb_execution_abandon(e);
        nnb_execution_destroy(e);
        end_pair(&p);

        p = new_pair(32, 0, 0);
        e = new_execution(p.client, 1);
        CHECK_EQ(nnb_execution_start(e), 0);
        CHECK(nnb_server_try(p.server, 1) >= 0);
        CHECK_EQ(nnb_server_reply(p.server), 0);
        *nnb_mq_read_counter(p.result) = forged[i];
        CHECK_EQ(nnb_execution_try(e, 1), -EBADMSG);
        CHECK_EQ(nnb_execution_run(e), -EBADMSG);
        nnb_execution_destroy(e);
        end_pair(&p);
    }

    /* the ring says it is full of one packet, and its header changes while it is being taken: the length that was
     * checked is the length that is used */
    burst_pair p = new_pair(32, 0, 0);
    nnb_execution *e = new_execution(p.client, 1);
    CHECK_EQ(nnb_execution_start(e), 0);
    uint32_t huge = UINT32_MAX;
    memcpy(p.request->ring + 4, &huge, 4);
    CHECK_EQ(nnb_server_try(p.server, 1), -EAGAIN); /* refused and answered */
    CHECK_EQ(nnb_execution_resume(e), 2);
    nnb_execution_destroy(e);
    end_pair(&p);
    return 0;
}
