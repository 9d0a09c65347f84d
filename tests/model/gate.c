/* Two requests write a driver-managed buffer, one reads it, and it is closed meanwhile: no two are in it, none waits
 * for ever, and exactly one of those who leave is told that the bytes can be freed. */
#define PAGES 5
#define PAGE 64
#include "model.h"

#include "buffer_admission.c"

static nnb_buffer *buffer;
static nnb_uses *writing[2], *reading;
static int contents; /* of the buffer */
static nnb_a32 told;

static void use(nnb_uses *uses, int writes)
{
    int rc = nnb_uses_enter(uses, 1);
    assert(rc == 0 || rc == -ESHUTDOWN);
    if (rc < 0)
        return;
    if (writes)
        contents++;
    else
        assert(contents >= 0 && contents <= 2);
    if (nnb_uses_leave(uses, writes ? NNB_COMMITTED : NNB_UNCHANGED))
        assert(nnb_or32_release(&told, 1) == 0);
}

static void *write_first(void *unused) { return use(writing[0], 1), unused; }
static void *write_second(void *unused) { return use(writing[1], 1), unused; }

static void *read_once(void *unused)
{
    if (nnb_uses_admit(reading)) {
        assert(contents == 1 || contents == 2);
        if (nnb_uses_leave(reading, NNB_UNCHANGED))
            assert(nnb_or32_release(&told, 1) == 0);
    }
    nnb_buffer_close(buffer);
    return unused;
}

int main(void)
{
    assert(nnb_buffer_create(&buffer) == 0);
    assert(nnb_uses_create(&writing[0], NULL, 0, &buffer, 1) == 0);
    assert(nnb_uses_create(&writing[1], NULL, 0, &buffer, 1) == 0);
    assert(nnb_uses_create(&reading, &buffer, 1, NULL, 0) == 0);
    nnb_uses_settle(reading, nnb_gate_moves(0));
    pthread_t a, b, c;
    pthread_create(&a, NULL, write_first, NULL);
    pthread_create(&b, NULL, write_second, NULL);
    pthread_create(&c, NULL, read_once, NULL);
    return 0;
}
