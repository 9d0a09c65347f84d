"""ONNX's own backend interface over a service process, for tools and test suites that speak it.

`prepare` and `run_model` are those of ``onnx.backend.base.Backend``; every run goes through a burst. All models share
one service, which is started for the first of them and ends with this process (or with `shutdown`).
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from ._core.leaving import Closing
from .errors import InvalidArgument
from .runtime import Service, Session, launch

__all__ = ["BurstBackend", "BurstRep", "is_compatible", "prepare", "run_model", "shutdown", "supports_device"]

_DEVICE = "nnburst-onnxruntime"

_lock = threading.Lock()
_service: Service | None = None


def _shared_service() -> Service:
    global _service
    with _lock:
        if _service is None or not _service.alive:
            if _service is not None:
                _service.close()
            _service = launch(devices=[_DEVICE])
        return _service


def shutdown() -> None:
    """End the service. The next `prepare` starts another one."""
    global _service
    with _lock:
        if _service is not None:
            _service.close()
        _service = None


atexit.register(shutdown)


class BurstRep(Closing):
    """A prepared model: ``onnx.backend.base.BackendRep``. Context manager."""

    def __init__(self, session: Session, dtypes: Sequence[Any] = ()) -> None:
        self.session = session
        self._dtypes = tuple(dtypes)

    def run(self, inputs: Any, **options: Any) -> tuple[Any, ...]:
        """Run once.

        Args:
            inputs: A list of arrays in the order of the model's inputs, or one array if it has one.
            options: For compatibility; nothing is configured per run.

        Raises:
            InvalidArgument: The number, a dtype or a shape is wrong.
        """
        names = [argument.name for argument in self.session.get_inputs()]
        values = list(inputs) if isinstance(inputs, list | tuple) else [inputs]
        if len(values) != len(names):
            raise InvalidArgument(f"the model has {len(names)} inputs {names}, not {len(values)}")
        outputs = self.session.run(None, dict(zip(names, values, strict=True)))
        dtypes = self._dtypes or (None,) * len(outputs)
        return tuple(_as_onnx(output, dtype) for output, dtype in zip(outputs, dtypes, strict=True))

    def close(self) -> None:
        """Release the model in the service. Idempotent."""
        self.session.close()


class BurstBackend:
    """``onnx.backend.base.Backend``."""

    @classmethod
    def is_compatible(cls, model: Any, device: str = "CPU", **options: Any) -> bool:
        """Whether a model may be given to `prepare`; whether it can run turns out there."""
        return cls.supports_device(device)

    @classmethod
    def supports_device(cls, device: str) -> bool:
        """The CPU."""
        return device == "CPU"

    @classmethod
    def prepare(cls, model: Any, device: str = "CPU", **options: Any) -> BurstRep:
        """Compile a model in the service.

        Args:
            model: A ``ModelProto``, its bytes, or the path of a file.
            device: ``"CPU"``.
            options: For compatibility; not used.

        Raises:
            InvalidArgument: The device is another one, or the model is malformed.
            GeneralFailure: The model cannot run.
        """
        if not cls.supports_device(device):
            raise InvalidArgument(f"device {device!r} is not supported; choose 'CPU'")
        if isinstance(model, str | os.PathLike | bytes):
            return BurstRep(_shared_service().session(model, device=_DEVICE))
        session = _shared_service().session(model.SerializeToString(), device=_DEVICE)
        return BurstRep(session, [_dtype(value) for value in model.graph.output])

    @classmethod
    def run_model(cls, model: Any, inputs: Any, device: str = "CPU", **options: Any) -> tuple[Any, ...]:
        """Prepare, run once, and release; raises as `prepare`."""
        with cls.prepare(model, device, **options) as prepared:
            return prepared.run(inputs)

    @classmethod
    def run_node(cls, node: Any, inputs: Any, device: str = "CPU", **options: Any) -> tuple[Any, ...]:
        """Not implemented: a node alone says nothing about its types."""
        raise NotImplementedError("make a model of the node and use run_model")


def _as_onnx(output: Any, dtype: Any) -> Any:
    """Return an output with the types of arrays that the onnx package has: strings are objects."""
    if isinstance(output, list):
        return [_as_onnx(item, None) for item in output]
    if not isinstance(output, np.ndarray) or output.dtype.kind == "T":
        return output.astype(object) if isinstance(output, np.ndarray) else output
    if dtype is None or dtype == output.dtype:
        return output
    return output.astype(dtype) if "int" in dtype.name else output.view(dtype)


def _dtype(value: Any) -> Any:
    """The NumPy type that the onnx package has for an output, also where it comes from another library."""
    import onnx

    number = value.type.tensor_type.elem_type
    return onnx.helper.tensor_dtype_to_np_dtype(number) if number else None


is_compatible = BurstBackend.is_compatible
prepare = BurstBackend.prepare
run_model = BurstBackend.run_model
supports_device = BurstBackend.supports_device
