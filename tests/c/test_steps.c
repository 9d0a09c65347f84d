/* The arguments of a request of several steps: each step gets its own, and the state of the one before. */
#include "check.h"

enum { COUNT = 5, X = 3, Y = 8 };

int main(void)
{
    uint8_t x[COUNT * X + 1], y[COUNT * Y + 1], one_x[X], one_y[Y], read = 0, written = 0;
    for (int i = 0; i < COUNT * X; i++)
        x[i] = (uint8_t)i;
    memset(y, 0xEE, sizeof y);
    nnb_step_argument arguments[] = {{.one = one_x, .all = x, .nbytes = X, .stride = X},
                                     {.one = one_y, .all = y, .nbytes = Y, .stride = Y},
                                     {.one = &written, .all = &read, .nbytes = 1}};
    nnb_steps steps = {.arguments = arguments, .n_inputs = 1, .n = 3, .count = COUNT};
    for (int step = 0; step < COUNT; step++) {
        nnb_steps_turn(&steps, (uint64_t)step);
        CHECK_EQ(memcmp(one_x, x + step * X, X), 0);
        for (int i = step > 0 ? step * Y : 0; i < COUNT * Y + 1; i++)
            CHECK_EQ(y[i], 0xEE); /* what has not been computed is not there */
        CHECK_EQ(read, step);
        written = (uint8_t)(read + 1);
        memset(one_y, step + 1, Y);
    }
    memset(one_x, 0x77, X);
    nnb_steps_turn(&steps, COUNT);
    CHECK_EQ(one_x[0], 0x77); /* no input is left to fetch */
    for (int i = 0; i < COUNT * Y; i++)
        CHECK_EQ(y[i], i / Y + 1);
    CHECK_EQ(y[COUNT * Y], 0xEE);
    CHECK_EQ(read, COUNT);
    return 0;
}
