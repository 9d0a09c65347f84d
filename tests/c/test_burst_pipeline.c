/* Several requests in flight: they land in order, what does not fit waits its turn, and a bell tells an event loop. */
#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include "burst_pair.h"
#include "nnb_channel.h"

static burst_pair p;
static int watched;

static void begin(uint64_t length)
{
    int pair[2];
    CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, pair), 0);
    p = new_pair(length, 0, 0);
    watched = pair[0];
    CHECK_EQ(nnb_server_set_bell(p.server, pair[1]), 0);
    CHECK_EQ(nnb_client_set_pipelined(p.client, pair[1]), 0);
    close(pair[1]);
}

static void over(void)
{
    end_pair(&p);
    close(watched);
}

static void serve(int32_t status)
{
    int id = nnb_server_try(p.server, 1);
    CHECK(id >= 0);
    nnb_result r = {.status = status, .time_on_device = NNB_NO_TIME, .time_in_driver = NNB_NO_TIME};
    CHECK_EQ(nnb_server_set_result(p.server, &r), 0);
    CHECK_EQ(nnb_server_reply(p.server), 0);
}

static int rings(void)
{
    char bytes[64];
    return (int)recv(watched, bytes, sizeof bytes, 0);
}

static nnb_execution *new_short(uint32_t tag)
{
    nnb_execution *e = new_execution(p.client, tag);
    nnb_execution_set_answer(e, 2);
    return e;
}

