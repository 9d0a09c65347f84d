"""Compiling a model step by step: the NNAPI life cycle (facts sheet `model.md` §5)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

from .._core import checked_timeout, deadline_after
from ..devices import Device, PreparedModel
from ..errors import BadState, GeneralFailure, InvalidArgument
from ..model import ExecutionPreference, Model, Priority
from ._service import Service

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["Compilation"]


class Compilation:
    """A model on its way to a prepared model. Set what you need, then `finish` once. Context manager.

    Args:
        model: From `ModelBuilder`.
        devices: Where it may run, in order of preference; it is compiled for the first that supports every operation.
            A `Service` stands for all its devices and leaves the choice to the runtime, which may then also
            let shared memory stand in for memory of the device.

    Raises:
        InvalidArgument: The model is no `Model`; no device is given, or one twice.
    """

    def __init__(self, model: Model, devices: Sequence[Device] | Service) -> None:
        if not isinstance(model, Model):
            raise InvalidArgument(f"model is {type(model).__name__}; build a Model with nnburst.ModelBuilder")
        self._names_devices = not isinstance(devices, Service)
        chosen = tuple(devices.devices if isinstance(devices, Service) else devices)
        if not chosen:
            raise InvalidArgument("no device given; service.devices lists those of a service")
        if not all(isinstance(device, Device) for device in chosen):
            raise InvalidArgument("devices must be Device objects, for example service.devices")
        if len({id(device) for device in chosen}) != len(chosen):
            raise InvalidArgument("a device is given twice")
        self.model = model
        self._devices = chosen
        self._preference = ExecutionPreference.FAST_SINGLE_ANSWER
        self._priority = Priority.MEDIUM
        self._timeout: float | None = None
        self._finished = False
        self._prepared: PreparedModel | None = None
        self._device: Device | None = None

    def set_preference(self, preference: ExecutionPreference) -> None:
        """Say what to optimise for.

        Raises:
            InvalidArgument: No such preference.
            BadState: The compilation is finished.
        """
        self._check_open()
        self._preference = _code(ExecutionPreference, preference, "preference")

    def set_priority(self, priority: Priority) -> None:
        """Say how important executions are; raises as `set_preference`."""
        self._check_open()
        self._priority = _code(Priority, priority, "priority")

    def set_timeout(self, seconds: float | None) -> None:
        """Limit the time that `finish` may take; 0 or None removes the limit.

        Raises:
            InvalidArgument: The compilation is not for exactly one device, or the number is negative.
            BadState: The compilation is finished.
        """
        self._check_open()
        if not self.has_one_device:
            raise InvalidArgument("a timeout needs a compilation for exactly one device")
        self._timeout = checked_timeout(seconds, zero=True)

    def finish(self) -> None:
        """Compile. The object counts as finished even if this fails.

        Raises:
            BadState: It is finished already.
            InvalidArgument: The model breaks a rule.
            GeneralFailure: No device supports every operation, or the compiler failed.
            MissedDeadline: The timeout passed.
        """
        self._check_open()
        self._finished = True
        deadline = deadline_after(self._timeout)
        for device in self._devices:
            if all(device.get_supported_operations(self.model)):
                self._prepared = device.prepare_model(self.model, self._preference, self._priority, deadline)
                self._device = device
                return
        raise GeneralFailure(f"none of {[device.name for device in self._devices]} supports every operation")

    @property
    def has_one_device(self) -> bool:
        """Whether it is for exactly one device, as timing and deadlines require."""
        return len(self._devices) == 1

    @property
    def names_devices(self) -> bool:
        """Whether whoever made it chose the devices, rather than a service."""
        return self._names_devices

    @property
    def prepared_model(self) -> PreparedModel:
        """The result of `finish`.

        Raises:
            BadState: Not finished, or it failed, or it is closed.
        """
        if self._prepared is None:
            raise BadState("the compilation is not finished, has failed or is closed")
        return self._prepared

    @property
    def device(self) -> Device:
        """The device it was compiled for; raises as `prepared_model`."""
        if self._device is None:
            raise BadState("the compilation is not finished or has failed")
        return self._device

    def close(self) -> None:
        """Release the prepared model. Idempotent."""
        prepared, self._prepared, self._finished = self._prepared, None, True
        if prepared is not None:
            prepared.close()

    def __enter__(self) -> Compilation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._finished:
            raise BadState("the compilation is finished; make another one")


_Code = TypeVar("_Code", ExecutionPreference, Priority)


def _code(kind: type[_Code], value: int, what: str) -> _Code:
    try:
        return kind(value)
    except ValueError:
        raise InvalidArgument(f"{value!r} is no {what}; choose one of {[m.name for m in kind]}") from None
