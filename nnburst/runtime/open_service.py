"""Functions that return a service: a new child process, a running service, or this process."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .._core.deadline import Deadline
from .._core.errno import flag
from .._options import LogLevel, RealTimePolicy, SandboxMode
from ..devices.registry import check_names, create_device
from ..errors import DeviceUnavailable, InvalidArgument, MissedDeadline
from .compile.model_files import FUNCTIONS
from .service import DEFAULT_DEVICES, LocalBackend, Service, child

if TYPE_CHECKING:
    import logging

    from .service import Backend

_A_MOMENT = 0.05
"""Seconds between two attempts to connect to a starting service."""


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
    """Start a service in a child process, and return it. The service ends with this process.

    Args:
        devices: Names of the service's devices, in order of preference.
        functions: A function or several, each declared with `nnburst.declare`. The service gets copies.
        open_timeout: Seconds to wait for the service's start; None for no limit.
        restart: True to restart the service when it is needed after a crash. Old sessions stay dead.
        log_level: Lowest level of the service's log: ``"debug"``, ``"info"`` (failed requests), ``"warning"``,
            ``"error"``.
        log: File to append the log to, or a logger of this program; None for the stderr of this process.
        quotas: Limits of this program in the service, such as ``{"models": 200}``. The page "Limits for
            clients" lists their names.
        max_run: Longest duration of a run in seconds; None for no limit. A longer run fails with `MissedDeadline`, if
            its device can stop it. A Python function cannot be stopped.
        max_compile: Longest duration of reading and compiling a model in seconds; None for no limit. After this time,
            the compiling process ends, and all its users get `DeadObject`.
        faults: True for fault points (one more system call per run), for tests with `nnburst.testing.inject`.
        scheduler: Real-time policy and priority of the service's threads, such as ``("fifo", 20)`` or ``("rr", 1)``;
            None for the normal policy. A real-time service polls for requests only if this process may use a CPU
            outside `affinity`.
        affinity: Numbers of the CPUs that the service may use, such as ``{1}``; None for this thread's CPUs.
        warm: True to load the devices' libraries now, not with the first model. Services that this program launches
            later then have the libraries, too.
        sandbox: ``"on"``: the service can read code, but cannot write files, use the network or start programs. Devices
            can need more rights (`Device.needs`), and an old kernel protects less (`Service.sandbox`). ``"strict"``: as
            ``"on"``, but fails if the kernel protects less. ``"off"``: the service has all rights of this program.

    Raises:
        DeviceUnavailable: The process could not serve, or may not use the policy or a CPU. The message contains the
            process's output.
        InvalidArgument: `devices` is empty, the log level is unknown, the log file cannot be written, or a limit,
            policy, priority or CPU is invalid.
        MissedDeadline: The service did not start in time.

    Example:
        >>> with nnburst.launch(devices=["nnburst-reference"]) as service:
        ...     [device.name for device in service.devices]
        ['nnburst-reference']
    """
    sent = b""
    if functions:
        from ..devices.function import encode_functions

        sent = encode_functions(functions)
        devices = (*check_names(devices), FUNCTIONS)
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
    """Connect to a running service (``nnburst serve``), which several programs can use.

    Closing the returned object ends this program's connection, not the service.

    Args:
        address: The name of the service, or ``unix:`` and the path of its socket; by default the name that ``nnburst
            serve`` uses.
        open_timeout: Seconds to wait for an answer; None for no limit.
        trust_uid: A user id, or several. Services of these users are trusted, as are services of this user and of
            root. A service sees all inputs of its models, and makes their outputs.

    Raises:
        DeviceUnavailable: No service runs at the address, the service does not serve this user, or its user is not
            trusted.
        InvalidArgument: The address is malformed.
        MissedDeadline: The service did not answer in time.

    Example:
        >>> try:
        ...     service = nnburst.connect("nowhere")
        ... except nnburst.DeviceUnavailable:
        ...     service = nnburst.launch()
        >>> service.alive
        True
        >>> service.close()
    """
    from ..service.client.connection import connect_to

    def reconnect() -> Backend:
        """Connect, and retry until the caller's deadline: the service may be starting."""
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
    return Service(backend, repr(address), reconnect, shared=(elsewhere, open_timeout, trusted))


def in_process(*, devices: Sequence[str] = DEFAULT_DEVICES) -> Service:
    """Return a service that runs models in this process, for tests and comparisons.

    Args:
        devices: Names of the service's devices, in order of preference.

    Raises:
        DeviceUnavailable: A device is unknown.
        InvalidArgument: `devices` is empty.

    Example:
        >>> with nnburst.in_process() as service, service.session(model) as session:
        ...     session.run(None, {"x": np.ones((1, 4), np.float32)})
        [array([[1., 1., 1., 1.]], dtype=float32)]
    """
    return Service(LocalBackend(tuple(create_device(name) for name in check_names(devices))), "in process")
