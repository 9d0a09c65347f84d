/* A kernel of loops: each function gets the addresses of its turn and touches nothing else, and the run ends before the next
 * loop once its deadline has passed or another thread has cancelled it. */
#include "check.h"

enum { ROWS = 3, MISSED_DEADLINE = 5 };

static nnb_kernel *kernel;
static int calls;
static pthread_barrier_t inside, onward;

/* Memory of that size to the byte, with a copy of what is given: a sanitizer sees each step beyond it. */
static void *exactly(size_t n, const void *from)
{
    char *to = malloc(n);
    CHECK(to != NULL);
    if (from)
        memcpy(to, from, n);
    else
        memset(to, 0xEE, n);
    return to;
}

static int run(const nnb_loop *loops, uint32_t n, uint64_t deadline_ns)
{
    CHECK_EQ(nnb_loops_create(&kernel, loops, n), 0);
    int status = nnb_kernel_run(kernel, deadline_ns);
    CHECK(!status || kernel->sentence(kernel) != NULL);
    kernel->destroy(kernel);
    return status;
}

/* ---- functions ---------------------------------------------------------------------------------------------------- */

static void codes_are_looked_up(void)
{
    uint8_t bytes[256], *codes = exactly(4, "\x00\xff\x07\x80");
    double reals[256];
    for (int i = 0; i < 256; i++) {
        bytes[i] = (uint8_t)(255 - i);
        reals[i] = i / 2.0;
    }
    uint8_t *b = exactly(4, NULL);
    double *d = exactly(4 * sizeof(double), NULL);
    nnb_loop loops[] = {
        {nnb_loop_take, bytes, {(char *)codes, (char *)b}, {4}, {1, 1}, {0}, 1},
        {nnb_loop_take, reals, {(char *)codes, (char *)d}, {2}, {1, sizeof(double)}, {2, 2 * sizeof(double)}, 2},
    };
    CHECK_EQ(run(loops, 2, 0), 0);
    for (int i = 0; i < 4; i++) {
        CHECK_EQ(b[i], 255 - codes[i]);
        CHECK(d[i] == codes[i] / 2.0);
    }
    free(codes);
    free(b);
    free(d);
}

/* Every second element of each row, the rows from the last to the first. */
static void elements_are_centred(void)
{
    static const struct {
        char type;
        int size;
    } types[] = {{'B', 1}, {'b', 1}, {'H', 2}, {'h', 2}, {'f', 4}, {'d', 8}};
    for (size_t t = 0; t < sizeof types / sizeof *types; t++) {
        int size = types[t].size;
        char *from =
            exactly((size_t)(ROWS * 4 - 1) * (size_t)size, NULL); /* nothing lies behind the last one that is read */
        for (int i = 0; i < ROWS * 4 - 1; i++) {
            uint8_t code = (uint8_t)(i + 200);
            uint16_t wide = (uint16_t)(i + 40000);
            float f = (float)i - 0.5f;
            double d = i + 0.25;
            const void *value = size == 1   ? (void *)&code
                                : size == 2 ? (void *)&wide
                                : size == 4 ? (void *)&f
                                            : (void *)&d;
            memcpy(from + i * size, value, (size_t)size);
        }
        nnb_centre centre = {.zero_point = -3, .type = types[t].type};
        float *narrow = exactly(ROWS * 2 * sizeof(float), NULL);
        double *broad = exactly(ROWS * 2 * sizeof(double), NULL);
        char *last = from + (ROWS - 1) * 4 * size;
        nnb_loop loops[] = {
            {nnb_loop_centre,
             &centre,
             {last, (char *)narrow},
             {2},
             {2 * size, sizeof(float)},
             {-4 * size, 2 * sizeof(float)},
             ROWS},
            {nnb_loop_centre,
             &centre,
             {last, (char *)broad},
             {2},
             {2 * size, sizeof(double)},
             {-4 * size, 2 * sizeof(double)},
             ROWS},
        };
        CHECK_EQ(run(loops, 2, 0), 0);
        for (int i = 0; i < ROWS * 2; i++) {
            int at = (ROWS - 1 - i / 2) * 4 + i % 2 * 2;
            double is = types[t].type == 'B'   ? at + 200
                        : types[t].type == 'b' ? at + 200 - 256
                        : types[t].type == 'H' ? at + 40000
                        : types[t].type == 'h' ? at + 40000 - 65536
                        : types[t].type == 'f' ? at - 0.5
                                               : at + 0.25;
            CHECK(broad[i] == is + 3 && narrow[i] == (float)(is + 3));
        }
        free(from);
        free(narrow);
        free(broad);
    }
}

static void reals_are_stored(void)
{
    static const double values[] = {-2.9, 0.0, 2.999, 250.0};
    double *from = exactly(sizeof values, values);
    nnb_centre centre = {.zero_point = 3, .type = 'd'};
    uint8_t *b = exactly(4, NULL);
    uint16_t *h = exactly(4 * sizeof(uint16_t), NULL);
    nnb_loop loops[] = {
        {nnb_loop_store, &centre, {(char *)from, (char *)b}, {4}, {sizeof(double), 1}, {0}, 1},
        {nnb_loop_store, &centre, {(char *)from, (char *)h}, {4}, {sizeof(double), sizeof(uint16_t)}, {0}, 1},
    };
    CHECK_EQ(run(loops, 2, 0), 0);
    for (int i = 0; i < 4; i++) {
        CHECK_EQ(b[i], (int)values[i] + 3);
        CHECK_EQ(h[i], (int)values[i] + 3);
    }
    free(from);
    free(b);
    free(h);
}

/* ---- the end of a run --------------------------------------------------------------------------------------------- */

static void count(char **args, const intptr_t *counts, const intptr_t *strides, void *meets)
{
    (void)counts, (void)strides;
    CHECK(args[1] == NULL); /* one that is not there does not move */
    args[0] = NULL;         /* the function may change them */
    calls++;
    if (meets) {
        pthread_barrier_wait(&inside);
        pthread_barrier_wait(&onward);
    }
}

static void *go(void *unused)
{
    CHECK_EQ(nnb_kernel_run(kernel, 0), MISSED_DEADLINE);
    return unused;
}

static void a_run_ends_before_its_next_loop(void)
{
    char byte[ROWS];
    nnb_loop loop = {count, NULL, {byte}, {1}, {1}, {1, 1}, ROWS};
    nnb_loop loops[] = {loop, loop};
    CHECK_EQ(run(loops, 2, nnb_now_ns() + 60ull * 1000000000), 0);
    CHECK_EQ(calls, 2 * ROWS);
    CHECK_EQ(run(loops, 2, 1), MISSED_DEADLINE);
    CHECK_EQ(calls, 2 * ROWS);

    loops[0].data = &calls;
    loops[0].times = 1;
    CHECK_EQ(nnb_loops_create(&kernel, loops, 2), 0);
    loops[1].function = NULL; /* they were copied */
    pthread_t running = start(go, NULL);
    pthread_barrier_wait(&inside);
    nnb_loops_cancel(kernel);
    pthread_barrier_wait(&onward);
    finish(running);
    CHECK_EQ(calls, 2 * ROWS + 1);
    go(NULL); /* nor does a later run begin */
    CHECK_EQ(calls, 2 * ROWS + 1);
    kernel->destroy(kernel);
}

int main(void)
{
    watchdog();
    pthread_barrier_init(&inside, NULL, 2);
    pthread_barrier_init(&onward, NULL, 2);
    codes_are_looked_up();
    elements_are_centred();
    reals_are_stored();
    a_run_ends_before_its_next_loop();
    return 0;
}
