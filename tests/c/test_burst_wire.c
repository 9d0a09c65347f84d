/* The decoders on exact-size heap copies, so that a sanitizer sees the first byte read too far: what was encoded comes
 * back; random and mutated packets are refused or decode into numbers that stay within the packet. A request that is given
 * other sizes is the one that would have been encoded with these. */
#include "burst_pair.h"

#define ROUNDS (UNDER_SANITIZER ? 100000 : 1000000)

static uint64_t seed = 88172645463325252u;
static uint32_t random32(void)
{
    seed ^= seed << 13;
    seed ^= seed >> 7;
    seed ^= seed << 17;
    return (uint32_t)(seed >> 16);
}

static uint32_t decode_both(const uint8_t *packet, uint32_t n)
{
    uint32_t accepted = 0, room = n ? n : 1;
    uint8_t *copy = malloc((size_t)n * NNB_DATUM_SIZE + (n == 0));
    nnb_argument *arguments = malloc(room * sizeof(*arguments));
    nnb_shape *shapes = malloc(room * sizeof(*shapes));
    uint32_t *dims = malloc(room * sizeof(*dims));
    int32_t *pools = malloc(room * sizeof(*pools));
    memcpy(copy, packet, (size_t)n * NNB_DATUM_SIZE);
    nnb_request q = {.arguments = arguments, .dims = dims, .pools = pools};
    if (nnb_wire_decode_request(copy, n, &q) == 0) {
        CHECK_EQ(2ull + q.n_inputs + q.n_outputs + q.n_pools + q.n_dims, n);
        uint8_t *again = malloc((size_t)n * NNB_DATUM_SIZE);
        CHECK_EQ(nnb_wire_encode_request(&q, again, n), n);
        CHECK_EQ(nnb_wire_encode_request(&q, again, n - 1), -EMSGSIZE);
        free(again);
        accepted |= 1;
    }
    nnb_result r = {.shapes = shapes, .dims = dims};
    if (nnb_wire_decode_result(copy, n, &r) == 0) {
        CHECK_EQ(2ull + r.n_shapes + r.n_dims, n);
        CHECK(r.status >= 0 && r.status <= 8);
        accepted |= 2;
    }
    free(copy);
    free(arguments);
    free(shapes);
    free(dims);
    free(pools);
    return accepted;
}

int main(void)
{
    watchdog();
    uint8_t request[16 * NNB_DATUM_SIZE], result[16 * NNB_DATUM_SIZE], mutant[16 * NNB_DATUM_SIZE];

    nnb_argument arguments[3] = {{0, 0, 8, 16, 2, 0}, {1, 0, 0, 0, 0, 2}, {0, 1, 64, 16, 1, 2}};
    uint32_t dims[3] = {2, 2, 4};
    int32_t pools[2] = {0, INT32_MAX};
    nnb_request q = {2, 1, 2, 3, arguments, dims, pools, 1};
    int nq = nnb_wire_encode_request(&q, request, 16);
    CHECK_EQ(nq, 10);
    CHECK_EQ(decode_both(request, 10), 1);

    nnb_shape shapes[2] = {{1, 2, 0}, {0, 1, 2}};
    nnb_result r = {3, 2, 3, shapes, dims, 5, 6};
    int nr = nnb_wire_encode_result(&r, result, 16);
    CHECK_EQ(nr, 7);
    CHECK_EQ(decode_both(result, 7), 2);
    CHECK_EQ(decode_both(request, 0), 0);

    uint8_t *exact = malloc(10 * NNB_DATUM_SIZE);
    memcpy(exact, request, 10 * NNB_DATUM_SIZE);
    const uint32_t sizes[] = {UINT32_MAX, 3, 0, 0, 8, 2};
    for (uint32_t n = 0; n < 10; n++)
        CHECK_EQ(nnb_wire_resize_request(exact, sizes, n), n == 6 ? 0 : -EINVAL);
    CHECK_EQ(nnb_wire_resize_request(exact, sizes, UINT32_MAX), -EINVAL);
    CHECK_EQ(nnb_wire_resize_request(exact, sizes, 6 + (1u << 31)), -EINVAL);
    arguments[0].length = UINT32_MAX;
    arguments[2].length = 8;
    memcpy(dims, (const uint32_t[]){3, 0, 2}, sizeof dims);
    CHECK_EQ(nnb_wire_encode_request(&q, mutant, 16), 10);
    CHECK(!memcmp(exact, mutant, 10 * NNB_DATUM_SIZE));
    free(exact);

    uint64_t accepted = 0;
    for (int i = 0; i < ROUNDS; i++) {
        uint32_t n = random32() % 2 ? 10 : 7;
        memcpy(mutant, n == 10 ? request : result, sizeof mutant);
        for (uint32_t k = 1 + random32() % 3; k; k--) {
            uint32_t at = random32() % (n * NNB_DATUM_SIZE);
            if (random32() % 2)
                mutant[at] = (uint8_t)random32();
            else
                memset(mutant + at / NNB_DATUM_SIZE * NNB_DATUM_SIZE + 4 + 4 * (random32() % 5), 0xff, 4);
        }
        accepted += decode_both(mutant, 1 + random32() % n + (random32() % 2 ? 0 : 0)) != 0;
        accepted += decode_both(mutant, n) != 0;
        for (uint32_t k = 0; k < sizeof mutant; k++)
            mutant[k] = k % NNB_DATUM_SIZE ? (uint8_t)random32() : (uint8_t)(random32() % 8);
        decode_both(mutant, n);
    }
    CHECK(accepted > 0);                       /* harmless mutations are harmless */
    CHECK(accepted < 2ull * (uint64_t)ROUNDS); /* and the others were refused */
    return 0;
}
