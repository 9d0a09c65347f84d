/* FmqRequestDatum / FmqResultDatum <-> structs. docs/WIRE.md has their bytes.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * A datum is a one-byte discriminant, then its fields from byte 4 (requests) or 8 (results) on. A packet is
 *
 *   request: packetInformation, {inputOperandInformation, dimension...}..., {output...}..., pool..., measureTiming
 *   result:  packetInformation, {operandInformation, dimension...}..., executionTiming
 *
 * The decoder works on a private copy, and compares each count with the datums that are left before it stores.
 */

#include "nnb_internal.h"

enum { REQ_PACKET, REQ_INPUT, REQ_INPUT_DIM, REQ_OUTPUT, REQ_OUTPUT_DIM, REQ_POOL, REQ_MEASURE };
enum { RES_PACKET, RES_OPERAND, RES_DIM, RES_TIMING };

static uint32_t get32(const uint8_t *d, int at)
{
    uint32_t v;
    memcpy(&v, d + at, 4);
    return v;
}

static uint64_t get64(const uint8_t *d, int at)
{
    uint64_t v;
    memcpy(&v, d + at, 8);
    return v;
}

static void put32(uint8_t *d, int at, uint32_t v) { memcpy(d + at, &v, 4); }
static void put64(uint8_t *d, int at, uint64_t v) { memcpy(d + at, &v, 8); }

/* ---- encoding ------------------------------------------------------------------------------------------------- */

/* Appends a zeroed datum. */
static uint8_t *next_datum(uint8_t **end, uint8_t discriminant)
{
    uint8_t *d = *end;
    *end += NNB_DATUM_SIZE;
    memset(d, 0, NNB_DATUM_SIZE);
    d[0] = discriminant;
    return d;
}

int nnb_wire_encode_request(const nnb_request *q, uint8_t *out, uint32_t room)
{
    uint64_t n_arguments = (uint64_t)q->n_inputs + q->n_outputs, total = 2 + n_arguments + q->n_pools + q->n_dims;
    uint64_t n_dims = 0;
    for (uint64_t i = 0; total <= room && i < n_arguments; i++)
        n_dims += q->arguments[i].rank;
    if (total > room || n_dims != q->n_dims)
        return -EMSGSIZE;
    uint8_t *d = next_datum(&out, REQ_PACKET);
    put32(d, 4, (uint32_t)total);
    put32(d, 8, q->n_inputs);
    put32(d, 12, q->n_outputs);
    put32(d, 16, q->n_pools);
    for (uint32_t i = 0; i < n_arguments; i++) {
        const nnb_argument *a = &q->arguments[i];
        int is_input = i < q->n_inputs;
        d = next_datum(&out, is_input ? REQ_INPUT : REQ_OUTPUT);
        d[4] = a->has_no_value != 0;
        put32(d, 8, a->pool_index);
        put32(d, 12, a->offset);
        put32(d, 16, a->length);
        put32(d, 20, a->rank);
        for (uint32_t k = 0; k < a->rank; k++)
            put32(next_datum(&out, is_input ? REQ_INPUT_DIM : REQ_OUTPUT_DIM), 4, q->dims[a->first_dim + k]);
    }
    for (uint32_t i = 0; i < q->n_pools; i++)
        put32(next_datum(&out, REQ_POOL), 4, (uint32_t)q->pools[i]);
    put32(next_datum(&out, REQ_MEASURE), 4, q->measure != 0);
    return (int)total;
}

int nnb_wire_resize_request(uint8_t *packet, const uint32_t *sizes, uint32_t n)
{
    if (n != get32(packet, 4) - 2 - get32(packet, 16))
        return -EINVAL;
    for (uint32_t i = 0; i < n; i++) {
        packet += NNB_DATUM_SIZE;
        put32(packet, packet[0] == REQ_INPUT || packet[0] == REQ_OUTPUT ? 16 : 4, sizes[i]);
    }
    return 0;
}

int nnb_wire_encode_result(const nnb_result *r, uint8_t *out, uint32_t room)
{
    uint64_t total = 2ull + r->n_shapes + r->n_dims, n_dims = 0;
    for (uint32_t i = 0; total <= room && i < r->n_shapes; i++)
        n_dims += r->shapes[i].rank;
    if (total > room || n_dims != r->n_dims)
        return -EMSGSIZE;
    uint8_t *d = next_datum(&out, RES_PACKET);
    put32(d, 8, (uint32_t)total);
    put32(d, 12, (uint32_t)r->status);
    put32(d, 16, r->n_shapes);
    for (uint32_t i = 0; i < r->n_shapes; i++) {
        d = next_datum(&out, RES_OPERAND);
        d[8] = r->shapes[i].is_sufficient != 0;
        put32(d, 12, r->shapes[i].rank);
        for (uint32_t k = 0; k < r->shapes[i].rank; k++)
            put32(next_datum(&out, RES_DIM), 8, r->dims[r->shapes[i].first_dim + k]);
    }
    d = next_datum(&out, RES_TIMING);
    put64(d, 8, r->time_on_device);
    put64(d, 16, r->time_in_driver);
    return (int)total;
}

