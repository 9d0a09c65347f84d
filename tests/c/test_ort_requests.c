/* A bound graph adapts to other requests of the same form, and tells the dimensions of its outputs; the library is a false
 * one: it makes each open output of the size that it is told, and counts what it gives and takes back. */
#include "check.h"

#include "nnb_internal.h"

typedef struct value {
    void *data;
    size_t nbytes, rank;
    int64_t dims[NNB_MAX_RANK + 1];
    int is_made; /* by a run */
} value;

static int values, infos, lists, bound[2]; /* values that there are; inputs and outputs that were bound */
static value inputs, out;                  /* what is bound to "x", and what a run makes of "y" */
static value expected;                     /* what is bound to "y" */
static int is_open, has_value = 1, runs;
static const char *refused; /* a function that fails */
static int error;

static void *outcome(const char *function) { return refused && !strcmp(refused, function) ? &error : NULL; }

static void *create_options(void **to)
{
    *to = &error;
    return NULL;
}

static void *set_severity(void *options, int level) { return options && level ? NULL : NULL; }
static void release_nothing(void *what) { CHECK(what != NULL); }
static const char *text(const void *status) { return status ? "no" : ""; }

static void *create_value(const void *memory, void *data, size_t nbytes, const int64_t *dims, size_t rank, int type,
                          void **to)
{
    CHECK_EQ(*(const int *)memory, 3);
    CHECK_EQ(type, 1);
    if (outcome("create"))
        return &error;
    value *v = *to = calloc(1, sizeof(value));
    *v = (value){.data = data, .nbytes = nbytes, .rank = rank};
    memcpy(v->dims, dims, rank * sizeof(*dims));
    values++;
    return NULL;
}

static void release_value(void *v)
{
    values--;
    free(v);
}

static void *bind_input(void *binding, const char *name, const void *v)
{
    CHECK(binding && !strcmp(name, "x"));
    bound[0]++;
    inputs = *(const value *)v;
    return outcome("bind");
}

static void *bind_output(void *binding, const char *name, const void *v)
{
    CHECK(binding && v && !strcmp(name, "y"));
    bound[1]++;
    expected = *(const value *)v;
    return NULL;
}

static void *bind_to_device(void *binding, const char *name, const void *memory)
{
    CHECK(binding && !strcmp(name, "y") && *(const int *)memory == 3);
    is_open++;
    expected = (value){0};
    return NULL;
}

static void *run_nodes(void *session, const void *options, const void *binding)
{
    CHECK(session && options && binding);
    runs++;
    return expected.data && out.data && expected.dims[0] != out.dims[0] ? &error : outcome("run");
}

static void *get_outputs(void *binding, void *allocator, void ***to, size_t *n)
{
    CHECK(binding && allocator);
    value *v = malloc(sizeof *v);
    *v = out;
    values++;
    lists++;
    *to = malloc(sizeof(void *));
    **to = v;
    *n = 1;
    return NULL;
}

static void *free_list(void *allocator, void *list)
{
    CHECK(allocator != NULL);
    lists--;
    free(list);
    return NULL;
}

static void *find_value(const void *v, void *to)
{
    *(int *)to = v && has_value;
    return NULL;
}

static void *get_info(const void *v, void *to)
{
    infos++;
    *(const void **)to = v;
    return NULL;
}

static void release_info(void *info) { infos -= info != NULL; }

static void *count_dims(const void *v, void *to)
{
    *(size_t *)to = ((const value *)v)->rank;
    return NULL;
}

static void *get_dims(const void *v, int64_t *to, size_t n)
{
    memcpy(to, ((const value *)v)->dims, n * sizeof *to);
    return NULL;
}

static void *get_data(const void *v, void *to)
{
    *(void **)to = ((const value *)v)->data;
    return outcome("data");
}

