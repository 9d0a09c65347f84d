/* nnburst C core: the two measurements that `nnburst bench` compares everything else with.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * Both run a client and a server thread, pinned to a CPU each, and take one clock reading per iteration: sample i is
 * the time between the readings i and i+1 of the client, so every sample contains exactly one clock read
 * (nnb_bench_clock says how much that is). They block the caller, at most BENCH_LIMIT (5 s).
 *
 * client_cpu, server_cpu: CPU numbers; warmup: iterations that are not recorded; samples: room for `count` ns.
 * Return 0, -EINVAL (count 0, a CPU that the process may not use), -ETIMEDOUT, or the errno of what could not be
 * created.
 */
#ifndef NNB_BENCH_H
#define NNB_BENCH_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* L: one cache line that the two threads hand to each other, there and back. */
int nnb_bench_line(int client_cpu, int server_cpu, uint32_t warmup, uint32_t count, uint32_t *samples);

/* A packet of `datums_there` 24-byte elements through one nnb_mq and one of `datums_back` through another, both
 * attached as a burst attaches them (exclusive, sealed, polled). */
int nnb_bench_queue(int client_cpu, int server_cpu, uint32_t datums_there, uint32_t datums_back, uint32_t warmup,
                    uint32_t count, uint32_t *samples);

/* The cost of the clock reading itself, back to back, on the calling thread. */
int nnb_bench_clock(uint32_t count, uint32_t *samples);

#ifdef __cplusplus
}
#endif

#endif
