"""A device that reconnects after the death of its process.

The new device must have the same name, version, type, extensions, capabilities and numbers of cache files as the old
device, because the caller's decisions depend on these properties. If one has changed, the caller has to make a new
`ResilientDevice`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from .._core.log import warn
from ..errors import BadState, DeadObject, GeneralFailure, NNBurstError
from ..memory.memory import Memory
from ..model.extensions import ImportedModel
from ..model.types import BufferDesc, BufferRole, DeviceStatus, Model
from .described import MOST_CACHE_FILES, DescribedDevice, DeviceInfo
from .interfaces import Buffer, CacheFiles, CompileJob, Device, PreparedModel

_T = TypeVar("_T")


def check_device(device: Device) -> None:
    """Raise `GeneralFailure` unless a device needs 0 to `MOST_CACHE_FILES` cache files of each kind."""
    try:
        counts = device.get_number_of_cache_files_needed()
    except DeadObject:
        raise
    except Exception as error:
        raise GeneralFailure(f"{device.name} cannot tell how many cache files it needs: {error}") from error
    if not all(isinstance(count, int) and 0 <= count <= MOST_CACHE_FILES for count in counts) or len(counts) != 2:
        raise GeneralFailure(
            f"{device.name} wants {counts} cache files; 0 to {MOST_CACHE_FILES} of each kind are possible"
        )


def check_model(device: Device, prepared: PreparedModel | None) -> PreparedModel:
    """Return a device's prepared model. Raises `GeneralFailure` if the device returned None without an error."""
    if prepared is None:
        raise GeneralFailure(f"{device.name} gave no prepared model")
    return prepared


class ResilientDevice(DescribedDevice):
    """A device that reconnects if its process has died, and then repeats the failed call once.

    Prepared models and buffers of the dead process stay unusable. Thread safe.

    Args:
        connect: Function that connects to the device; called now and after each death.

    Raises:
        GeneralFailure: See `check_device`.
        NNBurstError: The device cannot be connected.
    """

    def __init__(self, connect: Callable[[], Device]) -> None:
        self._connect = connect
        self._lock = threading.Lock()
        self._closed = False
        device, info = self._open_connection()
        self._device: Device | None = device
        super().__init__(info)

    # ---- recovery ------------------------------------------------------------------------------------------------

    def _open_connection(self) -> tuple[Device, DeviceInfo]:
        device = self._connect()
        try:
            check_device(device)
            return device, DeviceInfo.of(device)
        except BaseException:
            _close(device)
            raise

    @property
    def current(self) -> Device:
        """The connected device.

        Raises:
            BadState: This object is closed.
            GeneralFailure: The last reconnection found a device with other properties.
        """
        if self._closed:
            raise BadState("the device is closed")
        device = self._device
        if device is None:
            raise GeneralFailure(f"{self.name} came back as another device; make a new object for it")
        return device

    def recover(self, failed: Device) -> Device:
        """Reconnect, unless another thread has already replaced `failed`. Return the present device."""
        replaced: list[Device] = []
        try:
            with self._lock:
                if self._device is failed and not self._closed:
                    replacement, info = self._open_connection()
                    same = info == self._info
                    self._device = replacement if same else None
                    replaced.extend((failed,) if same else (failed, replacement))
                return self.current
        finally:
            for device in replaced:
                _close(device)

    def _call(self, call: Callable[[Device], _T]) -> _T:
        device = self.current
        try:
            return call(device)
        except (DeadObject, BadState) as death:
            if isinstance(death, BadState) and self._device is device:
                raise  # No other thread has replaced and closed the device.
            try:
                device = self.recover(device)
            except NNBurstError as error:
                if isinstance(error, GeneralFailure) and self._device is None:
                    raise
                raise death from None
            return call(device)

    # ---- what the device does ------------------------------------------------------------------------------------

    @property
    def status(self) -> DeviceStatus:
        """The device's status; OFFLINE from the death of its process to the next reconnection."""
        return self.current.status

    def get_supported_operations(self, model: Model) -> tuple[bool, ...]:
        return self._call(lambda device: device.get_supported_operations(model))

    def import_model(self, source: str, pools: Sequence[Memory] = ()) -> ImportedModel:
        return self._call(lambda device: device.import_model(source, pools))

    def prepare_model(self, model: Model, job: CompileJob = CompileJob()) -> PreparedModel:
        return self._prepare(lambda device: device.prepare_model(model, job))

    def prepare_model_from_cache(self, cache: CacheFiles, deadline_ns: int = 0) -> PreparedModel:
        return self._prepare(lambda device: device.prepare_model_from_cache(cache, deadline_ns))

    def _prepare(self, call: Callable[[Device], PreparedModel]) -> PreparedModel:
        return check_model(self, self._call(call))

    def confirm_cache(self, cache_key: bytes, generation: bytes) -> bool:
        return self._call(lambda device: device.confirm_cache(cache_key, generation))

    def allocate(
        self,
        desc: BufferDesc,
        prepared_models: Sequence[PreparedModel],
        input_roles: Sequence[BufferRole],
        output_roles: Sequence[BufferRole],
    ) -> Buffer:
        """Allocate a buffer. Does not reconnect, since the prepared models died with the process."""
        return self.current.allocate(desc, prepared_models, input_roles, output_roles)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            device, self._device = self._device, None
        if device is not None:
            device.close()


def _close(device: Device) -> None:
    try:
        device.close()
    except Exception as error:
        warn(__name__, "a device that was replaced could not be closed: %s", error)