static void *const *table(void)
{
    static void *api[193];
    void *const given[][2] = {
        {(void *)2, (void *)text},
        {(void *)39, (void *)create_options},
        {(void *)41, (void *)set_severity},
        {(void *)49, (void *)create_value},
        {(void *)51, (void *)get_data},
        {(void *)61, (void *)count_dims},
        {(void *)62, (void *)get_dims},
        {(void *)65, (void *)get_info},
        {(void *)76, (void *)free_list},
        {(void *)93, (void *)release_nothing},
        {(void *)96, (void *)release_value},
        {(void *)97, (void *)release_nothing},
        {(void *)99, (void *)release_info},
        {(void *)133, (void *)run_nodes},
        {(void *)136, (void *)bind_input},
        {(void *)137, (void *)bind_output},
        {(void *)138, (void *)bind_to_device},
        {(void *)140, (void *)get_outputs},
        {(void *)192, (void *)find_value},
    };
    for (size_t i = 0; i < sizeof given / sizeof *given; i++)
        api[(size_t)given[i][0]] = given[i][1];
    return api;
}

enum { ROOM = 64 }; /* bytes of each argument in the pool, x before y */
static uint8_t pool[2 * ROOM], copied[ROOM / 2];
static const uint32_t declared[] = {0, 2};

/* A request of x: float[rows, columns] and, with `rank`, y of the same dimensions. */
static nnb_argument arguments[2];
static uint32_t dims[4];

static nnb_request *request(uint32_t rows, uint32_t columns, uint32_t rank)
{
    static nnb_request r = {.n_inputs = 1, .n_outputs = 1, .arguments = arguments, .dims = dims};
    uint32_t nbytes = 4 * rows * columns;
    arguments[0] = (nnb_argument){.length = nbytes, .rank = 2};
    arguments[1] = (nnb_argument){.offset = ROOM, .length = rank ? nbytes : ROOM, .rank = rank, .first_dim = 2};
    dims[0] = dims[2] = rows;
    dims[1] = dims[3] = columns;
    r.n_dims = 2 + rank;
    return &r;
}

static nnb_kernel *kernel(int session, int value_of_y, nnb_ort_argument *described)
{
    static int memory = 3;
    expected = (value){0};
    nnb_copy copies[] = {{copied, pool, 8, 0}};
    nnb_kernel *k;
    CHECK_EQ(nnb_ort_create(&k, table(), &session, &session, copies, 1, 0), 0);
    described[0] = (nnb_ort_argument){"x", copied, sizeof copied, declared, 2, 2, 0, 0, 1, 4, 0, -1, 1, 2, {1, 2}};
    described[1] = (nnb_ort_argument){"y", pool + ROOM, ROOM, declared, 2,     value_of_y < 0 ? 2 : 0, 0, ROOM, 1, 4,
                                      -1,  value_of_y,  1,    2,        {1, 2}};
    CHECK_EQ(nnb_ort_tell(k, described, 1, 1, &memory, &memory, 1), 0);
    return k;
}

