/* A write counter that changes while a write copies its bytes: the write notices, says -EBADMSG for good, and leaves the
 * counter as it is. */
#include "check.h"

static uint64_t *counter; /* to be forged by the next copy */

void *__wrap_memcpy(void *to, const void *from, size_t n);
void *__real_memcpy(void *to, const void *from, size_t n);

void *__wrap_memcpy(void *to, const void *from, size_t n)
{
    if (counter)
        *counter += 8;
    counter = NULL;
    return __real_memcpy(to, from, n);
}

static void forge_while_writing(uint32_t options)
{
    nnb_mq *q = new_queue(8, 8, NNB_SYNCHRONIZED, NNB_LAYOUT_LINES, options);
    uint64_t elements[8] = {1, 2, 3, 4, 5, 6, 7, 8}, got;
    volatile uint64_t count = 2; /* not known to the compiler, which would copy by itself */
    CHECK_EQ(nnb_mq_write(q, elements, count), 0);
    counter = nnb_mq_write_counter(q);
    CHECK_EQ(nnb_mq_write(q, elements, count), -EBADMSG);
    CHECK(counter == NULL); /* it was forged */
    CHECK_EQ(*nnb_mq_write_counter(q), 24);
    *nnb_mq_write_counter(q) = 16;
    CHECK_EQ(nnb_mq_write(q, elements, count), -EBADMSG);
    CHECK_EQ(nnb_mq_read(q, &got, 1), -EBADMSG);
    nnb_mq_close(q);
}

int main(void)
{
    watchdog();
    forge_while_writing(0);
    forge_while_writing(NNB_MQ_EXCLUSIVE);
    return 0;
}
