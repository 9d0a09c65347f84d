/* Three workers and one processor. A request of high priority does not wait for a run of low priority, as another one of
 * low priority does. While both runs end a third worker comes: one of the three leads then, sees what the others
 * did, and runs the other request. All that they had is freed. */
#define CPUS 1
#define WORKERS 3
#include "group.h"

static void *end_run(void *worker)
{
    assert(nnb_group_answer(worker) == 0);
    return NULL;
}

static void *come(void *worker)
{
    pthread_mutex_lock(&group->lock);
    assert(line_up(group, worker) >= 0);
    pthread_mutex_unlock(&group->lock);
    return NULL;
}

static void *end_all(void *unused)
{
    nnb_worker *leader = NULL;
    for (int i = 0; i < WORKERS; i++)
        if (workers[i]->role == NNB_LEADS) {
            assert(!leader);
            leader = workers[i];
        }
    catch_up();
    assert(look(leader)->number == 0 && nnb_group_answer(leader) == 0);
    assert(servers[0].answered == 2 && servers[1].answered == 1);
    unpark(group, workers[1]);
    for (int i = 0; i < WORKERS; i++)
        nnb_worker_destroy(workers[i]);
    nnb_group_destroy(group);
    return unused;
}

int main(void)
{
    set_up(0, 3);
    join(0, 1);
    join(1, 0);
    servers[1].is_new = 1;
    send(0);
    begin_detached(workers[2]);
    send(0);
    send(1);
    begin_to_lead(workers[0]);
    nnb_look_at_all(group);
    assert(begin(workers[0]) >= 0 && workers[0]->role == NNB_DETACHED && workers[0]->burst->number == 1);
    pthread_t threads[WORKERS];
    pthread_create(&threads[0], NULL, end_run, workers[0]);
    pthread_create(&threads[1], NULL, come, workers[1]);
    pthread_create(&threads[2], NULL, end_run, workers[2]);
    for (int i = 0; i < WORKERS; i++)
        pthread_join(threads[i], NULL);
    pthread_create(&threads[0], NULL, end_all, NULL);
    return 0;
}