/* A state: x is read where its buffer is now, with the dimensions that it has now, and y goes to another one. */
static void run_in_buffers(void)
{
    static const uint32_t made_with[] = {0, 2};
    static uint8_t made[2 * ROOM], bytes[4 * ROOM];
    nnb_ort_argument described[2];
    nnb_kernel *k = kernel(1, 0, described);
    nnb_buffer *buffers[2];
    nnb_buffer_contents *c[2];
    for (int i = 0; i < 2; i++) {
        CHECK_EQ(nnb_buffer_create(&buffers[i]), 0);
        c[i] = nnb_buffer_contents_of(buffers[i]);
        described[i].buffer = buffers[i];
        described[i].declared = made_with;
        described[i].offset = described[i].n_given = 0;
    }
    described[0].copy = -1;
    *c[0] = (nnb_buffer_contents){bytes, ROOM, 2, {3, 2}};
    *c[1] = (nnb_buffer_contents){bytes + ROOM, ROOM, 2, {0, 2}};
    memset(made, 9, sizeof made);
    out = (value){.data = made, .rank = 2, .dims = {4, 2}};
    bound[0] = bound[1] = is_open = 0;
    uint64_t moves = nnb_gate_moves(0);
    CHECK_EQ(nnb_kernel_run(k, 0), 0);
    CHECK(inputs.data == bytes);
    CHECK_EQ(inputs.nbytes, 24);
    CHECK_EQ(c[1]->dims[0], 4);
    CHECK_EQ(bytes[ROOM + 31], 9);
    CHECK_EQ(bytes[ROOM + 32], 0);
    CHECK_EQ(nnb_gate_moves(0), moves + 1);
    CHECK_EQ(nnb_kernel_run(k, 0), 0);
    CHECK_EQ(bound[0], 1); /* nothing has changed */
    CHECK_EQ(nnb_gate_moves(0), moves + 1);
    c[0]->place = bytes + 2 * ROOM;
    CHECK_EQ(nnb_kernel_run(k, 0), 0);
    CHECK(inputs.data == bytes + 2 * ROOM);
    c[0]->dims[0] = 5;
    CHECK_EQ(nnb_kernel_run(k, 0), 0);
    CHECK_EQ(inputs.dims[0], 5);
    CHECK_EQ(bound[0], 3);

    /* What was not bound is bound the next time. */
    c[0]->dims[0] = 6;
    refused = "bind";
    CHECK_EQ(nnb_kernel_run(k, 0), 2);
    refused = NULL;
    CHECK_EQ(nnb_kernel_run(k, 0), 0);
    CHECK_EQ(bound[0], 5);

    /* Too little room: the library keeps the output until there is enough. */
    out.dims[0] = 9;
    CHECK_EQ(nnb_kernel_run(k, 0), -ENOSPC);
    CHECK_EQ(described[1].is_sufficient, 0);
    CHECK_EQ(described[1].dims[0], 9);
    CHECK_EQ(c[1]->dims[0], 4);
    is_open = 0;
    CHECK_EQ(nnb_ort_take(k), -ENOSPC);
    CHECK_EQ(is_open, 0);
    c[1]->room = 2 * ROOM;
    CHECK_EQ(nnb_ort_take(k), 0);
    CHECK_EQ(is_open, 1);
    CHECK_EQ(c[1]->dims[0], 9);
    CHECK_EQ(bytes[ROOM + 71], 9);

    /* No contents but those for which the buffer was made. */
    out.dims[1] = 3;
    CHECK_EQ(nnb_kernel_run(k, 0), 2);
    CHECK(strstr(k->sentence(k), "buffer") != NULL);
    out = (value){.data = made, .rank = 2, .dims = {0, 2}};
    CHECK_EQ(nnb_kernel_run(k, 0), 2);
    out.rank = 1;
    CHECK_EQ(nnb_kernel_run(k, 0), 2);
    CHECK_EQ(c[1]->dims[0], 9);

    /* One that grows by the same again and again is expected to do so; if not, the graph runs again. */
    bound[1] = runs = 0;
    c[1]->room = 3 * ROOM;
    for (int64_t n = 1; n <= 4; n++) {
        out = (value){.data = made, .rank = 2, .dims = {n, 2}};
        CHECK_EQ(nnb_kernel_run(k, 0), 0);
        CHECK_EQ(c[1]->dims[0], n);
        CHECK_EQ(bound[1], n < 3 ? 0 : n - 2); /* by how much is known after two */
    }
    CHECK(expected.data == NULL);
    CHECK_EQ(runs, 4);
    out.dims[0] = 7;
    CHECK_EQ(nnb_kernel_run(k, 0), 0);
    CHECK_EQ(runs, 6);
    CHECK_EQ(c[1]->dims[0], 7);
    CHECK_EQ(nnb_kernel_run(k, 0), 0);
    CHECK_EQ(runs, 7);
    CHECK_EQ(bound[1], 3);
    for (int64_t n = 8; n <= 10; n++) {
        out.dims[0] = n;
        c[1]->room = n == 10 ? 79 : 3 * ROOM;
        CHECK_EQ(nnb_kernel_run(k, 0), n == 10 ? -ENOSPC : 0);
    }
    CHECK_EQ(bound[1], 3); /* no room for what is expected */
    c[1]->room = 3 * ROOM;
    CHECK_EQ(nnb_ort_take(k), 0);

    /* Requests use it as a whole, and say no dimensions. */
    nnb_request *whole = request(1, 2, 0);
    arguments[0] = arguments[1] = (nnb_argument){0};
    CHECK_EQ(k->adapt(k, whole), 0);
    for (int i = 0; i < 2; i++) {
        uint32_t *const fields[] = {&arguments[i].has_no_value, &arguments[i].pool_index, &arguments[i].offset,
                                    &arguments[i].length, &arguments[i].rank};
        for (size_t f = 0; f < sizeof fields / sizeof *fields; f++) {
            *fields[f] += 1;
            CHECK_EQ(k->adapt(k, whole), -EINVAL);
            *fields[f] -= 1;
        }
        described[i].n_given = arguments[i].rank = 2; /* whatever it was bound with */
        CHECK_EQ(k->adapt(k, whole), -EINVAL);
        described[i].n_given = arguments[i].rank = 0;
    }
    k->destroy(k);
    int64_t many[NNB_MAX_RANK + 1] = {1};
    CHECK_EQ(nnb_buffer_settle(buffers[0], NNB_MAX_RANK + 1, many), -EINVAL);
    CHECK_EQ(nnb_buffer_settle(buffers[0], NNB_MAX_RANK, many), 0);
    for (int i = 0; i < 2; i++)
        nnb_buffer_destroy(buffers[i]);
}