/* ---- decoding ------------------------------------------------------------------------------------------------- */

typedef struct cursor {
    const uint8_t *at;
    uint32_t left;
} cursor;

/* Returns the next datum if it has this discriminant, else NULL. */
static const uint8_t *expect(cursor *c, uint8_t discriminant)
{
    if (!c->left || c->at[0] != discriminant)
        return NULL;
    const uint8_t *d = c->at;
    c->at += NNB_DATUM_SIZE;
    c->left--;
    return d;
}

/* Takes `count` dimension datums whose value is at byte `at`. */
static int take_dims(cursor *c, uint32_t count, uint8_t discriminant, int at, uint32_t *dims, uint32_t *n_dims)
{
    if (count > c->left)
        return -EBADMSG;
    for (uint32_t i = 0; i < count; i++) {
        const uint8_t *d = expect(c, discriminant);
        if (!d)
            return -EBADMSG;
        dims[(*n_dims)++] = get32(d, at);
    }
    return 0;
}

static int take_arguments(cursor *c, uint32_t count, uint8_t info, nnb_argument *a, nnb_request *out)
{
    for (uint32_t i = 0; i < count; i++, a++) {
        const uint8_t *d = expect(c, info);
        if (!d || d[4] > 1)
            return -EBADMSG;
        a->has_no_value = d[4];
        a->pool_index = get32(d, 8);
        a->offset = get32(d, 12);
        a->length = get32(d, 16);
        a->rank = get32(d, 20);
        a->first_dim = out->n_dims;
        if (take_dims(c, a->rank, (uint8_t)(info + 1), 4, out->dims, &out->n_dims) < 0)
            return -EBADMSG;
    }
    return 0;
}

int nnb_wire_decode_request(const uint8_t *packet, uint32_t n, nnb_request *out)
{
    cursor c = {packet, n};
    const uint8_t *d = expect(&c, REQ_PACKET);
    if (!d || get32(d, 4) != n)
        return -EBADMSG;
    out->n_inputs = get32(d, 8);
    out->n_outputs = get32(d, 12);
    out->n_pools = get32(d, 16);
    out->n_dims = 0;
    if ((uint64_t)out->n_inputs + out->n_outputs + out->n_pools + 1 > c.left)
        return -EBADMSG;
    if (take_arguments(&c, out->n_inputs, REQ_INPUT, out->arguments, out) < 0 ||
        take_arguments(&c, out->n_outputs, REQ_OUTPUT, out->arguments + out->n_inputs, out) < 0)
        return -EBADMSG;
    for (uint32_t i = 0; i < out->n_pools; i++) {
        if (!(d = expect(&c, REQ_POOL)))
            return -EBADMSG;
        out->pools[i] = (int32_t)get32(d, 4);
    }
    if (!(d = expect(&c, REQ_MEASURE)) || c.left || get32(d, 4) > 1)
        return -EBADMSG;
    out->measure = (int32_t)get32(d, 4);
    return 0;
}

int nnb_wire_decode_result(const uint8_t *packet, uint32_t n, nnb_result *out)
{
    cursor c = {packet, n};
    const uint8_t *d = expect(&c, RES_PACKET);
    if (!d || get32(d, 8) != n)
        return -EBADMSG;
    uint32_t status = get32(d, 12);
    out->status = status <= NNB_LAST_STATUS ? (int32_t)status : NNB_GENERAL_FAILURE;
    out->n_shapes = get32(d, 16);
    out->n_dims = 0;
    if ((uint64_t)out->n_shapes + 1 > c.left)
        return -EBADMSG;
    for (uint32_t i = 0; i < out->n_shapes; i++) {
        if (!(d = expect(&c, RES_OPERAND)) || d[8] > 1)
            return -EBADMSG;
        nnb_shape *s = &out->shapes[i];
        s->is_sufficient = d[8];
        s->rank = get32(d, 12);
        s->first_dim = out->n_dims;
        if (take_dims(&c, s->rank, RES_DIM, 8, out->dims, &out->n_dims) < 0)
            return -EBADMSG;
    }
    if (!(d = expect(&c, RES_TIMING)) || c.left)
        return -EBADMSG;
    out->time_on_device = get64(d, 8);
    out->time_in_driver = get64(d, 16);
    return 0;
}

/* FNV-1a over 32-bit words: enough to tell a few bound plans apart quickly. */
uint32_t nnb_wire_hash(const uint8_t *packet, uint32_t n)
{
    uint32_t h = 2166136261u;
    for (uint32_t i = 0; i < n * (NNB_DATUM_SIZE / 4); i++) {
        uint32_t word;
        memcpy(&word, packet + 4 * (size_t)i, 4);
        h = (h ^ word) * 16777619u;
    }
    return h;
}
