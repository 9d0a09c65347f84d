/* Regression: an exclusive reader that had read in place then read, by copying, an element that was not there: its
 * remembered W had stayed behind its own R, and the difference of the two is unsigned. */
#include "check.h"

int main(void)
{
    watchdog();
    nnb_mq *q = new_queue(2, 4, NNB_SYNCHRONIZED, NNB_LAYOUT_LINES, NNB_MQ_EXCLUSIVE);
    uint32_t value = 7;
    nnb_mq_region tx;
    CHECK_EQ(nnb_mq_write(q, &value, 1), 0);
    CHECK_EQ(nnb_mq_begin_read(q, 1, &tx), 0);
    CHECK_EQ(nnb_mq_commit_read(q, 1), 0);
    CHECK_EQ(nnb_mq_read(q, &value, 1), -EAGAIN);
    CHECK_EQ(nnb_mq_available_to_read(q), 0);
    nnb_mq_close(q);
    return 0;
}
