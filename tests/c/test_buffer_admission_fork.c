/* What other threads used is free in a forked child, whichever gate it belongs to. */
#include "check.h"

#include <sys/wait.h>

static nnb_uses *written(nnb_gate *gate, nnb_buffer **buffer)
{
    nnb_uses *uses;
    CHECK_EQ(nnb_buffer_create(buffer, gate), 0);
    CHECK_EQ(nnb_uses_create(&uses, gate, NULL, 0, buffer, 1), 0);
    CHECK_EQ(nnb_uses_enter(uses, 0), 0);
    return uses;
}

int main(void)
{
    watchdog();
    nnb_gate *gates[2];
    nnb_buffer *buffers[2];
    nnb_uses *uses[2];
    nnb_buffer_state state;
    for (int i = 0; i < 2; i++) {
        CHECK_EQ(nnb_gate_create(&gates[i]), 0);
        uses[i] = written(gates[i], &buffers[i]);
    }
    pid_t child = fork();
    CHECK(child >= 0);
    for (int i = 0; i < 2; i++) {
        nnb_buffer_look(buffers[i], &state);
        CHECK_EQ(state.is_idle, child == 0);
        CHECK_EQ(state.generation, child == 0); /* what was being written is lost there */
    }
    if (child == 0)
        _exit(0);
    int status;
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK_EQ(status, 0);
    for (int i = 0; i < 2; i++) {
        nnb_uses_leave(uses[i], NNB_COMMITTED);
        nnb_uses_destroy(uses[i]);
        nnb_buffer_look(buffers[i], &state);
        CHECK(state.is_idle && state.is_initialised);
        nnb_buffer_destroy(buffers[i]);
    }
    return 0;
}
