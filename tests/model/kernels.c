/* A slot is freed while the server runs the kernel of its plan, then adapts it to another request and runs it again, perhaps:
 * the kernel is not called after whoever owns it was told that it may end, and what its last run did is seen then. */
#define PAGES 1
#define PAGE 768
#include "model.h"

#include "event_flag.c"

#include "message_queue.c"

#include "burst_wire.c"

#include "watch.c"

#include "burst_channel.c"

#define strdup(text) (text)
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

/* Not atomic: whoever ends the kernel must come after its runs. */
static int has_ended, runs;
static pthread_mutex_t owner; /* the caller's table */
static int is_leaving;        /* under it */

static int run(nnb_kernel *k, uint64_t deadline_ns)
{
    (void)k, (void)deadline_ns;
    assert(!has_ended);
    runs++;
    return 0;
}

static int adapt_kernel(nnb_kernel *k, const nnb_request *request)
{
    (void)k;
    assert(!has_ended && request->n_pools == 1);
    runs++;
    return 0;
}
static nnb_kernel kernel = {.run = run, .adapt = adapt_kernel};

static void end_kernel(void)
{
    assert(!has_ended);
    has_ended = 1 + runs;
}

static void *free_slot(void *unused)
{
    uint32_t ids[1];
    pthread_mutex_lock(&owner);
    int dropped = nnb_server_free_slot(server, SLOT, ids);
    assert(dropped == 1);
    if (ids[0] & NNB_PLAN_KERNEL)
        is_leaving = 1;
    else
        end_kernel();
    pthread_mutex_unlock(&owner);
    return unused;
}

static void *serve(void *unused)
{
    for (int i = 0; i < 2; i++) {
        int id = nnb_server_try(server, 1), had_kernel = id >= 0 && id & NNB_PLAN_KERNEL;
        id = nnb_server_run(server, id);
        assert(!had_kernel || id == -EAGAIN || id == NNB_PLAN_KERNEL);
        if (id == NNB_PLAN_KERNEL) {
            int32_t status;
            const char *why;
            assert(nnb_server_outcome(server, &status, &why) == 1 && status == 0);
            pthread_mutex_lock(&owner);
            assert(is_leaving);
            is_leaving = 0;
            end_kernel();
            pthread_mutex_unlock(&owner);
        }
        assert(nnb_server_reply(server) == 0);
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
    for (int i = 0; i < 3; i++) {
        packet[NNB_DATUM_SIZE + 8] = i == 2; /* other bytes, which tell nothing */
        assert(nnb_channel_send(&sending, packet, 3) == 0);
    }
    assert(nnb_server_try(server, 1) == NNB_PLAN_NEW);
    assert(nnb_server_keep_plan(server, 0) == 0 && nnb_server_set_kernel(server, 0, &kernel) == 0);
    assert(nnb_server_reply(server) == 0);
    pthread_t a, b;
    pthread_create(&a, NULL, free_slot, NULL);
    pthread_create(&b, NULL, serve, NULL);
    pthread_join(a, NULL);
    pthread_join(b, NULL);
    assert(has_ended && !is_leaving);
    return 0;
}