int main(void)
{
    watchdog();
    nnb_ort_argument described[2];
    nnb_kernel *k = kernel(1, -1, described);
    CHECK(k->result == NULL);

    /* What has changed is bound, and copied with its new length. */
    CHECK_EQ(k->adapt(k, request(3, 2, 2)), 0);
    CHECK_EQ(bound[0], 1);
    CHECK_EQ(bound[1], 1);
    CHECK_EQ(inputs.nbytes, 24);
    CHECK_EQ(inputs.dims[0], 3);
    memset(pool, 7, 24);
    CHECK_EQ(nnb_kernel_run(k, 0), 0);
    CHECK_EQ(copied[23], 7);
    CHECK_EQ(k->adapt(k, request(3, 2, 2)), 0);
    CHECK_EQ(bound[0], 1);

    /* No form but this one, nothing that the model does not take, no length but that of the dimensions. */
    CHECK_EQ(k->adapt(k, request(0, 2, 2)), -EINVAL);
    CHECK_EQ(k->adapt(k, request(3, 3, 2)), -EINVAL);
    CHECK_EQ(k->adapt(k, request(1u << 30, 2, 2)), -EINVAL);
    CHECK_EQ(k->adapt(k, request(2, 2, 0)), -EINVAL);
    for (int i = 0; i < 2; i++) {
        nnb_request *r = request(2, 2, 2);
        uint32_t *const fields[] = {&arguments[i].has_no_value,
                                    &arguments[i].pool_index,
                                    &arguments[i].offset,
                                    &arguments[i].length,
                                    &r->n_inputs,
                                    &r->n_outputs};
        for (size_t f = 0; f < sizeof fields / sizeof *fields; f++) {
            *fields[f] += 1;
            CHECK_EQ(k->adapt(k, r), -EINVAL);
            *fields[f] -= 1;
        }
    }
    CHECK_EQ(bound[0], 1);
    CHECK_EQ(k->adapt(k, request(4, 2, 2)), 0);
    CHECK_EQ(k->adapt(k, request(5, 2, 2)), -ENOSPC); /* the copy has room for 32 bytes */
    CHECK_EQ(described[0].dims[0], 4);

    refused = "create";
    CHECK_EQ(k->adapt(k, request(1, 2, 2)), -EIO);
    refused = "bind";
    CHECK_EQ(k->adapt(k, request(2, 2, 2)), -EIO);
    refused = NULL;
    k->destroy(k);
    CHECK_EQ(values, 0);

    /* What is left out is nowhere, and has no bytes. */
    k = kernel(1, -1, described);
    described[1] = (nnb_ort_argument){.copy = -1, .value = -1, .is_sufficient = 1};
    nnb_request *left_out = request(4, 2, 0);
    arguments[1] = (nnb_argument){.has_no_value = 1};
    CHECK_EQ(k->adapt(k, left_out), 0);
    uint32_t *const nowhere[] = {&arguments[1].pool_index, &arguments[1].offset, &arguments[1].length,
                                 &arguments[1].rank};
    for (size_t f = 0; f < sizeof nowhere / sizeof *nowhere; f++) {
        *nowhere[f] = 1;
        CHECK_EQ(k->adapt(k, left_out), -EINVAL);
        *nowhere[f] = 0;
    }
    k->destroy(k);

    /* An output of which only a run tells the dimensions. */
    k = kernel(1, 0, described);
    uint8_t made[2 * ROOM];
    memset(made, 5, sizeof made);
    out = (value){.data = made, .rank = 2, .dims = {8, 2}};
    CHECK_EQ(k->adapt(k, request(2, 2, 0)), 0);
    CHECK_EQ(nnb_kernel_run(k, 0), 0);
    CHECK_EQ(pool[2 * ROOM - 1], 5);
    CHECK_EQ(k->result(k)->status, 0);
    CHECK_EQ(k->result(k)->dims[0], 8);
    CHECK_EQ(k->result(k)->shapes[0].rank, 2);
    out.dims[0] = 9;
    CHECK_EQ(nnb_kernel_run(k, 0), NNB_OUTPUT_INSUFFICIENT_SIZE);
    CHECK_EQ(k->result(k)->status, NNB_OUTPUT_INSUFFICIENT_SIZE);
    CHECK_EQ(k->result(k)->dims[0], 9);
    CHECK_EQ(k->result(k)->shapes[0].is_sufficient, 0);
    out.dims[0] = 0;
    CHECK_EQ(nnb_kernel_run(k, 0), 0);
    CHECK_EQ(k->result(k)->shapes[0].is_sufficient, 1);

    /* Whatever fails, nothing stays that the library has given, and the output is open again. */
    out.dims[0] = 1;
    has_value = 0;
    CHECK_EQ(nnb_kernel_run(k, 0), 2);
    CHECK(strstr(k->sentence(k), "output y") != NULL);
    has_value = 1;
    out.rank = NNB_MAX_RANK + 1;
    CHECK_EQ(nnb_kernel_run(k, 0), 2);
    CHECK(strstr(k->sentence(k), "dimensions") != NULL);
    out = (value){.data = made, .rank = 2, .dims = {(1ll << 32) + 1, 0}};
    CHECK_EQ(nnb_kernel_run(k, 0), 2);
    CHECK(strstr(k->sentence(k), "dimensions") != NULL);
    out.dims[0] = 1;
    out.dims[1] = 2;
    refused = "data";
    CHECK_EQ(nnb_kernel_run(k, 0), 2);
    refused = "run";
    CHECK_EQ(nnb_kernel_run(k, 0), 2);
    CHECK_EQ(is_open, 8);
    k->destroy(k);
    refused = NULL;
    run_in_buffers();
    CHECK_EQ(values, 0);
    CHECK_EQ(infos, 0);
    CHECK_EQ(lists, 0);
    return 0;
}
