"""Services (processes that run models), the devices of services, and the restart of dead services."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, SupportsIndex

from .._core.backoff import LONGEST, Backoff
from .._core.deadline import Deadline
from .._core.leaving import Closing, Leaving, OneProcess, process_lock
from ..errors import BadState, InvalidArgument, MissedDeadline

if TYPE_CHECKING:
    import socket
    from typing import TypeAlias, Unpack

    from .._options import SessionKeywords
    from ..devices.interfaces import Device
    from ..service.client.connection import ServiceConnection
    from ..service.wire.protocol import Sandbox
    from .compile.compilation import Compilation
    from .compile.model_files import ModelSource
    from .run.burst import Burst
    from .session import Session

    Backend: TypeAlias = "ServiceConnection | LocalBackend"

DEFAULT_DEVICES: Sequence[str] = (
    "nnburst-reference",
    *(("nnburst-onnxruntime",) if find_spec("onnxruntime") and find_spec("onnx") else ()),
)
"""Default devices of a service. ONNX Runtime, if installed, is loaded for the first model that needs it."""


_services: weakref.WeakKeyDictionary[Device, weakref.ref[Service]] = weakref.WeakKeyDictionary()


def close_with(devices: Iterable[Device], thing: Compilation | Burst) -> None:
    """Register `thing` with the services of the devices: a service that is closed also closes `thing`."""
    for each in devices:
        service = service_of(each)
        if service is not None:
            service._opened[id(thing)] = thing


def service_of(device: Device) -> Service | None:
    """Return the open service of a device, if any."""
    return _services.get(device, lambda: None)()


class LocalBackend:
    """The devices of a service in this process."""

    def __init__(self, devices: tuple[Device, ...]) -> None:
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


class Service(OneProcess, Closing):
    """A process that runs models. `launch`, `connect` and `in_process` return services. Context manager.

    Example:
        >>> with nnburst.launch() as service, service.session(model) as session:
        ...     session.run(None, {"x": np.ones((1, 4), np.float32)})
        [array([[1., 1., 1., 1.]], dtype=float32)]
    """

    _instead = "launch one in each process, or share one: `nnburst serve` starts it, and what connect() returns pickles"

    def __init__(
        self,
        backend: Backend,
        what: str,
        again: Callable[[], Backend] | None = None,
        restarts: bool = False,
        shared: tuple[str, float | None, int | tuple[int, ...]] | None = None,
    ) -> None:
        """Use `launch`, `connect` or `in_process` instead."""
        self.what = what  # "child", "in process", or the address of a shared service
        # `shared` has the arguments of `connect`, for pickles.
        self.shared, self.opened_in = shared, os.getpid()
        self._again = again
        self._reviving = process_lock()  # it is locked while a service starts
        self._closed = False
        self._opened: weakref.WeakValueDictionary[int, Compilation | Burst] = weakref.WeakValueDictionary()
        self._leaving: Leaving | None = None
        self._given: dict[int, Backend] = {}
        self._backend = backend
        from ..devices.resilient import ResilientDevice

        living = (ResilientDevice(partial(self._live_device, i)) for i in range(len(backend.devices)) if restarts)
        self._restarting: tuple[Device, ...] = tuple(living)
        """Proxies of the devices. A call of a proxy restarts a dead process."""
        self._set_backend(backend)

    def _set_backend(self, backend: Backend) -> None:
        self._backend = backend
        for device in self._restarting or backend.devices:
            _services[device] = weakref.ref(self)

    def _live_device(self, index: int) -> Device:
        with self._reviving:
            # A caller that asks twice for the same process has found the process dead.
            if self._given.get(index) is self._backend and not self._closed:
                self._renew()
            self._given[index] = self._backend
            return self._backend.devices[index]

    def _revive(self) -> None:
        """Restart a dead service, or connect to it again. Earlier sessions stay dead.

        Raises:
            BadState: The service is closed.
            NNBurstError: The service cannot be started or reached.
        """
        with self._reviving:
            self._check_open()
            if not self.alive:
                self._renew()

    def _renew(self) -> None:
        if self._again is None:
            return
        dead, fresh = self._backend, self._again()
        self._set_backend(fresh)
        dead.close()
        if self._closed:  # another thread has closed the service
            fresh.close()
            self._check_open()

    def session(self, model: ModelSource, example_inputs: object = None, **options: Unpack[SessionKeywords]) -> Session:
        """Open a session on this service; the arguments are those of `Session`."""
        from .session import Session

        return Session(model, example_inputs, service=self, **options)

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices, in order of preference.

        Raises:
            BadState: The service is closed.
        """
        self._check_open()
        return self._restarting or self._backend.devices

    def device(self, name: str) -> Device:
        """Return a device.

        Args:
            name: Name of one of `devices`.

        Raises:
            DeviceUnavailable: The service has no device of this name.
        """
        from ..devices.common import device_of

        return device_of(self.devices, name)

    @property
    def pid(self) -> int:
        """Id of the process that runs the models."""
        return self._backend.pid

    @property
    def sandbox(self) -> Sandbox | None:
        """The sandbox, with its ``mode``, the rights ``granted`` to devices, and the protection ``missing`` here.

        None if the service is in this process.
        """
        return self._backend.sandbox

    @property
    def faults(self) -> socket.socket | None:
        """The socket for `nnburst.testing.inject`; None without fault points."""
        return self._backend.faults

    @property
    def alive(self) -> bool:
        """True until the service is closed, or its process has ended and cannot be restarted."""
        return not self._closed and (bool(self._restarting) or self._backend.alive)

    def link_to_death(self, on_death: Callable[[], None]) -> Callable[[], None]:
        """Call a function once when the service process ends. Return a function that unregisters the call.

        Args:
            on_death: The function, called without arguments.

        Raises:
            InvalidArgument: `on_death` is not callable.
        """
        if not callable(on_death):
            raise InvalidArgument(f"on_death is {type(on_death).__name__}; give a function without arguments")
        return self._backend.link_to_death(on_death)

    def kill(self) -> None:
        """Kill the process of a child service (SIGKILL), for example to stop a hanging run.

        Runs in flight raise `DeadObject`, as do later calls, except on sessions with ``on_death="restart"``. You must
        still close the service.

        Raises:
            BadState: The service is shared with other programs, is this process, or is closed.
        """
        self._check_open()
        self._backend.kill()

    def close(self) -> None:
        """End the service with its runs, sessions and models. Idempotent."""
        self._closed = True
        opened = [thing for ref in self._opened.valuerefs() if (thing := ref()) is not None]
        self._leaving = self._leaving or Leaving(
            *(thing._refuse for thing in opened), self._backend.close, *(thing.close for thing in opened)
        )
        self._leaving()

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        """Pickle a shared service as its address. Raises `InvalidArgument` for other services."""
        if self.shared is None:
            return super().__reduce_ex__(protocol)
        from .pickled import reduce_service

        return reduce_service(self)

    def _check_open(self) -> None:
        if self._closed:
            raise BadState("the service is closed; launch another one")

    def __enter__(self) -> Service:
        self._check_open()
        return self

    def __repr__(self) -> str:
        state = "closed" if self._closed else "alive" if self.alive else "dead"
        return f"<Service {self.what}, pid {self.pid}, {state}>"


def _wait(pause: float) -> None:
    left = Deadline.after().left()
    time.sleep(pause if left is None else min(pause, left))
    if left is not None and left < pause:
        raise MissedDeadline(f"the service has ended soon after its start; the next one is started {pause:.1f} s later")


def child(
    devices: Sequence[str], *, restart: bool = False, warm: bool = False, **options: Any
) -> tuple[Backend, str, Callable[[], Backend], bool]:
    """Start a service process, with the options of `start_child`. Return the arguments of `Service`."""
    from ..service.process.launch import start_child  # some programs start no process

    backoff, begun = Backoff(), 0.0

    def start() -> ServiceConnection:
        nonlocal begun
        lived, begun = time.monotonic() - begun, 0.0
        if lived <= LONGEST:  # a service that lived longer is in no crash loop
            backoff.begin_pause(lived)
        _wait(backoff.left)
        try:
            return start_child(devices, warm=warm, **options)
        finally:
            begun = time.monotonic()

    return start(), "child", start, restart
