/* The protocol of a burst: sleep, wake and death, one step at a time.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * A client runs three requests, one after the other; a server answers them. Both sleep whenever they find nothing. The
 * process of each may be killed before any step, one or both. A watcher then hangs up on the other side: private flag,
 * bit, wake. Whatever happens, no living side sleeps for ever (Spin: no invalid end state), each answer belongs to its
 * request, and a side ends only with all answers or because the other is dead.
 *
 * Memory orders are the business of the programs beside this file; here each step is seen at once. Each FAULT_ leaves
 * something out, and Spin must find it: tests/unit/test_memory_orders.py.
 */
#define RUNS 3
#define REQUEST 0 /* rings, by what they carry */
#define RESULT 1
#define NOT_EMPTY 1 /* bits of an event word */
#define HANG_UP 2

byte written[2], read[2], packet[2];
byte word[2];
bool asleep[2];  /* the receiver of the ring is in the kernel's queue */
bool hung_up[2]; /* the receiver's private flag */
bool killed[2];  /* the process that receives from the ring */

/* Sets bits; wakes if one was not pending (nnb_event_wake). */
inline wake(ring, bits)
{
    d_step { pending = word[ring] & bits; word[ring] = word[ring] | bits }
    if
    :: pending == bits -> skip
    :: else -> asleep[ring] = false
    fi
}

/* The sender looks first (nnb_channel_send). */
inline send(ring, value)
{
    packet[ring] = value;
    written[ring]++;
#ifdef FAULT_LOOK_BEFORE_STORE
    /* the look was taken before the packet was there */
    if
    :: looked -> skip
    :: else -> wake(ring, NOT_EMPTY)
    fi
#else
    if
    :: word[ring] & NOT_EMPTY -> skip
    :: else -> wake(ring, NOT_EMPTY)
    fi
#endif
}

/* Until a packet is there (rc = its value) or this side is hung up (rc = 0): nnb_channel_wait over nnb_event_wait. */
inline receive(ring)
{
    rc = 0;
    do
    :: written[ring] != read[ring] -> rc = packet[ring]; read[ring]++; break
    :: written[ring] == read[ring] && hung_up[ring] -> break
    :: written[ring] == read[ring] && !hung_up[ring] ->
        d_step { pending = word[ring] & (NOT_EMPTY | HANG_UP); word[ring] = word[ring] - pending; seen = word[ring] }
#ifdef FAULT_SLEEP_WITHOUT_LOOKING_AGAIN
        pending = 0;
#endif
        if
        :: pending -> skip /* look again */
        :: else ->
#ifdef FAULT_KERNEL_COMPARES_NOTHING
            asleep[ring] = true;
#else
            if
            :: d_step { word[ring] == seen -> asleep[ring] = true }
            :: d_step { word[ring] != seen -> skip }
            fi;
#endif
            !asleep[ring];
            word[ring] = 0
        fi
    od
}

proctype client()
{
    byte i = 1, rc, pending, seen;
    bool looked;
    {
        do
        :: i <= RUNS ->
            looked = word[REQUEST] & NOT_EMPTY;
            send(REQUEST, i);
            receive(RESULT);
            if
            :: rc == 0 -> assert(killed[REQUEST]); break
            :: else -> assert(rc == 10 + i); i++
            fi
        :: else -> break
        od
    } unless { killed[RESULT] }
}

proctype server()
{
    byte i = 1, rc, pending, seen;
    bool looked;
    {
        do
        :: i <= RUNS ->
            receive(REQUEST);
            if
            :: rc == 0 -> assert(killed[RESULT]); break
            :: else -> assert(rc == i); looked = word[RESULT] & NOT_EMPTY; send(RESULT, 10 + i); i++
            fi
        :: else -> break
        od
    } unless { killed[REQUEST] }
}

/* Watches the other process and hangs up on the receiver of `ring` (nnb_channel_hang_up), in whose process it is. */
proctype watcher(byte ring)
{
    byte pending;
end:
    {
        killed[1 - ring];
#ifdef FAULT_FLAG_AFTER_WAKE
        wake(ring, HANG_UP);
        hung_up[ring] = true
#else
        hung_up[ring] = true;
#ifdef FAULT_HANG_UP_WITHOUT_BIT
        asleep[ring] = false
#else
        wake(ring, HANG_UP)
#endif
#endif
    } unless { killed[ring] }
}

proctype killer(byte ring)
{
    if
    :: killed[ring] = true
    :: skip
    fi
}

init
{
    atomic {
        run client();
        run server();
        run watcher(REQUEST);
        run watcher(RESULT);
        run killer(REQUEST);
        run killer(RESULT)
    }
}
