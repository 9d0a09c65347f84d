"""The options of a service process, passed on its command line, and the scheduling of its threads."""

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
"""Possible CPU numbers: no Linux kernel is built for more."""
_REMEDY = (
    "allow it with `ulimit -r {0}` (`rtprio {0}` in /etc/security/limits.conf, LimitRTPRIO={0} in a systemd unit, "
    "the limit rtprio of a container) or give the process CAP_SYS_NICE"
)


@dataclass(frozen=True)
class Scheduling:
    """The scheduling policy, priority and CPUs of a service. The default changes nothing.

    Attributes:
        policy: One of `POLICIES`; "" for the default policy.
        priority: 1 to 99; unused without a policy.
        cpus: CPUs that the service may run on; empty for the CPUs of the process that starts it.

    Raises:
        InvalidArgument: The policy, the priority or a CPU is invalid.
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
        """Return the scheduling that arguments of `launch` describe."""
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
        """Apply the scheduling to this thread and to threads that it starts later.

        Raises:
            InvalidArgument: A CPU does not exist or is not allowed for this process.
            DeviceUnavailable: The system refuses the policy. The message names a remedy.
        """
        if self.cpus:
            try:
                os.sched_setaffinity(0, self.cpus)
            except OSError as error:
                raise InvalidArgument(f"affinity {_list(self.cpus)} is refused: {_cpus_hint(error)}") from None
            missing = self.cpus - os.sched_getaffinity(0)
            if missing:
                raise InvalidArgument(f"affinity {_list(self.cpus)}: no CPU {_list(missing)} for this process")
        if self.policy:
            try:
                self._set(self.priority)
            except OSError as error:
                raise DeviceUnavailable(
                    f"scheduler {self.policy}:{self.priority} is refused: {error.strerror}; "
                    + _REMEDY.format(self.priority)
                ) from None

    def run_above(self, watcher: Callable[[], object]) -> None:
        """Raise this thread's priority while `watcher` runs. `watcher` starts a thread that can end this process.

        The new thread inherits the higher priority, so it runs even if a device never yields its CPU. If the system
        refuses the higher priority, `watcher` runs at the present priority.
        """
        if self.policy:
            with contextlib.suppress(OSError):
                self._set(self.priority + 1)
        watcher()
        if self.policy:
            self._set(self.priority)

    def _set(self, priority: int) -> None:
        os.sched_setscheduler(0, POLICIES[self.policy], os.sched_param(priority))


def _cpus_hint(error: OSError) -> str:
    with contextlib.suppress(OSError):
        return f"this process may run on CPU {_list(os.sched_getaffinity(0))}"
    return error.strerror or str(error)


def _list(cpus: Iterable[int]) -> str:
    return ",".join(map(str, sorted(cpus)))


class ServiceOptions(msgspec.Struct, frozen=True):
    """The options of a service process.

    Attributes:
        devices: Names of devices.
        log_level: Level of the log, as a number of `logging`.
        quotas: Quotas of a connection that differ from the defaults of `Quotas`.
        max_run, max_compile: Seconds that one run, or one compilation, may take; None for no limit.
        scheduling: Scheduling of the service's threads.
        sandbox: "on", "strict" or "off", as for `nnburst.launch`.
        warm: True to load at once the modules that most models need.
        path: Module search path of the client's program.
        socket: Inherited end of a socketpair.
        stderr: Descriptor that becomes stdout and stderr once the service has started.
        functions: Descriptor of a file that contains the client's functions.
        faults: Descriptor of the socket for orders to fault points.
        parent: Process id of the client, if the client is this process's parent.
        client: A pidfd of the client, if the client is not this process's parent.
        worker: Name of the service, if this process is a worker and the client is the broker.
        user_quotas: Quotas of a user that differ from `PER_USER`, for a worker.
        own: True if the process runs the models of one user, within the user's limits.
        named: True if the process serves models that the broker publishes.
        apart: Devices that run published models only.
        state: Directory of the trust store; None for the default.
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
        """Return the options as JSON, for `read`. Paths may contain bytes that are not UTF-8."""
        return json.dumps(asdict(self), default=msgspec.to_builtins)

    @classmethod
    def read(cls, text: str, **others: Any) -> ServiceOptions:
        """Parse options from JSON. The fields in `others` replace parsed ones."""
        return _read({**json.loads(text), **others})


_read: Callable[[object], ServiceOptions] = partial(msgspec.convert, type=ServiceOptions)
_read({"devices": ()})  # this builds the type's decoder before threads run
