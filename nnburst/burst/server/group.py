"""A few listener threads that serve the bursts of many clients."""

from __future__ import annotations

import errno
import itertools
import logging
import threading
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..._core._nnburst import ffi, lib
from ..._core.deadline import Deadline
from ..._core.errno import check
from ..._core.threads import start
from ...errors import BadState, ResourceExhausted
from ...model import Priority
from ..polling import allowed_cpus
from .loop import SERVING, serve

if TYPE_CHECKING:
    from ..._core._nnburst import CData
    from ..kernel import Kernel
    from .server import ServerEnd

_log = logging.getLogger("nnburst.burst")
_RANKS = {Priority.HIGH: 0, Priority.MEDIUM: 1, Priority.LOW: 2}


class ListenerGroup:
    """Listener threads, about as many as there are processors, that share the bursts of a service.

    The next request is that of the highest priority, then that of the client whose runs took the least time so far.
    Who is next is decided in ``csrc/schedule.c``; how threads wait, poll and make room for each other is in
    ``csrc/nnb_group.h``.

    Args:
        runs: Executions that may run at the same time; None for the processors that this process may use.
        most_words: Queues that one thread sleeps on at a time, at most what the kernel allows; for tests.
    """

    def __init__(self, runs: int | None = None, *, most_words: int = 127) -> None:
        out = ffi.new("nnb_group **")
        check(lib.nnb_group_create(out, runs or len(allowed_cpus()), most_words), "listener group")
        self._handle = ffi.gc(out[0], lib.nnb_group_destroy)
        self._lock = threading.RLock()
        self._plans: list[Kernel] = []
        self._bursts: list[ServerEnd | None] = []
        self._threads: set[threading.Thread] = set()
        self._numbers = itertools.count(1)
        self._batchers: set[CData] = set()  # the leader may still know those of models that are gone
        self._closed = False
        SERVING[id(self)] = self

    def add(self, burst: ServerEnd, queue: FlowQueue, endpoint: CData) -> None:
        """Serve one more burst; `BadState` if the group is closed, `ResourceExhausted` if there is no thread for it."""
        with self._lock:  # before this is released, no worker finds the burst of a number
            if self._closed:
                raise BadState("the listener group is closed")
            self._ensure_threads()
            batcher = queue.batcher or Batcher(ffi.NULL, 0)
            self._batchers.add(batcher.pointer)
            seat = queue.flow.number, _RANKS[queue.priority], batcher.pointer, batcher.wait_ns
            full = {errno.EMFILE: ResourceExhausted(f"a service has {lib.NNB_MAX_BURSTS:,} bursts at most")}
            number = check(lib.nnb_group_add(self._handle, endpoint, *seat), "burst", full)
            while len(self._bursts) <= number:
                self._bursts.append(None)
            self._bursts[number] = burst
            burst.take_places(self._plans, number * lib.NNB_BURST_PLANS)

    def _ensure_threads(self) -> None:
        """One for the first burst; with others, one that is there if a run of the first one does not end."""
        wanted = 1 + any(burst is not None and burst.alive for burst in self._bursts)
        while (there := lib.nnb_group_workers(self._handle)) < wanted:
            if self._start_thread():
                continue
            if not there:
                raise ResourceExhausted("a burst needs a thread, and the system has none")
            return  # fewer do; more are asked for when they are missed

    def _start_thread(self) -> bool:
        """Whether there was one to be had. Raises nothing: the thread that asks may be the one that leads."""
        out = ffi.new("nnb_worker **")
        if lib.nnb_worker_create(out, self._handle) < 0:
            _log.warning("no memory for another listener")
            return False
        thread = threading.Thread(target=self._run, args=(out[0],), name="nnburst-listener", daemon=True)
        self._threads.add(thread)
        try:
            start(thread, "another listener")
        except ResourceExhausted as error:
            self._threads.discard(thread)
            lib.nnb_worker_destroy(out[0])
            _log.warning("%s", error)
            return False
        return True

    def _run(self, worker: CData) -> None:
        try:
            self._listen(worker)
            return
        except BaseException:  # the run that it had fails
            _log.exception("a listener failed; another one takes its place")
        finally:
            lib.nnb_worker_destroy(worker)
            self._threads.discard(threading.current_thread())
        with self._lock:
            if not self._closed:
                self._start_thread()

    def _listen(self, worker: CData) -> None:
        while True:
            event = serve(lib.nnb_group_next, worker, self._plans, self._burst_of)
            if event >= lib.NNB_BURST_ENDED:
                self._take_out(event - lib.NNB_BURST_ENDED).end(lib.nnb_worker_ending(worker))
            elif event == -errno.EUSERS:
                self._start_thread()
            else:
                return  # the group is closed, or has threads enough

    def _burst_of(self, plan: int) -> ServerEnd:
        with self._lock:
            burst = self._bursts[plan // lib.NNB_BURST_PLANS]
        assert burst is not None
        return burst

    def _take_out(self, plan: int) -> ServerEnd:
        """Forget a burst that is over. The worker gives its number back afterwards."""
        with self._lock:
            burst = self._burst_of(plan)
            self._bursts[plan // lib.NNB_BURST_PLANS] = None
        return burst

    @property
    def threads(self) -> int:
        return len(self._threads)

    def serves_here(self) -> bool:
        return threading.current_thread() in self._threads

    def wake_all(self) -> None:
        """Have the threads look at what has been hung up."""
        lib.nnb_group_wake_all(self._handle)

    def flow(self) -> Flow:
        """Return a flow for the bursts of one more client."""
        flow = Flow(self, next(self._numbers))
        weakref.finalize(flow, lib.nnb_group_leave, self._handle, flow.number).atexit = False
        return flow

    def leave(self) -> None:
        """No answer is awaited any more."""
        for burst in tuple(self._bursts):
            if burst is not None:
                burst.leave()

    def close(self) -> None:
        """End all bursts and the threads, once what they run is over. Idempotent."""
        with self._lock:
            self._closed = True
            bursts = [burst for burst in self._bursts if burst is not None]
        for burst in bursts:
            burst.hang_up()
        for burst in bursts:
            burst.close()
        lib.nnb_group_close(self._handle)
        for thread in tuple(self._threads):
            if thread is not threading.current_thread():
                thread.join(Deadline.after().left())


@dataclass(frozen=True, eq=False)
class Flow:
    """The requests of one client to a group: all count together, also those of bursts that it has closed.

    Forgotten with this object.
    """

    group: ListenerGroup
    number: int


@dataclass(frozen=True, slots=True)
class Batcher:
    """Where requests of one model wait for each other, to run as one.

    Attributes:
        pointer: The ``nnb_batcher *``, of all that may.
        wait_ns: That a request waits for others that may come. 0: it wants a fast answer, and does not wait for those
            that run, either.
    """

    pointer: CData
    wait_ns: int

    @classmethod
    def make(cls, most: int, wait: float) -> Batcher:
        """For runs of so many requests, which wait so many seconds."""
        wait_ns = max(1, int(wait * 1e9))
        return cls(ffi.new("nnb_batcher *", (most, wait_ns)), wait_ns)


@dataclass(frozen=True, slots=True)
class FlowQueue:
    """The queue of a burst that a group serves.

    Attributes:
        flow: All queues of one flow share what it gets.
        priority: Of its requests among those that wait.
        batcher: Where they wait for those of others, or None.
    """

    flow: Flow
    priority: Priority = Priority.MEDIUM
    batcher: Batcher | None = None
