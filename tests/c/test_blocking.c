/* Blocking transfers of unequal sizes through a tiny ring: nobody oversleeps, nothing is lost; deadlines hold. */
#include "check.h"

#define TOTAL (UNDER_SANITIZER ? 4000u : 40000u) /* divisible by 2, 4 and 5 */
#define CAPACITY 6 /* a writer of 2 and a reader of 5 would wait for each other for ever in a ring of 5 */

static void *writer(void *argument)
{
    nnb_mq *q = argument;
    for (uint32_t n = 0; n < TOTAL; n += 2) {
        uint32_t data[2] = {n, n + 1};
        int rc;
        do
            rc = nnb_mq_write_blocking(q, data, 2, NNB_EVENT_NOT_FULL, NNB_EVENT_NOT_EMPTY, 0, NULL);
        while (rc == -ERESTART);
        CHECK_EQ(rc, 0);
    }
    return NULL;
}

static void run(uint32_t layout, uint32_t step, uint32_t options)
{
    /* Six elements: with five, a reader that wants 5 of 4 and a writer that wants room for 2 of 1 would wait for each
     * other, by the rule that nothing is transferred in part. */
    nnb_mq *q = new_queue(6, 4, NNB_SYNCHRONIZED, layout, options);
    pthread_t thread = start(writer, q);
    for (uint32_t n = 0; n < TOTAL; n += step) {
        uint32_t data[5];
        int rc;
        do
            rc = nnb_mq_read_blocking(q, data, step, NNB_EVENT_NOT_FULL, NNB_EVENT_NOT_EMPTY, 0, NULL);
        while (rc == -ERESTART);
        CHECK_EQ(rc, 0);
        for (uint32_t i = 0; i < step; i++)
            CHECK_EQ(data[i], n + i);
    }
    finish(thread);

    uint32_t data[7] = {0};
    uint64_t deadline = nnb_now_ns() + 20000000;
    int rc;
    do
        rc = nnb_mq_read_blocking(q, data, 1, 1, 2, deadline, NULL);
    while (rc == -ERESTART);
    CHECK_EQ(rc, -ETIMEDOUT);
    CHECK(nnb_now_ns() >= deadline);
    CHECK_EQ(nnb_mq_read_blocking(q, data, 1, 1, 2, 1, NULL), -ETIMEDOUT);
    CHECK_EQ(nnb_mq_read_blocking(q, data, 7, 1, 2, 1, NULL), -EMSGSIZE);
    CHECK_EQ(nnb_mq_read_blocking(q, data, 1, 1, 0, 1, NULL), -EINVAL);
    CHECK_EQ(nnb_mq_write_blocking(q, data, 1, 0, 2, 1, NULL), -EINVAL);
    CHECK_EQ(nnb_mq_write_blocking(q, data, 6, 1, 2, 1, NULL), 0);
    CHECK_EQ(nnb_mq_write_blocking(q, data, 1, 1, 2, 1, NULL), -ETIMEDOUT);
    CHECK_EQ(nnb_mq_write_blocking(q, data, 1, 1, 2, 0, NULL), -ERESTART); /* so that Ctrl-C is noticed */
    nnb_mq_close(q);
}

int main(void)
{
    watchdog();
    run(NNB_LAYOUT_LINES, 5, 0);
    run(NNB_LAYOUT_LINES, 1, 0);
    run(NNB_LAYOUT_COMPAT, 4, 0);
    run(NNB_LAYOUT_LINES, 5, NNB_MQ_EXCLUSIVE);
    return 0;
}