int main(void)
{
    watchdog();
    nnb_execution *e[8];

    /* in request order, each with its own status; a ring that is full keeps the rest in the queue (10 datums each) */
    begin(32);
    for (int i = 0; i < 8; i++) {
        e[i] = new_short((uint32_t)i);
        CHECK_EQ(nnb_execution_launch(e[i], (uint64_t)i + 1, 0), -EAGAIN);
        CHECK_EQ(nnb_execution_launch(e[i], 99, 0), -EALREADY);
        CHECK(nnb_execution_flies(e[i]));
    }
    CHECK_EQ(nnb_mq_available_to_write(p.request), 2);
    CHECK_EQ(nnb_client_land(p.client), -EAGAIN);
    for (int i = 0; i < 8; i++) {
        serve(i % 3);
        CHECK_EQ(nnb_client_land(p.client), i + 1);
        CHECK_EQ(nnb_execution_status(e[i]), i % 3);
        CHECK(!nnb_execution_flies(e[i]));
    }

    /* one that is waited for comes after those before it, which land on the way */
    CHECK_EQ(nnb_execution_launch(e[0], 1, 0), -EAGAIN);
    CHECK_EQ(nnb_execution_start(e[1]), -EBUSY); /* a run would have to wait for others */
    CHECK_EQ(nnb_execution_advance(e[1], e[1]), -EAGAIN);
    const uint32_t sizes[] = {16, 2, 2, 0, 16, 4};
    CHECK_EQ(nnb_execution_resize(e[0], sizes, 6), -EALREADY); /* on its way */
    CHECK_EQ(nnb_execution_resize(e[1], sizes, 6), -EALREADY); /* waited for */
    CHECK_EQ(nnb_execution_resize(e[2], sizes, 6), 0);
    CHECK_EQ(nnb_execution_resize(e[2], sizes, 5), -EINVAL);
    CHECK_EQ(nnb_client_land(p.client), -EBUSY); /* and wants to be told */
    CHECK_EQ(nnb_execution_launch(e[2], 3, 0), -EBUSY);
    CHECK_EQ(rings(), -1);
    serve(0);
    CHECK_EQ(nnb_execution_try(e[1], 1), -EAGAIN);
    serve(2);
    CHECK_EQ(nnb_execution_try(e[1], 1), 2);
    CHECK_EQ(rings(), 1);
    CHECK_EQ(nnb_execution_leave(e[0]), -EALREADY); /* it has landed, but that was not told */
    CHECK_EQ(nnb_client_is_free(p.client), 0);
    CHECK_EQ(nnb_client_land(p.client), 1);
    CHECK_EQ(nnb_client_land(p.client), -EAGAIN);
    CHECK_EQ(nnb_client_is_free(p.client), 1);

    /* one that moves is not started here */
    CHECK_EQ(nnb_execution_leave(e[0]), 0);
    CHECK_EQ(nnb_execution_launch(e[0], 1, 0), -ESTALE);
    nnb_execution_return(e[0]);

    /* what was not sent can be taken back; what was sent lands */
    for (int i = 0; i < 5; i++)
        CHECK_EQ(nnb_execution_launch(e[i], (uint64_t)i + 1, 0), -EAGAIN);
    CHECK_EQ(nnb_execution_withdraw(e[1]), -EALREADY);
    CHECK_EQ(nnb_execution_withdraw(e[4]), 0);
    CHECK_EQ(nnb_execution_withdraw(e[3]), 0);
    CHECK_EQ(nnb_execution_withdraw(e[3]), -EALREADY);
    CHECK_EQ(nnb_execution_launch(e[3], 4, 0), -EAGAIN);
    for (int i = 0; i < 4; i++) {
        serve(0);
        CHECK_EQ(nnb_client_land(p.client), i + 1);
    }
    CHECK_EQ(nnb_server_try(p.server, 1), -EAGAIN);

    /* one that is given up while others fly drops its own answer only */
    CHECK_EQ(nnb_execution_launch(e[0], 1, 0), -EAGAIN);
    CHECK_EQ(nnb_execution_advance(e[1], e[1]), -EAGAIN);
    nnb_execution_abandon(e[1]);
    CHECK_EQ(nnb_execution_launch(e[2], 3, 0), -EAGAIN);
    serve(0);
    serve(2);
    serve(0);
    CHECK_EQ(nnb_client_land(p.client), 1);
    CHECK_EQ(nnb_client_land(p.client), 3);
    CHECK_EQ(nnb_execution_status(e[2]), 0);

    /* turns: one is started, another one awaited */
    CHECK_EQ(nnb_execution_advance(e[0], e[1]), 0); /* not started yet */
    CHECK_EQ(nnb_execution_advance(e[1], e[2]), 0);
    serve(0);
    serve(1);
    CHECK_EQ(nnb_execution_advance(e[2], e[0]), -EAGAIN); /* a window of 0 does not look */
    CHECK_EQ(nnb_execution_resume(e[0]), 0);
    CHECK_EQ(nnb_execution_advance(e[0], e[1]), -EAGAIN);
    CHECK_EQ(nnb_execution_resume(e[1]), 1);
    serve(0);
    serve(0);
    CHECK_EQ(nnb_execution_advance(NULL, e[2]), -EAGAIN);
    CHECK_EQ(nnb_execution_resume(e[2]), 0);
    CHECK_EQ(nnb_execution_advance(NULL, e[0]), -EAGAIN);
    CHECK_EQ(nnb_execution_resume(e[0]), 0);
    CHECK_EQ(nnb_execution_advance(NULL, e[0]), 0);

    /* all that were started so are given up at once, also one that is waited for; another one is not */
    CHECK_EQ(nnb_execution_launch(e[3], 4, 0), -EAGAIN);
    CHECK_EQ(nnb_execution_advance(e[0], e[1]), 0);
    CHECK_EQ(nnb_execution_advance(e[1], e[0]), -EAGAIN);
    for (int i = 0; i < 4; i++)
        CHECK_EQ(nnb_execution_drop(e[i]), 0);
    CHECK_EQ(nnb_execution_flies(e[0]) + nnb_execution_flies(e[1]), 0);
    CHECK_EQ(nnb_execution_advance(e[0], e[1]), 0);
    serve(0);
    serve(0);
    serve(0);
    CHECK_EQ(nnb_client_land(p.client), 4);
    serve(2);
    CHECK_EQ(nnb_execution_advance(NULL, e[0]), -EAGAIN);
    CHECK_EQ(nnb_execution_resume(e[0]), 2);

    /* the bell rings for the next answer after it was armed, once, and not for one that was there before */
    CHECK_EQ(rings(), -1);
    CHECK_EQ(nnb_execution_launch(e[0], 1, 0), -EAGAIN);
    CHECK_EQ(nnb_execution_launch(e[1], 2, 0), -EAGAIN);
    CHECK_EQ(nnb_execution_launch(e[2], 3, 0), -EAGAIN);
    serve(0);
    CHECK_EQ(nnb_client_arm(p.client), 1);
    CHECK_EQ(nnb_client_land(p.client), 1);
    CHECK_EQ(nnb_client_arm(p.client), 0);
    CHECK_EQ(rings(), -1);
    serve(0);
    serve(0);
    CHECK_EQ(rings(), 1);
    CHECK_EQ(nnb_client_land(p.client), 2);
    CHECK_EQ(nnb_client_land(p.client), 3);
    CHECK_EQ(nnb_execution_launch(e[0], 1, 0), -EAGAIN); /* and not while answers are found by polling */
    serve(0);
    CHECK_EQ(rings(), -1);
    CHECK_EQ(nnb_client_land(p.client), 1);

    /* an answer that a caller took along is there to be landed: the bell will not ring for it */
    CHECK_EQ(nnb_execution_launch(e[0], 1, 0), -EAGAIN);
    CHECK_EQ(nnb_execution_advance(e[1], e[1]), -EAGAIN);
    serve(0);
    serve(0);
    CHECK_EQ(nnb_execution_resume(e[1]), 0);
    CHECK_EQ(nnb_client_arm(p.client), 1);
    CHECK_EQ(nnb_client_land(p.client), 1);
    rings();

    /* a caller that sleeps is woken in place of the loop, which it tells when it leaves */
    CHECK_EQ(nnb_execution_launch(e[0], 1, 0), -EAGAIN);
    CHECK_EQ(nnb_client_arm(p.client), 0);
    nnb_execution_set_timeout(e[1], 1000000);
    CHECK_EQ(nnb_execution_advance(e[1], e[1]), -EAGAIN);
    CHECK_EQ(nnb_execution_resume(e[1]), -ETIMEDOUT);
    CHECK_EQ(rings(), 1);
    serve(0);
    CHECK_EQ(rings(), -1);
    CHECK_EQ(nnb_client_land(p.client), 1);
    serve(0); /* the late one */
    CHECK_EQ(nnb_client_land(p.client), -EAGAIN);

    /* one that is in flight can be looked for again */
    CHECK_EQ(nnb_execution_launch(e[0], 1, 1), -ERESTART);
    CHECK_EQ(nnb_execution_watch(e[0], 2, UINT64_MAX), -EINVAL);
    CHECK_EQ(nnb_execution_watch(e[0], 1, UINT64_MAX), -EAGAIN); /* this client has no window */
    serve(0);
    CHECK_EQ(nnb_execution_watch(e[0], 1, UINT64_MAX), -EAGAIN);
    CHECK_EQ(nnb_client_land(p.client), 1);
    CHECK_EQ(nnb_execution_watch(e[0], 1, UINT64_MAX), -EINVAL);

    /* a hang-up rings */
    CHECK_EQ(nnb_execution_launch(e[0], 1, 0), -EAGAIN);
    CHECK_EQ(nnb_client_arm(p.client), 0);
    nnb_client_hang_up(p.client);
    CHECK_EQ(rings(), 1);
    CHECK_EQ(nnb_client_arm(p.client), 1);
    CHECK_EQ(nnb_client_land(p.client), -EPIPE);
    CHECK_EQ(nnb_client_close(p.client), 0);
    CHECK_EQ(nnb_client_land(p.client), -ESHUTDOWN);
    CHECK_EQ(nnb_execution_advance(NULL, e[0]), -ESHUTDOWN);
    for (int i = 0; i < 8; i++)
        nnb_execution_destroy(e[i]);
    over();

    /* answers must find room: two of 32 datums fill a ring of 64, however many requests would fit */
    begin(64);
    for (int i = 0; i < 4; i++) {
        e[i] = new_execution(p.client, (uint32_t)i);
        nnb_execution_set_answer(e[i], 32);
        CHECK_EQ(nnb_execution_launch(e[i], (uint64_t)i + 1, 0), -EAGAIN);
    }
    CHECK_EQ(nnb_mq_available_to_write(p.request), 64 - 2 * 10);
    serve(0);
    CHECK_EQ(nnb_client_land(p.client), 1);
    CHECK_EQ(nnb_mq_available_to_write(p.request), 64 - 2 * 10);
    for (int i = 1; i < 4; i++) {
        serve(0);
        CHECK_EQ(nnb_client_land(p.client), i + 1);
    }

    /* a bell that is full, and one that is no socket, keep no one waiting */
    CHECK_EQ(nnb_execution_launch(e[0], 1, 0), -EAGAIN);
    CHECK_EQ(nnb_client_arm(p.client), 0);
    int full = 0;
    while (!full) {
        nnb_bell_ring(watched);
        full = send(watched, "", 1, MSG_DONTWAIT) < 0;
    }
    nnb_bell_ring(watched);
    int file = open("/dev/null", O_RDONLY);
    nnb_bell_ring(file);
    nnb_bell_ring(-1);
    close(file);
    serve(0);
    CHECK_EQ(nnb_client_land(p.client), 1);
    for (int i = 0; i < 4; i++)
        nnb_execution_destroy(e[i]);
    over();

    /* a server of another make sees one request at a time */
    p = new_pair(64, 0, 0);
    for (int i = 0; i < 3; i++) {
        e[i] = new_short((uint32_t)i);
        CHECK_EQ(nnb_execution_launch(e[i], (uint64_t)i + 1, 0), -EAGAIN);
    }
    for (int i = 0; i < 3; i++) {
        CHECK_EQ(nnb_mq_available_to_write(p.request), 64 - 10);
        serve(0);
        CHECK_EQ(nnb_client_land(p.client), i + 1);
        nnb_execution_destroy(e[i]);
    }
    end_pair(&p);
    return 0;
}
