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
from ...model.types import Priority
from ..polling import allowed_cpus
from .loop import SERVING, serve

if TYPE_CHECKING:
    from ..._core._nnburst import CData
    from ..kernel import Kernel
    from .server import ServerEnd

_log = logging.getLogger("nnburst.burst")
_RANKS = {Priority.HIGH: 0, Priority.MEDIUM: 1, Priority.LOW: 2}


class ListenerGroup:
    """Listener threads, about as many as processors, that serve all bursts of a service.

    The request of the highest priority runs next; among equals, the request of the client that has used the least
    time (``csrc/schedule.c``).

    Args:
        runs: Maximum number of simultaneous executions; None for the number of processors that this process may use.
        most_words: Maximum number of queues that one sleeping thread waits for; for tests.
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
        self._batchers: set[CData] = set()  # C may still use batchers of closed models
        self._closed = False
        SERVING[id(self)] = self

    def add(self, burst: ServerEnd, queue: FlowQueue, endpoint: CData) -> None:
        """Serve another burst.

        Raises:
            BadState: The group is closed.
            ResourceExhausted: There are too many bursts, or the system cannot start a thread.
        """
        with self._lock:  # workers look up the burst under this lock
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
            burst.place_plans(self._plans, number * lib.NNB_BURST_PLANS)

    def _ensure_threads(self) -> None:
        """Start a thread for the first burst, and a second for further bursts: a run may block a thread forever."""
        wanted = 1 + any(burst is not None and burst.alive for burst in self._bursts)
        while (there := lib.nnb_group_workers(self._handle)) < wanted:
            if self._start_thread():
                continue
            if not there:
                raise ResourceExhausted("a burst needs a thread, and the system has none")
            return  # these threads are enough for now; C asks for more when it needs them

    def _start_thread(self) -> bool:
        """Start a thread, or return False. Never raises, because the caller may be the thread that polls all queues."""
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
        except BaseException:  # only the run of this thread fails
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
                self._remove(event - lib.NNB_BURST_ENDED).end(lib.nnb_worker_ending(worker))
            elif event == -errno.EUSERS:
                self._start_thread()
            else:
                return  # the group is closed, or has enough threads

    def _burst_of(self, plan: int) -> ServerEnd:
        with self._lock:
            burst = self._bursts[plan // lib.NNB_BURST_PLANS]
        assert burst is not None
        return burst

    def _remove(self, plan: int) -> ServerEnd:
        """Remove and return a burst that has ended. `plan` is the number of any of its prepared requests."""
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
        """Wake the threads, so that they end each burst whose `hang_up` was called."""
        lib.nnb_group_wake_all(self._handle)

    def flow(self) -> Flow:
        """Return a `Flow` for the bursts of another client."""
        flow = Flow(self, next(self._numbers))
        weakref.finalize(flow, lib.nnb_group_leave, self._handle, flow.number).atexit = False
        return flow

    def detach_client(self) -> None:
        """Report to all bursts that their clients no longer wait for answers."""
        for burst in tuple(self._bursts):
            if burst is not None:
                burst.detach_client()

    def close(self) -> None:
        """End all bursts and threads after their current runs. Idempotent."""
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
    """The account of the processor time that all bursts of one client have used, including closed bursts."""

    group: ListenerGroup
    number: int


@dataclass(frozen=True, slots=True)
class Batcher:
    """A batcher, which joins waiting requests of one model into one run.

    Attributes:
        pointer: The ``nnb_batcher *``, shared by the model's bursts.
        wait_ns: Longest time in nanoseconds that a request waits for requests that may still come, or for a run in
            progress. With 0, a request waits for neither.
    """

    pointer: CData
    wait_ns: int

    @classmethod
    def make(cls, most: int, wait: float) -> Batcher:
        """Return a batcher for runs of at most `most` requests. A request waits at most `wait` seconds for more."""
        wait_ns = max(1, int(wait * 1e9))
        return cls(ffi.new("nnb_batcher *", (most, wait_ns)), wait_ns)


@dataclass(frozen=True, slots=True)
class FlowQueue:
    """A burst's queue in a `ListenerGroup`.

    Attributes:
        flow: The account of the client's processor time.
        priority: Priority of the queue's requests.
        batcher: Batcher that joins the requests with requests from the model's other bursts, or None.
    """

    flow: Flow
    priority: Priority = Priority.MEDIUM
    batcher: Batcher | None = None
