/* Every atomic access of the C core, and what acquire, release and seq_cst mean here.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * Both processes touch the counters of a queue and its event word. All other shared memory is ring data, which one
 * side writes and the other reads, never both at the same time: the counters say whose turn it is. The pairs:
 *
 *   SYNC POINT commit_write <-> available_to_read
 *     The writer fills ring bytes, then moves W with release: a channel by a store, other queues by a
 *     compare-and-swap, since a W that is not as the writer left it is corruption. (A swap that fails orders nothing:
 *     relaxed.) The reader loads W with acquire, then reads the bytes. One step publishes a whole packet.
 *
 *   SYNC POINT commit_read <-> available_to_write
 *     The reader has finished reading, then stores R with release. The writer loads R with acquire, then overwrites.
 *
 *   SYNC POINT publish <-> sleep   (a Dekker pair; needs a seq_cst fence on each side)
 *     Sender: store W (or R, for NOT_FULL); fence; load the event word. Sleeper: clear its bit in the event word;
 *     fence; load W (R). At least one of them sees the other: the sender sees the cleared bit and wakes, or the
 *     sleeper sees the new W and does not sleep. A seq_cst read-modify-write in place of the sleeper's fence would
 *     let the load of W be taken before the bit is cleared. A client that awaits answers in an event loop sets
 *     AWAITED before it clears NOT_EMPTY, in the same word: a sender that finds NOT_EMPTY cleared finds it set.
 *
 *   SYNC POINT wake <-> consume
 *     A side that always sets the bit (a blocking write, a hang-up) needs no fence: setting (release) and clearing
 *     (acquire, or relaxed before a fence) are read-modify-writes of one word. The side that clears the bit sees all
 *     that was stored before the bit was set.
 *
 *   SYNC POINT write_intent <-> overtaken   (unsynchronized queues in our own layout)
 *     The writer announces the bytes it is about to overwrite (relaxed store + release fence), then overwrites. A
 *     reader copies, then (acquire fence + relaxed load) checks that nothing it copied was announced. If it saw a new
 *     byte it also sees the announcement, so a torn element is never returned.
 *
 *   SYNC POINT hang_up <-> waiter
 *     The watcher stores the private flag with release, then wakes. The waiter loads it with acquire in every round.
 *
 *   SYNC POINT enter <-> leave   (burst_endpoint.c; a Dekker pair, all four seq_cst)
 *     A run claims the burst for its execution (a read-modify-write), then loads `left`. A thread that moves the
 *     execution to another burst stores `left`, then loads the claim. At least one of them sees the other,
 *     so one execution never runs on two bursts.
 *
 *   SYNC POINT leave_kernel <-> free_slot   (burst_server.c; read-modify-writes of one word)
 *     The listener has run a plan's kernel and gives the plan back with release. A thread that frees a slot takes the
 *     plan with acquire, and may end the kernel. If that thread comes first, it sees that the kernel runs; the
 *     listener then sees that the plan is gone, and reports when the kernel may end.
 *
 *   SYNC POINT guard_add <-> absorb   (memory_map.c; like a sequence lock)
 *     The owner claims the entry (a step of `turn`), passes a release fence, writes the fields and arms the entry (a
 *     step of `turn` with release). The handler loads `turn` with acquire, reads the fields, passes an acquire fence
 *     and looks at `turn` again: if it read a field of the next owner, it sees that the turn has passed.
 *
 *   SYNC POINT arm <-> claim   (memory_map.c)
 *     The next owner claims with acquire what the last one armed with release, so new fields are written after old
 *     ones. Withdrawing is a step of the same word in between, and needs no order.
 *
 *   SYNC POINT row_open <-> row_look   (watch.c)
 *     The writer fills a row, then stores its number with release. A reader loads the number with acquire first.
 *
 *   SYNC POINT row_close <-> row_look   (watch.c)
 *     The writer takes the number back, passes a release fence, and wipes the row. A reader reads the row, passes an
 *     acquire fence and loads the number again: if it read anything newer, the number has changed. No number
 *     is used twice.
 */
#ifndef NNB_ATOMIC_H
#define NNB_ATOMIC_H

#include <stdatomic.h>
#include <stdint.h>
#include <string.h>

#define NNB_CACHE_LINE 128 /* two 64-byte lines: adjacent-line prefetch pairs them on x86; 128 on some arm64 */

typedef _Atomic uint64_t nnb_a64;
typedef _Atomic uint32_t nnb_a32;

static inline uint64_t nnb_load_acquire(const nnb_a64 *p) { return atomic_load_explicit(p, memory_order_acquire); }
static inline uint64_t nnb_load_relaxed(const nnb_a64 *p) { return atomic_load_explicit(p, memory_order_relaxed); }
static inline void nnb_store_release(nnb_a64 *p, uint64_t v) { atomic_store_explicit(p, v, memory_order_release); }
static inline void nnb_store_relaxed(nnb_a64 *p, uint64_t v) { atomic_store_explicit(p, v, memory_order_relaxed); }

