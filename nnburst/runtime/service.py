"""A place where models run: a service process, or this process."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Protocol

from .._core.deadline import Deadline
from .._core.errno import flag
from .._core.leaving import Leaving, ProcessLock
from .._core.one_process import OneProcess
from ..devices import Device, PartitionedDevice, ResilientDevice, create_device
from ..devices.registry import checked_names
from ..errors import BadState, DeviceUnavailable, InvalidArgument, MissedDeadline
from ..model import ExecutionPreference, Priority
from ..watch.html import table
from .spare import Spare

if TYPE_CHECKING:
    import os
    import socket
    from types import TracebackType

    from ..model import Model
    from ..service import ServiceConnection
    from .session import Session

DEFAULT_DEVICES: Sequence[str] = (
    "nnburst-reference",
    *(("nnburst-onnxruntime",) if find_spec("onnxruntime") and find_spec("onnx") else ()),
)
"""Those that can be had. ONNX Runtime itself is loaded for the first model that needs it."""
_A_MOMENT = 0.05
"""Seconds between two looks for a service that is being started."""


class _Backend(Protocol):
    @property
    def faults(self) -> socket.socket | None: ...
    @property
    def devices(self) -> tuple[Device, ...]: ...
    @property
    def pid(self) -> int: ...
    @property
    def alive(self) -> bool: ...
    def link_to_death(self, on_death: Callable[[], None]) -> Callable[[], None]: ...
    def kill(self) -> None: ...
    def close(self) -> None: ...


class _Opened(Protocol):
    def refuse(self) -> None: ...
    def close(self) -> None: ...


_services: weakref.WeakKeyDictionary[Device, weakref.ref[Service]] = weakref.WeakKeyDictionary()


def closes_with(device: Device, thing: _Opened) -> None:
    """Have something closed when the service of its device, or of one of its devices, is."""
    for each in device.devices if isinstance(device, PartitionedDevice) else (device,):
        service = service_of(each)
        if service is not None:
            service._opened[id(thing)] = thing


def service_of(device: Device) -> Service | None:
    """Return the service that a device belongs to, if it was opened as one."""
    return _services.get(device, lambda: None)()


class _LocalBackend:
    """Devices of this process."""

    def __init__(self, devices: tuple[Device, ...]) -> None:
        import os

        self.devices = devices
        self.faults = None
        self.pid = os.getpid()
        self.alive = True
        self._leaving = Leaving(*(device.close for device in devices))

    def link_to_death(self, on_death: Callable[[], None]) -> Callable[[], None]:
        return lambda: None

    def kill(self) -> None:
        raise BadState("the models run in this process; only a service of its own can be killed: use launch()")

    def close(self) -> None:
        self.alive = False
        self._leaving()


class Service(OneProcess):
    """Hosts devices; several sessions may share one. Made by `launch`, `connect` or `in_process`. Context manager."""

    _instead = "launch one in each process"

    def __init__(
        self,
        backend: _Backend,
        what: str,
        again: Callable[[], _Backend] | None = None,
        spare: Spare[ServiceConnection] | None = None,
    ) -> None:
        """Use `launch`, `connect` or `in_process`."""
        self._what = what
        self._again = again
        self._spare = spare
        self._reviving = ProcessLock()  # held while a service starts, by threads that do nothing else
        self._closed = False
        self._opened: weakref.WeakValueDictionary[int, _Opened] = weakref.WeakValueDictionary()
        self._leaving: Leaving | None = None
        self._take(backend)

    def _take(self, backend: _Backend) -> None:
        self._backend = backend
        for device in backend.devices:
            _services[device] = weakref.ref(self)

    def revive(self) -> None:
        """Start it, or connect to it, again if it has ended. What was opened on it stays dead.

        Raises:
            BadState: The service is closed.
            NNBurstError: It cannot be started, or not be reached.
        """
        with self._reviving.lock:
            self._check_open()
            if self._backend.alive or self._again is None:
                return
            dead, fresh = self._backend, self._again()
            self._take(fresh)
            dead.close()
            if self._closed:  # meanwhile
                fresh.close()
                self._check_open()

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices, in order of preference."""
        self._check_open()
        return self._backend.devices

    def device(self, name: str) -> Device:
        """Return the device of that name.

        Raises:
            DeviceUnavailable: The service has none.
        """
        for device in self.devices:
            if device.name == name:
                return device
        names = ", ".join(device.name for device in self.devices)
        raise DeviceUnavailable(f"no device {name!r} in this service; it has: {names}")

    @property
    def what(self) -> str:
        """``child``, ``in process``, or the address of a shared one."""
        return self._what

    @property
    def pid(self) -> int:
        """Process id of the process that runs the models."""
        return self._backend.pid

    @property
    def faults(self) -> socket.socket | None:
        """Where a service with fault points takes the orders of `nnburst.testing.inject`; None without them."""
        return self._backend.faults

    @property
    def alive(self) -> bool:
        """False once the service process is gone or the service is closed."""
        return not self._closed and self._backend.alive

    def link_to_death(self, on_death: Callable[[], None]) -> Callable[[], None]:
        """Call `on_death` once when the service process ends. Returns a function that unlinks."""
        if not callable(on_death):
            raise InvalidArgument(f"on_death is {type(on_death).__name__}; give a function without arguments")
        return self._backend.link_to_death(on_death)

    def session(
        self,
        model: Model | str | os.PathLike[str] | bytes,
        *,
        device: str | None = None,
        preference: str | ExecutionPreference = ExecutionPreference.FAST_SINGLE_ANSWER,
        priority: str | Priority = Priority.MEDIUM,
        concurrency: int | None = None,
        polling_window: float | None = None,
        loop_timeout: float | None = None,
        timeout: float | None = None,
        open_timeout: float | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        token: bytes | None = None,
        cache_always: bool = False,
        on_death: str = "raise",
        retry: int = 0,
    ) -> Session:
        """Open a session on this service; the arguments are those of `Session`."""
        from .session import Session

        return Session(
            model,
            service=self,
            device=device,
            preference=preference,
            priority=priority,
            concurrency=concurrency,
            polling_window=polling_window,
            loop_timeout=loop_timeout,
            timeout=timeout,
            open_timeout=open_timeout,
            cache_dir=cache_dir,
            token=token,
            cache_always=cache_always,
            on_death=on_death,
            retry=retry,
        )

    def kill(self) -> None:
        """Kill the process of a child service (SIGKILL), whatever it is doing: for a run that nothing else can stop.

        Runs in flight get `DeadObject`, and so does all that was opened on it, but sessions with
        ``on_death="restart"``. Close it nevertheless.

        Raises:
            BadState: It is shared with other programs, or is this process; or it is closed.
        """
        self._check_open()
        self._backend.kill()

    def close(self) -> None:
        """End the service and everything that it runs: what was opened on it is closed, too. Idempotent."""
        self._closed = True
        opened = list(filter(None, (ref() for ref in self._opened.valuerefs())))
        self._leaving = self._leaving or Leaving(
            *(thing.refuse for thing in opened),
            self._backend.close,
            *(thing.close for thing in opened),
            *(() if self._spare is None else (self._spare.close,)),
        )
        self._leaving()

    def _check_open(self) -> None:
        if self._closed:
            raise BadState("the service is closed; launch another one")

    def __enter__(self) -> Service:
        self._check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "alive" if self.alive else "dead"
        return f"<Service {self._what}, pid {self.pid}, {state}>"

    def _repr_html_(self) -> str:
        devices = () if self._closed else self._backend.devices
        return table(repr(self)[1:-1], ([device.name, device.version_string] for device in devices))


