"""What owns a process where models run, or stands for this one: its devices, its end, and its next life."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from .._core.leaving import Closing, Leaving, ProcessLock
from .._core.one_process import OneProcess
from ..devices import Device, ResilientDevice
from ..errors import BadState, DeviceUnavailable, InvalidArgument
from ..watch.html import table
from .spare import Spare

if TYPE_CHECKING:
    import socket

    from ..service import Sandbox, ServiceConnection

DEFAULT_DEVICES: Sequence[str] = (
    "nnburst-reference",
    *(("nnburst-onnxruntime",) if find_spec("onnxruntime") and find_spec("onnx") else ()),
)
"""Those that can be had. ONNX Runtime itself is loaded for the first model that needs it."""
S = TypeVar("S", bound="ServiceProcess")


class Backend(Protocol):
    @property
    def faults(self) -> socket.socket | None: ...
    @property
    def devices(self) -> tuple[Device, ...]: ...
    @property
    def pid(self) -> int: ...
    @property
    def sandbox(self) -> Sandbox | None: ...
    @property
    def alive(self) -> bool: ...
    def link_to_death(self, on_death: Callable[[], None]) -> Callable[[], None]: ...
    def kill(self) -> None: ...
    def close(self) -> None: ...


class _Opened(Protocol):
    def refuse(self) -> None: ...
    def close(self) -> None: ...


_services: weakref.WeakKeyDictionary[Device, weakref.ref[ServiceProcess]] = weakref.WeakKeyDictionary()


def closes_with(devices: Iterable[Device], thing: _Opened) -> None:
    """Have something closed when the service of one of its devices is."""
    for each in devices:
        service = service_of(each)
        if service is not None:
            service._opened[id(thing)] = thing


def service_of(device: Device) -> ServiceProcess | None:
    """Return the service that a device belongs to, if it was opened as one."""
    return _services.get(device, lambda: None)()


class LocalBackend:
    """Devices of this process."""

    def __init__(self, devices: tuple[Device, ...]) -> None:
        import os

        self.devices = devices
        self.faults = None
        self.sandbox = None
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


class ServiceProcess(OneProcess, Closing):
    """What a `Service` is without its sessions: a process with devices, which is started again when it is to be."""

    _instead = "launch one in each process"

    def __init__(
        self,
        backend: Backend,
        what: str,
        again: Callable[[], Backend] | None = None,
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

    def _take(self, backend: Backend) -> None:
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
    def sandbox(self) -> Sandbox | None:
        """What keeps the process that runs the models from the rest of the machine: its ``mode``, ``granted`` rights,
        what is ``missing`` here. None in process, where nothing does, and for a service before version 2.5.
        """
        return self._backend.sandbox

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

    def __enter__(self: S) -> S:
        self._check_open()
        return self

    def __repr__(self) -> str:
        state = "closed" if self._closed else "alive" if self.alive else "dead"
        return f"<Service {self._what}, pid {self.pid}, {state}>"

    def _repr_html_(self) -> str:
        devices = () if self._closed else self._backend.devices
        return table(repr(self)[1:-1], ([device.name, device.version_string] for device in devices))


class _Restarting:
    """A service child that is started again when it is needed after it has died."""

    def __init__(self, start: Callable[[], Backend]) -> None:
        self._start = start
        self._lock = ProcessLock()  # a signal handler may close a service that is just being started again
        self._backend = start()
        self._closed = False
        self._given: dict[int, Backend] = {}
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
    def sandbox(self) -> Sandbox | None:
        return self._backend.sandbox

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


def child(
    devices: Sequence[str], *, restart: bool = False, spare: bool = False, warm: bool = False, **options: Any
) -> tuple[Backend, str, Callable[[], Backend], Spare[ServiceConnection] | None]:
    """Start a service process; return what a `Service` is made of. `options` are those of `start_child`."""
    from ..service import start_child  # a program that stays in process needs no process boundary

    def start(spare: bool = False) -> ServiceConnection:
        return start_child(devices, warm=warm or spare, **options)

    kept = Spare(start) if spare else None
    again = kept or start
    return _Restarting(again) if restart else again(), "child", again, kept
