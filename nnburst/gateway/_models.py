"""The named models of a shared service, opened when they are first asked for and again after the service died."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import DeadObject, InvalidArgument, NNBurstError
from ..runtime import Service, Session, connect
from ._tensors import Array, ModelTensor

_POLLING_WINDOW = 1e-3
"""Seconds. A request that comes over a socket takes much longer than 50 µs, after which the service would sleep."""


@dataclass
class ModelCounts:
    """What happened to the requests for one model; nanoseconds."""

    inferences: int = 0
    failures: int = 0
    success_ns: int = 0
    failure_ns: int = 0
    last_ms: int = 0


class OpenedModel:
    """A model that can be run.

    Attributes:
        session: Its session.
        inputs, outputs: By name, in order.
    """

    def __init__(self, session: Session, counts: ModelCounts) -> None:
        self.session = session
        self.inputs = ModelTensor.all_of(session.get_inputs())
        self.outputs = ModelTensor.all_of(session.get_outputs())
        self._counts = counts

    async def run(self, inputs: dict[str, Array]) -> list[Array]:
        """Run it once; raises as `Session.arun`. A request that met a dead service is not repeated."""
        counts, began = self._counts, time.monotonic_ns()
        try:
            outputs = await self.session.arun(None, inputs)
        except NNBurstError:
            counts.failures += 1
            counts.failure_ns += time.monotonic_ns() - began
            raise
        finally:
            counts.last_ms = time.time_ns() // 1_000_000
        counts.inferences += 1
        counts.success_ns += time.monotonic_ns() - began
        return outputs


class Models:
    """Named models of a service. Any thread.

    Args:
        address: Of the service, as `nnburst.connect` takes it.
        names: The models that clients may ask for.
    """

    def __init__(self, address: str, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.counts = {name: ModelCounts() for name in names}
        self._address = address
        self._lock = threading.Lock()
        self._service: Service | None = None
        self._opened: dict[str, OpenedModel] = {}

    def open(self, name: str) -> OpenedModel:
        """Return a model, and wait for the service if it has to be opened first.

        Raises:
            InvalidArgument: No such model.
            DeviceUnavailable: The service is not there.
        """
        if name not in self.names:
            raise InvalidArgument(f"no model {name!r}; this service has {list(self.names)}")
        with self._lock:
            if self._service is None or not self._service.alive:
                self._drop()
                self._service = connect(self._address)
            if name not in self._opened:
                self._opened[name] = OpenedModel(
                    self._service.session(
                        name,
                        polling_window=(lambda w: float(w) * 1e-6 if w else None)(
                            __import__("os").environ.get("GW_WIN")
                        ),
                    ),
                    self.counts[name],
                )
            return self._opened[name]

    def is_ready(self) -> bool:
        """Whether every model can be run now."""
        try:
            return all(self.open(name) is not None for name in self.names)
        except NNBurstError:
            return False

    async def opened(self, name: str) -> OpenedModel:
        """As `open`, without blocking the loop."""
        model = self._opened.get(name)
        if model is not None and model.session.service.alive:
            return model
        return await asyncio.get_running_loop().run_in_executor(None, self.open, name)

    def close(self) -> None:
        """Close all sessions."""
        with self._lock:
            self._drop()

    def _drop(self) -> None:
        models, self._opened = self._opened, {}
        service, self._service = self._service, None
        with contextlib.suppress(DeadObject):
            for model in models.values():
                model.session.close()
        if service is not None:
            service.close()