class _Restarting:
    """A service child that is started again when it is needed after it has died."""

    def __init__(self, start: Callable[[], _Backend]) -> None:
        self._start = start
        self._lock = ProcessLock()  # a signal handler may close a service that is just being started again
        self._backend = start()
        self._closed = False
        self._given: dict[int, _Backend] = {}
        count = len(self._backend.devices)
        self.devices: tuple[Device, ...] = tuple(ResilientDevice(partial(self._device, i)) for i in range(count))

    def _device(self, index: int) -> Device:
        with self._lock.lock:
            # A caller that comes again for the same process has found it dead, perhaps before others noticed.
            if self._given.get(index) is self._backend and not self._closed:
                dead, self._backend = self._backend, self._start()
                dead.close()
                if not self.alive:  # closed meanwhile
                    self._backend.close()
            self._given[index] = self._backend
            return self._backend.devices[index]

    @property
    def faults(self) -> socket.socket | None:
        return self._backend.faults

    @property
    def pid(self) -> int:
        return self._backend.pid

    @property
    def alive(self) -> bool:
        return not self._closed

    def link_to_death(self, on_death: Callable[[], None]) -> Callable[[], None]:
        return self._backend.link_to_death(on_death)

    def kill(self) -> None:
        self._backend.kill()

    def close(self) -> None:
        self._closed = True
        self._backend.close()


