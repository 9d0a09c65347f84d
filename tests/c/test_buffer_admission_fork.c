/* What other threads used is free in a forked child. */
#include "check.h"

#include <sys/wait.h>

int main(void)
{
    watchdog();
    nnb_buffer *buffer;
    nnb_uses *uses;
    nnb_buffer_state state;
    CHECK_EQ(nnb_buffer_create(&buffer), 0);
    CHECK_EQ(nnb_uses_create(&uses, NULL, 0, &buffer, 1), 0);
    CHECK_EQ(nnb_uses_enter(uses, 0), 0);
    pid_t child = fork();
    CHECK(child >= 0);
    nnb_buffer_look(buffer, &state);
    CHECK_EQ(state.is_idle, child == 0);
    CHECK_EQ(state.generation, child == 0); /* what was being written is lost there */
    if (child == 0)
        _exit(0);
    int status;
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK_EQ(status, 0);
    nnb_uses_leave(uses, NNB_COMMITTED);
    nnb_uses_destroy(uses);
    nnb_buffer_look(buffer, &state);
    CHECK(state.is_idle && state.is_initialised);
    nnb_buffer_destroy(buffer);
    return 0;
}
