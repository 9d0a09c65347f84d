/* A row of the statistics page is closed and opened again for something else while another process looks at it: what a
 * look accepts is all of the one or all of the other. */
#define NNB_BUCKETS 1
#define NNB_COUNTERS 1
#define NNB_LABEL 8
#include "model.h"

#include "watch.c"

static nnb_row row;
static _Alignas(8) uint8_t first[sizeof(nnb_row)], second[sizeof(nnb_row)], seen[sizeof(nnb_row)]; /* private */
#define PARENT offsetof(nnb_row, parent)
#define SINCE offsetof(nnb_row, since_ns)

static void *give(void *unused)
{
    nnb_row_close(&row, NULL);
    nnb_row_open(&row, (const nnb_row *)second, 2);
    return unused;
}

static void *look(void *unused)
{
    if (nnb_row_look((nnb_row *)seen, &row)) {
        uint64_t number = ((nnb_row *)seen)->number;
        assert(number == 1 || number == 2);
        assert(seen[PARENT] == number + 2 && seen[SINCE] == number + 4);
    }
    return unused;
}

int main(void)
{
    first[PARENT] = 3, first[SINCE] = 5;
    second[PARENT] = 4, second[SINCE] = 6;
    nnb_row_open(&row, (const nnb_row *)first, 1);
    pthread_t a, b;
    pthread_create(&a, NULL, give, NULL);
    pthread_create(&b, NULL, look, NULL);
    return 0;
}