def launch(
    *,
    devices: Sequence[str] = DEFAULT_DEVICES,
    open_timeout: float | None = 60.0,
    restart: bool = False,
    log_level: str | int = "warning",
    log: str | os.PathLike[str] | None = None,
    quotas: Mapping[str, int] | None = None,
    max_run: float | None = None,
    faults: bool = False,
    scheduler: tuple[str, int] | None = None,
    affinity: Collection[int] | None = None,
    spare: bool = False,
) -> Service:
    """Start a service process that belongs to this one and ends with it.

    Args:
        devices: Names of the devices that it offers, in order of preference.
        open_timeout: Seconds that it may take to start; None for no limit.
        restart: Start it again when it is needed after it has died: sessions that were open stay dead, new ones work.
        log_level: Least level of what it logs: ``"debug"``, ``"info"`` (failed requests), ``"warning"``, ``"error"``.
        log: File that its log is appended to; None for the stderr of this process.
        quotas: What this program may have in it, such as ``{"models": 200}``; see docs/sharing.md for the names.
        max_run: Seconds that a run may take: one that takes longer is ended, if its device can be, and fails with
            `MissedDeadline`. None for no limit.
        faults: Give it fault points, for tests: see `nnburst.testing.inject`. Each run takes a system call more.
        scheduler: Real-time policy and priority of its threads, such as ``("fifo", 20)`` or ``("rr", 1)``; None for
            the usual one. It polls for requests only if this process may use a CPU that `affinity` leaves to it.
        affinity: Numbers of the CPUs that it may use, such as ``{1}``; None for those of this thread.
        spare: Keep another process ready that has loaded all but models: one that is needed after a death, by
            `restart` or by a session with ``on_death="restart"``, is then there at once. It takes the memory of what it
            has loaded, and is started about a second after the one before it was taken.

    Raises:
        DeviceUnavailable: The process could not serve, or is refused the policy or a CPU; the message carries what it
            printed.
        InvalidArgument: No device is named, the level is unknown, the file cannot be written, the longest run is no
            time, or policy, priority or CPUs are none.
        MissedDeadline: It did not start in time.
    """
    from ..service import start_child  # a program that stays in process needs no process boundary

    def start(spare: bool = False) -> ServiceConnection:
        return start_child(
            devices,
            timeout=open_timeout,
            log_level=log_level,
            log=log,
            quotas=quotas,
            max_run=max_run,
            faults=faults,
            scheduler=scheduler,
            affinity=affinity,
            spare=spare,
        )

    comes_back = flag(restart, "restart")
    kept = Spare(start) if flag(spare, "spare") else None
    again = kept or start
    return Service(_Restarting(again) if comes_back else again(), "child", again, kept)


def connect(address: str, *, open_timeout: float | None = 10.0, trust_uid: int | Collection[int] = ()) -> Service:
    """Connect to a service that is running (``nnburst serve``) and that other programs may use, too.

    Closing it ends this program's connection; the service goes on.

    Args:
        address: The name of the service, or ``unix:`` and the path of its socket.
        open_timeout: Seconds that it may take to answer; None for no limit.
        trust_uid: User id, or several, whose services are used beside those of this user and of root. A service sees
            what its models get, and says what they give.

    Raises:
        DeviceUnavailable: No service runs there, it does not serve this user, or is one of a user who is not trusted;
            the message says what to do.
        InvalidArgument: The address is malformed.
        MissedDeadline: It did not answer in time.
    """
    from ..service import connect_to

    def again() -> _Backend:
        """It may be on its way up: come again until the deadline of the caller."""
        while True:
            try:
                return connect_to(address, timeout=open_timeout, trust_uid=trust_uid)
            except (DeviceUnavailable, MissedDeadline):
                left = Deadline.after().left()
                if left is not None and left <= _A_MOMENT:
                    raise
                time.sleep(_A_MOMENT)

    return Service(connect_to(address, timeout=open_timeout, trust_uid=trust_uid), repr(address), again)


def in_process(*, devices: Sequence[str] = DEFAULT_DEVICES) -> Service:
    """Run models in this process, through the same interfaces: for tests and comparisons."""
    return Service(_LocalBackend(tuple(create_device(name) for name in checked_names(devices))), "in process")
