/* Positions, wraps and counters of both flavours and layouts, single-threaded, against plain arithmetic. */
#include "check.h"

static void run(uint32_t flavour, uint32_t layout, uint64_t capacity, uint32_t quantum, uint32_t options)
{
    nnb_mq *q = new_queue(capacity, quantum, flavour, layout, options);
    CHECK_EQ(nnb_mq_capacity(q), capacity);
    CHECK_EQ(nnb_mq_quantum(q), quantum);
    uint8_t *data = malloc(capacity * quantum), *back = malloc(capacity * quantum);
    uint64_t written = 0, seed = 1;
    for (int round = 0; round < 500; round++) {
        seed = seed * 6364136223846793005u + 1442695040888963407u;
        uint64_t n = (seed >> 33) % (capacity + 1);
        for (uint64_t i = 0; i < n * quantum; i++)
            data[i] = (uint8_t)(seed >> (i % 50));
        CHECK_EQ(nnb_mq_write(q, data, n), 0);
        written += n;
        CHECK_EQ(*nnb_mq_write_counter(q), written * quantum);
        CHECK_EQ(nnb_mq_available_to_read(q), n);
        if (flavour == NNB_SYNCHRONIZED)
            CHECK_EQ(nnb_mq_write(q, data, capacity - n + 1), n ? -EAGAIN : -EMSGSIZE);
        nnb_mq_region tx;
        CHECK_EQ(nnb_mq_begin_read(q, n, &tx), 0);
        CHECK_EQ(tx.first_count + tx.second_count, n);
        uint64_t at = (written - n) % capacity, straight = capacity - at;
        CHECK_EQ(tx.first_count, n < straight ? n : straight);
        CHECK_EQ(tx.first - tx.second, at * quantum);
        CHECK_EQ(nnb_mq_read(q, back, n), 0);
        CHECK_EQ(memcmp(data, back, n * quantum), 0);
        CHECK_EQ(nnb_mq_read(q, back, 1), -EAGAIN);
        CHECK_EQ(nnb_mq_begin_read(q, 1, &tx), -EAGAIN);
        CHECK(tx.first == NULL && tx.second == NULL && tx.first_count == 0 && tx.second_count == 0);
        CHECK_EQ(nnb_mq_commit_read(q, 1), -EINVAL);
    }
    CHECK_EQ(nnb_mq_begin_write(q, capacity + 1, &(nnb_mq_region){0}), -EMSGSIZE);
    CHECK_EQ(nnb_mq_commit_write(q, 1), -EINVAL);
    CHECK_EQ(nnb_mq_write(q, NULL, 0), -EINVAL);
    CHECK_EQ(nnb_mq_read(q, NULL, 0), -EINVAL);
    free(data);
    free(back);
    nnb_mq_close(q);
}

int main(void)
{
    watchdog();
    for (uint32_t layout = NNB_LAYOUT_LINES; layout <= NNB_LAYOUT_COMPAT; layout++) {
        run(NNB_SYNCHRONIZED, layout, 1, 1, 0);
        run(NNB_SYNCHRONIZED, layout, 7, 24, 0);
        run(NNB_SYNCHRONIZED, layout, 7, 24, NNB_MQ_EXCLUSIVE);
        run(NNB_SYNCHRONIZED, layout, 1000, 3, NNB_MQ_EXCLUSIVE | NNB_MQ_SEALED);
        run(NNB_UNSYNCHRONIZED, layout, 1, 5, 0);
        run(NNB_UNSYNCHRONIZED, layout, 64, 8, 0);
    }
    nnb_mq_close(NULL);

    nnb_grantor grantors[5];
    uint64_t size;
    CHECK_EQ(nnb_mq_layout(8, 4, NNB_SYNCHRONIZED, NNB_LAYOUT_STAMPED + 1, 1, grantors, &size), -EINVAL);
    CHECK_EQ(nnb_mq_layout(8, 4, 3, NNB_LAYOUT_LINES, 1, grantors, &size), -EINVAL);
    CHECK_EQ(nnb_mq_layout(0, 4, NNB_SYNCHRONIZED, NNB_LAYOUT_LINES, 1, grantors, &size), -EINVAL);
    CHECK_EQ(nnb_mq_layout(8, 0, NNB_SYNCHRONIZED, NNB_LAYOUT_LINES, 1, grantors, &size), -EINVAL);
    CHECK_EQ(nnb_mq_layout(8, 4, NNB_SYNCHRONIZED, NNB_LAYOUT_LINES, 0, grantors, &size), -EINVAL);
    CHECK_EQ(nnb_mq_layout(8, 4, NNB_SYNCHRONIZED, NNB_LAYOUT_LINES, 1, NULL, &size), -EINVAL);
    CHECK_EQ(nnb_mq_layout(8, 4, NNB_SYNCHRONIZED, NNB_LAYOUT_LINES, 1, grantors, NULL), -EINVAL);
    return 0;
}
