"""What a service process is told when it is started: an argument of its command line, and how its threads are run."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
from msgspec.structs import asdict

from ...errors import DeviceUnavailable, InvalidArgument

POLICIES = {"fifo": os.SCHED_FIFO, "rr": os.SCHED_RR}
_PRIORITIES = range(1, 100)
_CPUS = range(8192)
"""Numbers that a CPU can have: no Linux is built for more."""
_REMEDY = (
    "allow it with `ulimit -r {0}` (`rtprio {0}` in /etc/security/limits.conf, LimitRTPRIO={0} in a systemd unit, "
    "the limit rtprio of a container) or give the process CAP_SYS_NICE"
)


@dataclass(frozen=True)
class Scheduling:
    """How a service is scheduled; the default leaves it as it was started.

    Attributes:
        policy: Of `POLICIES`; empty for the usual one.
        priority: 1 to 99 with a policy.
        cpus: Where it may run; empty for where the process that starts it may.

    Raises:
        InvalidArgument: The policy, the priority or a CPU cannot be.
    """

    policy: str = ""
    priority: int = 0
    cpus: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if self.policy and (self.policy not in POLICIES or self.priority not in _PRIORITIES):
            raise InvalidArgument(
                f"scheduler {self.policy}:{self.priority}: the policy is 'fifo' or 'rr', the priority 1 to 99"
            )
        for cpu in self.cpus:
            if type(cpu) is not int or cpu not in _CPUS:
                raise InvalidArgument(
                    f"affinity: the numbers of CPUs are 0 to {_CPUS[-1]}, and {cpu!r} is none of them"
                )

    @classmethod
    def of(cls, scheduler: tuple[str, int] | None, affinity: Collection[int] | None) -> Scheduling:
        """Take the arguments of `launch`."""
        match scheduler:
            case None:
                policy, priority = "", 0
            case [str() as policy, int() as priority] if policy and type(priority) is int:
                pass
            case _:
                raise InvalidArgument(f'scheduler={scheduler!r}; give policy and priority, as in ("fifo", 20)')
        cpus: frozenset[int] = frozenset()
        if affinity is not None:
            with contextlib.suppress(TypeError):
                cpus = frozenset(affinity)
            if not cpus:
                raise InvalidArgument(f"affinity={affinity!r}; give the numbers of CPUs, as in {{1}}")
        return cls(policy, priority, cpus)

    def apply(self) -> None:
        """Take it on for this thread, and so for those that it starts.

        Raises:
            InvalidArgument: There is no such CPU for this process.
            DeviceUnavailable: The system refuses; the message says what allows it.
        """
        if self.cpus:
            try:
                os.sched_setaffinity(0, self.cpus)
            except OSError as error:
                raise InvalidArgument(f"affinity {_text(self.cpus)} is refused: {_here(error)}") from None
            missing = self.cpus - os.sched_getaffinity(0)
            if missing:
                raise InvalidArgument(f"affinity {_text(self.cpus)}: no CPU {_text(missing)} for this process")
        if self.policy:
            try:
                self._set(self.priority)
            except OSError as error:
                raise DeviceUnavailable(
                    f"scheduler {self.policy}:{self.priority} is refused: {error.strerror}; "
                    + _REMEDY.format(self.priority)
                ) from None

    def above(self, watcher: Callable[[], object]) -> None:
        """Call `watcher`, which starts a thread that ends this process if need be.

        The thread runs one step above the others, so that a device that never gives up its CPU cannot keep it from
        that; where that is refused, as they do.
        """
        if self.policy:
            with contextlib.suppress(OSError):
                self._set(self.priority + 1)
        watcher()
        if self.policy:
            self._set(self.priority)

    def _set(self, priority: int) -> None:
        os.sched_setscheduler(0, POLICIES[self.policy], os.sched_param(priority))


def _here(error: OSError) -> str:
    with contextlib.suppress(OSError):
        return f"this process may run on CPU {_text(os.sched_getaffinity(0))}"
    return error.strerror or str(error)


def _text(cpus: Iterable[int]) -> str:
    return ",".join(map(str, sorted(cpus)))


class ServiceOptions(msgspec.Struct, frozen=True):
    """How a process serves.

    Attributes:
        devices: By name.
        log_level: A number of `logging`.
        quotas: Other than in `Quotas`, of a connection.
        max_run, max_compile: Seconds that running and compiling a model may take; None for no limit.
        scheduling: When and where its threads run.
        sandbox: Mode of `close_door`.
        warm: Load at once what most models need.
        path: Where the client's program finds its modules.
        socket: Inherited end of a socketpair.
        stderr: Becomes stdout and stderr once all is well.
        functions: Where the functions are that the client has sent, of the device ``nnburst-function``.
        faults: Where orders of faults come from.
        parent: Process id of a client that has started it.
        client: A pidfd of any other.
        worker: Name of a service whose broker the client is, which hands over others.
        user_quotas: Other than in `PER_USER`, of a worker.
        own: It runs one user's own models, within their limits.
        named: It serves models that the broker publishes.
        apart: Devices for published models alone.
        state: Directory of the trust store; None for the usual one.
    """

    devices: tuple[str, ...]
    log_level: int = logging.WARNING
    quotas: dict[str, int] = {}
    max_run: float | None = None
    max_compile: float | None = None
    scheduling: Scheduling = Scheduling()
    sandbox: str = "on"
    warm: bool = False
    path: tuple[str, ...] = ()
    socket: int = -1
    stderr: int = -1
    functions: int = -1
    faults: int = -1
    parent: int = 0
    client: int = -1
    worker: str | None = None
    user_quotas: dict[str, int] = {}
    own: bool = False
    named: bool = False
    apart: tuple[str, ...] = ()
    state: str | None = None

    def __str__(self) -> str:
        """Return them as JSON, in which a path may have bytes that are no UTF-8."""
        return json.dumps(asdict(self), default=msgspec.to_builtins)

    @classmethod
    def read(cls, text: str, **others: Any) -> ServiceOptions:
        """Return what was written so, but for some."""
        return _read({**json.loads(text), **others})


_read: Callable[[object], ServiceOptions] = partial(msgspec.convert, type=ServiceOptions)
_read({"devices": ()})  # makes what reads the type, before there are threads
