/* A slot is freed while the server binds a request and finds it twice again: a plan is not found after its slot was
 * freed. Then the server is hung up. */
#define PAGES 1
#define PAGE 768
#include "model.h"

#include "event_flag.c"

#include "message_queue.c"

#include "burst_wire.c"

#include "watch.c"

#include "burst_channel.c"

#include "burst_server.c"
int nnb_uses_admit(nnb_uses *u) { return u != NULL; }
int nnb_uses_leave(nnb_uses *u, int outcome) { return u != NULL && outcome; }
nnb_uses *nnb_uses_share(nnb_uses *u) { return u; }
void nnb_uses_destroy(nnb_uses *u) { (void)u; }

#define SLOT 5
static ring requests, results;
static nnb_mq client_request, server_request, server_result;
static nnb_channel sending;
static uint64_t sending_counters[NNB_COUNTERS];
static nnb_server *server;
static nnb_a32 gone, freed; /* from the executor's table; from the plans, too */
static int reason;          /* for which the server is hung up */

static void *free_slot(void *unused)
{
    uint32_t ids[1];
    nnb_store32_relaxed(&gone, 1);
    int dropped = nnb_server_free_slot(server, SLOT, ids);
    assert(dropped == 0 || (dropped == 1 && ids[0] == 0));
    nnb_store32_release(&freed, 1);
    reason = 7;
    nnb_server_hang_up(server);
    return unused;
}

static void *serve(void *unused)
{
    int id = nnb_server_try(server, 1);
    if (id == -EPIPE) {
        assert(reason == 7);
        return unused;
    }
    assert(id == NNB_PLAN_NEW);
    /* A memory that is gone is not bound: such a plan fails, and is not kept. */
    int is_kept = 0;
    if (!nnb_load32_relaxed(&gone)) {
        int rc = nnb_server_keep_plan(server, 0);
        assert(rc == 0 || rc == -ESTALE);
        is_kept = rc == 0;
    }
    for (int i = 0; i < 2; i++) {
        assert(nnb_server_reply(server) == 0);
        int is_freed = (int)nnb_load32_acquire(&freed);
        id = nnb_server_try(server, 1);
        assert(id == 0 || id == NNB_PLAN_NEW || (id == -EPIPE && reason == 7));
        assert(id != 0 || (is_kept && !is_freed));
        if (id)
            break;
    }
    return unused;
}

int main(void)
{
    attach(&client_request, &requests, NNB_DATUM_SIZE, 9, NNB_SYNCHRONIZED, NNB_MQ_EXCLUSIVE);
    attach(&server_request, &requests, NNB_DATUM_SIZE, 9, NNB_SYNCHRONIZED, NNB_MQ_EXCLUSIVE);
    attach(&server_result, &results, NNB_DATUM_SIZE, 6, NNB_SYNCHRONIZED, NNB_MQ_EXCLUSIVE);
    assert(nnb_channel_init(&sending, &client_request, 4, 0, sending_counters) == 0);
    assert(nnb_server_create(&server, &server_request, &server_result, 0, 1) == 0);
    int32_t slot = SLOT;
    nnb_request request = {.n_pools = 1, .pools = &slot};
    uint8_t packet[3 * NNB_DATUM_SIZE];
    assert(nnb_wire_encode_request(&request, packet, 3) == 3);
    for (int i = 0; i < 3; i++)
        assert(nnb_channel_send(&sending, packet, 3) == 0);
    pthread_t a, b;
    pthread_create(&a, NULL, free_slot, NULL);
    pthread_create(&b, NULL, serve, NULL);
    return 0;
}
