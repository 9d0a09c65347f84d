"""The ways to run the same model that the demo compares.

Each contender does the same for one image: hand it over, run, hand back a private copy of the ten probabilities.
"""

from __future__ import annotations

import abc
import contextlib
import multiprocessing
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ...burst import Kernel
from ...devices import create_device
from ...errors import ErrorStatus, GeneralFailure, NNBurstError, error_for
from ...memory import Memory
from ...model import DataLocation, MeasureTiming, Model, Request, RequestArgument
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
            self._image, self._probabilities = bound.inputs[INPUT], bound.outputs[OUTPUT]
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


def _serve_pipe(connection: Connection, device: str) -> None:
    """Main function of the `multiprocessing` child: the same prepared model behind a Pipe."""
    try:
        try:
            contender = InProcessContender(device, build_model())
        except NNBurstError as error:
            connection.send(str(error))
            return
        with contextlib.closing(contender):
            connection.send(None)
            while (image := connection.recv()) is not None:
                connection.send(contender.classify(image))
    except (EOFError, ConnectionError, KeyboardInterrupt):
        pass  # the parent is gone, or Ctrl-C reached the whole process group


class PipeContender(Contender):
    """A `multiprocessing.Pipe` to a child (start method spawn)."""

    def __init__(self, device: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve_pipe, args=(theirs, device), daemon=True)
        self._process.start()
        theirs.close()
        try:
            failure = self._receive()
            if failure is not None:
                raise GeneralFailure(f"the multiprocessing child: {failure}")
        except BaseException:
            self.close()
            raise

    def _receive(self) -> object:
        try:
            return self._connection.recv()
        except (EOFError, ConnectionResetError):
            raise GeneralFailure("the multiprocessing child has ended; its message is above") from None

    def classify(self, image: FloatArray) -> FloatArray:
        self._connection.send(image)
        answer = self._receive()
        assert isinstance(answer, np.ndarray)
        return answer

    def close(self) -> None:
        if self._connection.closed:
            return
        try:
            self._connection.send(None)
        except (BrokenPipeError, ConnectionResetError):
            pass
        self._connection.close()
        self._process.join()
        self._process.close()
