/* Many packets in the ring at once: each is looked at once, what does not fit together is found wherever it is, and
 * nobody serves them once the client has gone. */
#include "burst_pair.h"
#include "nnb_channel.h"

#define LENGTH 64u

static uint32_t seed = 1;

static uint32_t below(uint32_t n)
{
    seed = seed * 1664525u + 1013904223u;
    return (seed >> 8) % n;
}

/* What the ring should hold: sizes of packets; 0 for a datum that begins none. */
typedef struct model {
    uint32_t sizes[LENGTH], n, datums;
} model;

static int is_sound(const model *m)
{
    for (uint32_t i = 0; i < m->n; i++)
        if (!m->sizes[i])
            return 0;
    return 1;
}

static void publish(nnb_mq *q, model *m)
{
    uint8_t data[LENGTH * NNB_DATUM_SIZE];
    uint32_t datums = 0, packets = 1 + below(6);
    memset(data, 0, sizeof data);
    for (uint32_t i = 0; i < packets; i++) {
        uint32_t size = 2 + below(5), bad = below(40) == 0;
        if (m->datums + datums + size > LENGTH)
            break;
        if (bad)
            data[datums * NNB_DATUM_SIZE] = 9; /* no packetInformation */
        memcpy(data + datums * NNB_DATUM_SIZE + 4, &size, 4);
        m->sizes[m->n++] = bad ? 0 : size;
        datums += size;
    }
    m->datums += datums;
    if (datums)
        CHECK_EQ(nnb_mq_put(q, data, (uint64_t)datums * NNB_DATUM_SIZE), 0);
}

int main(void)
{
    watchdog();
    uint32_t options = NNB_MQ_EXCLUSIVE | NNB_MQ_SEALED;
    nnb_mq *writer = new_queue(LENGTH, NNB_DATUM_SIZE, NNB_SYNCHRONIZED, NNB_LAYOUT_LINES, options);
    static uint64_t counters[NNB_COUNTERS];
    nnb_channel ch;
    CHECK_EQ(nnb_channel_init(&ch, second_handle(writer), 4, 0, counters), 0);
    model m = {0};
    static uint8_t packet[LENGTH * NNB_DATUM_SIZE];
    int refused = 0;
    for (int round = 0; round < 20000; round++) {
        publish(writer, &m);
        for (uint32_t take = below(6); take; take--) {
            int got = nnb_channel_try(&ch, packet, 1);
            if (!m.n) {
                CHECK_EQ(got, -EAGAIN);
            } else if (!is_sound(&m)) {
                CHECK_EQ(got, -EPROTO);
                refused++;
                m = (model){0};
            } else {
                CHECK_EQ(got, m.sizes[0]);
                m.datums -= m.sizes[0];
                memmove(m.sizes, m.sizes + 1, --m.n * sizeof m.sizes[0]);
                CHECK_EQ(ch.verified <= m.datums, 1);
            }
        }
    }
    CHECK(refused > 100);
    nnb_channel_fini(&ch);
    nnb_mq_close(writer);

    /* the requests of a client that has gone stay where they are */
    burst_pair p = new_pair(LENGTH, 0, 0);
    nnb_execution *e = new_execution(p.client, 1);
    for (int i = 0; i < 3; i++) {
        CHECK_EQ(nnb_execution_start(e), 0);
        nnb_execution_abandon(e);
    }
    CHECK_EQ(nnb_server_next(p.server) & NNB_PLAN_NEW, NNB_PLAN_NEW);
    nnb_server_hang_up(p.server);
    CHECK_EQ(nnb_server_next(p.server), -EPIPE);
    CHECK_EQ(nnb_server_try(p.server, 1), -EPIPE);
    nnb_execution_destroy(e);
    end_pair(&p);

    /* neither end takes a channel that would make it keep room for a gigantic packet */
    nnb_mq *large = new_queue(2 * NNB_MAX_CHANNEL, NNB_DATUM_SIZE, NNB_SYNCHRONIZED, NNB_LAYOUT_LINES, options);
    CHECK_EQ(nnb_channel_init(&ch, large, 4, 0, counters), -EINVAL);
    nnb_mq_close(large);
    return 0;
}
