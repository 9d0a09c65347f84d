/* Two synchronized queues between two threads: every element arrives once, whole, in order, across many wraps. */
#include "check.h"

#include <sched.h>

#define ROUNDS (UNDER_SANITIZER ? 5000 : 20000)

typedef struct element {
    uint64_t number, square, inverse;
} element;

typedef struct pair {
    nnb_mq *there, *back;
} pair;

/* Both threads may have to share a processor. */
static void rest(int fruitless)
{
    if (fruitless % 1000 == 999)
        sched_yield();
}

static void send_one(nnb_mq *q, uint64_t number)
{
    element e = {number, number * number, ~number};
    int rc;
    for (int i = 0; (rc = nnb_mq_write(q, &e, 1)) == -EAGAIN; i++)
        rest(i);
    CHECK_EQ(rc, 0);
}

static uint64_t receive_one(nnb_mq *q)
{
    element e;
    int rc;
    for (int i = 0; (rc = nnb_mq_read(q, &e, 1)) == -EAGAIN; i++)
        rest(i);
    CHECK_EQ(rc, 0);
    CHECK(e.square == e.number * e.number && e.inverse == ~e.number);
    return e.number;
}

static void *echo(void *argument)
{
    pair *p = argument;
    for (uint64_t i = 0; i < ROUNDS; i++)
        send_one(p->back, receive_one(p->there) + 1);
    return NULL;
}

/* The writer runs ahead as far as the ring allows, in place; packets have 1..3 elements. */
static void *stream(void *argument)
{
    nnb_mq *q = argument;
    uint64_t number = 0;
    while (number < ROUNDS) {
        uint64_t count = 1 + number % 3;
        nnb_mq_region tx;
        int rc = nnb_mq_begin_write(q, count, &tx);
        if (rc == -EAGAIN) {
            rest(999);
            continue;
        }
        CHECK_EQ(rc, 0);
        CHECK_EQ(tx.first_count + tx.second_count, count);
        for (uint64_t i = 0; i < count; i++, number++) {
            element e = {number, number * number, ~number};
            uint8_t *slot =
                i < tx.first_count ? tx.first + i * sizeof(e) : tx.second + (i - tx.first_count) * sizeof(e);
            memcpy(slot, &e, sizeof(e));
        }
        CHECK_EQ(nnb_mq_commit_write(q, count), 0);
    }
    return NULL;
}

static void run(uint32_t layout, uint32_t options)
{
    pair p = {new_queue(1, sizeof(element), NNB_SYNCHRONIZED, layout, options),
              new_queue(1, sizeof(element), NNB_SYNCHRONIZED, layout, options)};
    pthread_t thread = start(echo, &p);
    for (uint64_t i = 0; i < ROUNDS; i++) {
        send_one(p.there, i);
        CHECK_EQ(receive_one(p.back), i + 1);
    }
    finish(thread);
    nnb_mq_close(p.there);
    nnb_mq_close(p.back);

    nnb_mq *q = new_queue(5, sizeof(element), NNB_SYNCHRONIZED, layout, options);
    thread = start(stream, q);
    for (uint64_t i = 0; i < ROUNDS; i++)
        CHECK_EQ(receive_one(q), i);
    finish(thread);
    nnb_mq_close(q);
}

int main(void)
{
    watchdog();
    run(NNB_LAYOUT_LINES, 0);
    run(NNB_LAYOUT_COMPAT, 0);
    run(NNB_LAYOUT_LINES, NNB_MQ_EXCLUSIVE);
    return 0;
}
