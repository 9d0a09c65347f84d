"""The ways to run the same model that the demo compares.

Each contender does the same for one image: hand it over, run, hand back a private copy of the ten probabilities.
"""

from __future__ import annotations

import abc
import contextlib
import multiprocessing
from collections.abc import Generator
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ...burst import Kernel
from ...devices import create_device
from ...errors import ErrorStatus, GeneralFailure, error_for
from ...memory import Memory
from ...model import DataLocation, MeasureTiming, Model, Request, RequestArgument
from ..bench.server import server_process
from .network import IMAGE_SHAPE, INPUT, OUTPUT, PROBABILITIES_SHAPE, build_model

if TYPE_CHECKING:
    from ...runtime import Service

FloatArray = npt.NDArray[np.float32]
SLOT = 0


class Contender(abc.ABC):
    """One way to run the model."""

    @abc.abstractmethod
    def classify(self, image: FloatArray) -> FloatArray:
        """Return the probabilities [1, 10] of one image [1, 8, 8, 1]."""

    @abc.abstractmethod
    def close(self) -> None:
        """Release everything. Idempotent."""


class BurstContender(Contender):
    """A burst to the isolated service."""

    def __init__(self, service: Service, model: Model, device: str, polling_window: float | None) -> None:
        self._session = service.session(model, device=device, polling_window=polling_window)
        try:
            bound = self._session.bind()
            self._image: FloatArray = bound.inputs[INPUT]
            self._probabilities: FloatArray = bound.outputs[OUTPUT]
            self._run = bound.run
        except BaseException:
            self._session.close()
            raise

    def classify(self, image: FloatArray) -> FloatArray:
        self._image[...] = image
        self._run()
        return self._probabilities.copy()

    def close(self) -> None:
        self._session.close()


class InProcessContender(Contender):
    """The prepared model in this process, without burst, on a pool of its own."""

    def __init__(self, device: str, model: Model) -> None:
        image, probabilities = 4 * int(np.prod(IMAGE_SHAPE)), 4 * int(np.prod(PROBABILITIES_SHAPE))
        self._device = create_device(device)
        self._prepared = self._device.prepare_model(model)
        self._memory = Memory.ashmem(image + probabilities, "nnburst-demo")
        self._image = self._memory.array(np.float32, IMAGE_SHAPE)
        self._probabilities = self._memory.array(np.float32, PROBABILITIES_SHAPE, offset=image)
        inputs = (RequestArgument(location=DataLocation(0, 0, image)),)
        outputs = (RequestArgument(location=DataLocation(0, image, probabilities)),)
        self._request = Request(inputs, outputs, (self._memory,))
        self._executor = self._prepared.burst_executor()
        if self._executor is None:
            self._plan: Kernel = lambda: self._prepared.execute_synchronously(self._request)
        else:  # what the service would run
            self._executor.add_cache_entry(self._memory, SLOT)
            self._plan = self._executor.bind(Request(inputs, outputs), [SLOT], MeasureTiming.NO)

    def classify(self, image: FloatArray) -> FloatArray:
        self._image[...] = image
        result = self._plan()
        if result is not None and result[0] is not ErrorStatus.NONE:
            raise error_for(result[0], "the in-process execution failed")
        return self._probabilities.copy()

    def classify_unbound(self, image: FloatArray) -> FloatArray:
        """As `classify`, but decode and check the request anew: the reference that the answers are held against."""
        self._image[...] = image
        status, _, _ = self._prepared.execute_synchronously(self._request)
        if status is not ErrorStatus.NONE:
            raise error_for(status, "the in-process execution failed")
        return self._probabilities.copy()

    def close(self) -> None:
        if self._executor is not None:
            self._executor.close()
        self._prepared.close()
        self._device.close()
        self._memory.close()


def _serve(end: tuple[Connection, str]) -> Generator[None, None, None]:
    connection, device = end
    with contextlib.closing(InProcessContender(device, build_model())) as contender:
        yield
        while True:
            connection.send(contender.classify(connection.recv()))


class PipeContender(Contender):
    """A `multiprocessing.Pipe` to a child (start method spawn)."""

    def __init__(self, device: str) -> None:
        self._connection, theirs = multiprocessing.Pipe()
        self._stack = contextlib.ExitStack()
        self._stack.enter_context(self._connection)
        with theirs:
            self._stack.enter_context(server_process(_serve, (theirs, device)))

    def classify(self, image: FloatArray) -> FloatArray:
        try:
            self._connection.send(image)
            answer = self._connection.recv()
        except (EOFError, ConnectionError):
            raise GeneralFailure("the multiprocessing child has ended; its message is above") from None
        assert isinstance(answer, np.ndarray)
        return answer

    def close(self) -> None:
        self._stack.close()
