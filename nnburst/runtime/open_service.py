"""How services are had: a child of this process, one that is running, or this process."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .._core.deadline import Deadline
from .._core.errno import flag
from ..devices import create_device
from ..devices.registry import checked_names
from ..errors import DeviceUnavailable, InvalidArgument, MissedDeadline
from ..options import LogLevel, RealTimePolicy, SandboxMode
from .compile.model_files import FUNCTIONS
from .service import DEFAULT_DEVICES, LocalBackend, Service, child

if TYPE_CHECKING:
    import logging

    from .service import Backend

_A_MOMENT = 0.05
"""Seconds between two looks for a service that is being started."""


def launch(
    *,
    devices: Sequence[str] = DEFAULT_DEVICES,
    functions: Callable[..., Any] | Sequence[Callable[..., Any]] = (),
    open_timeout: float | None = 60.0,
    restart: bool = False,
    log_level: LogLevel | int = "warning",
    log: str | os.PathLike[str] | logging.Logger | None = None,
    quotas: Mapping[str, int] | None = None,
    max_run: float | None = None,
    max_compile: float | None = None,
    faults: bool = False,
    scheduler: tuple[RealTimePolicy, int] | None = None,
    affinity: Collection[int] | None = None,
    warm: bool = False,
    sandbox: SandboxMode = "on",
) -> Service:
    """Start and return a service process that belongs to this one and ends with it.

    Args:
        devices: Names of the devices that it offers, in order of preference.
        functions: One or several, with `nnburst.declare` above each. They are sent to the service, which has them by
            their names.
        open_timeout: Seconds that it may take to start; None for no limit.
        restart: Start it again when it is needed after it has died: sessions that were open stay dead, new ones work.
        log_level: Least level of what it logs: ``"debug"``, ``"info"`` (failed requests), ``"warning"``, ``"error"``.
        log: File that its log is appended to, or a logger of this program, which gets its lines at their levels; None
            for the stderr of this process.
        quotas: What this program may have in it, such as ``{"models": 200}``; see docs/quotas.md for the names.
        max_run: Seconds that a run may take: one that takes longer is ended, if its device can be, and fails with
            `MissedDeadline`. None for no limit.
        max_compile: Seconds that reading and compiling a model may take: the process of one that takes longer ends, and
            what was opened on it gets `DeadObject` with the reason. None for no limit; a deadline of the caller ends
            the wait alone.
        faults: Give it fault points, for tests: see `nnburst.testing.inject`. Each run takes a system call more.
        scheduler: Real-time policy and priority of its threads, such as ``("fifo", 20)`` or ``("rr", 1)``; None for
            the usual one. It polls for requests only if this process may use a CPU that `affinity` leaves to it.
        affinity: Numbers of the CPUs that it may use, such as ``{1}``; None for those of this thread.
        warm: Load at once what the devices need for their first model, also for services that are launched later.
        sandbox: ``"on"``: it may read code, and nothing else; it may not write, use the network or start programs, but
            for what its devices need (`Device.needs`), as far as this kernel can keep it from that (`Service.sandbox`).
            ``"strict"``: it does not start where the kernel cannot. ``"off"``: it may do what this program may.

    Raises:
        DeviceUnavailable: The process could not serve, or is refused the policy or a CPU; the message carries what it
            printed.
        InvalidArgument: No device is named, the level is unknown, the file cannot be written, the longest run is no
            time, or policy, priority or CPUs are none.
        MissedDeadline: It did not start in time.

    Example:
        >>> with nnburst.launch(devices=["nnburst-reference"]) as service:
        ...     [device.name for device in service.devices]
        ['nnburst-reference']
    """
    sent = b""
    if functions:
        from ..devices.function import encode_functions

        sent = encode_functions((functions,) if callable(functions) else functions)
        devices = (*checked_names(devices), FUNCTIONS)
        if any(name.partition(":")[0] == FUNCTIONS for name in devices[:-1]):
            raise InvalidArgument(f"devices has {FUNCTIONS!r}; name the functions there, or give functions=, not both")
    return Service(
        *child(
            devices,
            functions=sent,
            restart=flag(restart, "restart"),
            warm=flag(warm, "warm"),
            timeout=open_timeout,
            log_level=log_level,
            log=log,
            quotas=quotas,
            max_run=max_run,
            max_compile=max_compile,
            faults=faults,
            scheduler=scheduler,
            affinity=affinity,
            sandbox=sandbox,
        )
    )


def connect(
    address: str = "nnburst", *, open_timeout: float | None = 10.0, trust_uid: int | Collection[int] = ()
) -> Service:
    """Return a service that is running (``nnburst serve``) and that other programs may use, too.

    Closing it ends this program's connection; the service goes on.

    Args:
        address: The name of the service, by default that of ``nnburst serve`` without one, or ``unix:`` and the path
            of its socket.
        open_timeout: Seconds that it may take to answer; None for no limit.
        trust_uid: User id, or several, whose services are used beside those of this user and of root. A service sees
            what its models get, and says what they give.

    Raises:
        DeviceUnavailable: No service runs there, it does not serve this user, or is one of a user who is not trusted;
            the message says what to do.
        InvalidArgument: The address is malformed.
        MissedDeadline: It did not answer in time.

    Example:
        >>> try:
        ...     service = nnburst.connect("nowhere")
        ... except nnburst.DeviceUnavailable:
        ...     service = nnburst.launch()
        >>> service.alive
        True
        >>> service.close()
    """
    from ..service import connect_to

    def again() -> Backend:
        """It may be on its way up: come again until the deadline of the caller."""
        while True:
            try:
                return connect_to(address, timeout=open_timeout, trust_uid=trust_uid)
            except (DeviceUnavailable, MissedDeadline):
                left = Deadline.after().left()
                if left is not None and left <= _A_MOMENT:
                    raise
                time.sleep(_A_MOMENT)

    backend = connect_to(address, timeout=open_timeout, trust_uid=trust_uid)
    trusted = trust_uid if isinstance(trust_uid, int) else tuple(trust_uid)
    elsewhere = f"unix:{os.path.abspath(address[5:])}" if address.startswith("unix:") else address
    return Service(backend, repr(address), again, shared=(elsewhere, open_timeout, trusted))


def in_process(*, devices: Sequence[str] = DEFAULT_DEVICES) -> Service:
    """Return a service that runs models in this process, through the same interfaces: for tests and comparisons.

    Args:
        devices: Names of the devices that it offers, in order of preference.

    Raises:
        DeviceUnavailable: There is no such device.
        InvalidArgument: None is named.

    Example:
        >>> with nnburst.in_process() as service, service.session(model) as session:
        ...     session.run(None, {"x": np.ones((1, 4), np.float32)})
        [array([[1., 1., 1., 1.]], dtype=float32)]
    """
    return Service(LocalBackend(tuple(create_device(name) for name in checked_names(devices))), "in process")