static inline void nnb_add_release(nnb_a64 *p, uint64_t v) { atomic_fetch_add_explicit(p, v, memory_order_release); }
static inline void nnb_add_relaxed(nnb_a64 *p, uint64_t v) { atomic_fetch_add_explicit(p, v, memory_order_relaxed); }
/* Returns 1 if the word was `from` and is now `to`. */
#define NNB_CAS(name, bits, order)                                                                 \
    static inline int name(nnb_a##bits *p, uint##bits##_t from, uint##bits##_t to)                 \
    {                                                                                              \
        return atomic_compare_exchange_strong_explicit(p, &from, to, order, memory_order_relaxed); \
    }
NNB_CAS(nnb_cas_acquire, 64, memory_order_acquire)
NNB_CAS(nnb_cas_release, 64, memory_order_release)
NNB_CAS(nnb_cas_relaxed, 64, memory_order_relaxed)
NNB_CAS(nnb_cas_seq_cst, 64, memory_order_seq_cst)
NNB_CAS(nnb_cas32_relaxed, 32, memory_order_relaxed)
NNB_CAS(nnb_cas32_release, 32, memory_order_release)

static inline uint64_t nnb_load_seq_cst(const nnb_a64 *p) { return atomic_load_explicit(p, memory_order_seq_cst); }
static inline uint32_t nnb_load32_seq_cst(const nnb_a32 *p) { return atomic_load_explicit(p, memory_order_seq_cst); }
static inline void nnb_store32_seq_cst(nnb_a32 *p, uint32_t v) { atomic_store_explicit(p, v, memory_order_seq_cst); }

static inline uint32_t nnb_load32_acquire(const nnb_a32 *p) { return atomic_load_explicit(p, memory_order_acquire); }
static inline uint32_t nnb_load32_relaxed(const nnb_a32 *p) { return atomic_load_explicit(p, memory_order_relaxed); }
static inline void nnb_store32_release(nnb_a32 *p, uint32_t v) { atomic_store_explicit(p, v, memory_order_release); }
static inline void nnb_store32_relaxed(nnb_a32 *p, uint32_t v) { atomic_store_explicit(p, v, memory_order_relaxed); }

/* Each of these returns the word's old value. */
#define NNB_CHANGE(name, bits, operation, order)                        \
    static inline uint##bits##_t name(nnb_a##bits *p, uint##bits##_t v) \
    {                                                                   \
        return atomic_##operation##_explicit(p, v, order);              \
    }
NNB_CHANGE(nnb_or32_release, 32, fetch_or, memory_order_release)
NNB_CHANGE(nnb_and32_acquire, 32, fetch_and, memory_order_acquire)
NNB_CHANGE(nnb_and32_relaxed, 32, fetch_and, memory_order_relaxed)
NNB_CHANGE(nnb_swap_release, 64, exchange, memory_order_release)

/* ThreadSanitizer does not model fences. Under it a fence is a read-modify-write of a word that all threads share,
 * which gives it edges between any two fences: at least those of the real fence. */
#if defined(__SANITIZE_THREAD__)
static nnb_a32 nnb_tsan_fence_word;
#define NNB_FENCE(order) atomic_fetch_add(&nnb_tsan_fence_word, 0)
#define NNB_BEFORE_FENCE memory_order_acquire
#else
#define NNB_FENCE(order) atomic_thread_fence(order)
#define NNB_BEFORE_FENCE memory_order_relaxed
#endif
static inline void nnb_fence_seq_cst(void) { NNB_FENCE(memory_order_seq_cst); }
static inline void nnb_fence_acquire(void) { NNB_FENCE(memory_order_acquire); }
static inline void nnb_fence_release(void) { NNB_FENCE(memory_order_release); }
/* For loads before a seq_cst fence, which makes them an acquire. */
NNB_CHANGE(nnb_take32, 32, fetch_and, NNB_BEFORE_FENCE)

/* Saves power in a spin loop, and lets the loop end without a pipeline flush. */
static inline void nnb_pause(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb" ::: "memory");
#else
    atomic_signal_fence(memory_order_seq_cst);
#endif
}

static inline void nnb_copy_byte_racy(uint8_t *dst, const uint8_t *src, int shared_is_source)
{
    if (shared_is_source)
        *dst = atomic_load_explicit((const _Atomic uint8_t *)src, memory_order_relaxed);
    else
        atomic_store_explicit((_Atomic uint8_t *)dst, *src, memory_order_relaxed);
}

/* Copies bytes that the other side may be changing, byte by byte or word by word: torn perhaps, but never
 * undefined. */
static inline void nnb_copy_racy(uint8_t *dst, const uint8_t *src, uint64_t n, int shared_is_source)
{
    uint64_t i = 0;
    const uint8_t *shared = shared_is_source ? src : dst;
    for (; i < n && ((uintptr_t)(shared + i) & 7); i++)
        nnb_copy_byte_racy(dst + i, src + i, shared_is_source);
    for (; i + 8 <= n; i += 8) {
        uint64_t word;
        if (shared_is_source) {
            word = nnb_load_relaxed((const nnb_a64 *)(const void *)(src + i));
            memcpy(dst + i, &word, 8);
        } else {
            memcpy(&word, src + i, 8);
            nnb_store_relaxed((nnb_a64 *)(void *)(dst + i), word);
        }
    }
    for (; i < n; i++)
        nnb_copy_byte_racy(dst + i, src + i, shared_is_source);
}

#endif
