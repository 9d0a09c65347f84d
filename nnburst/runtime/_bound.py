"""An execution on shared arrays: fill the inputs, run, use the outputs; nothing is copied."""

from __future__ import annotations

import weakref
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ..burst import Execution

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

    import numpy as np

    from ._arguments import Placement

__all__ = ["BoundExecution"]


class BoundExecution(Execution):
    """Made by `Session.bind`. ``run()`` is one call into C.

    Attributes:
        inputs: Arrays by input name. Write into them (``x.inputs["image"][:] = frame``), not over them.
        outputs: Arrays by output name, valid from the end of a `run` until the next one begins. An output whose shape
            the model leaves open is flat bytes; ``output_shapes`` of the last run tells its dimensions.
    """

    __slots__ = ("__weakref__", "_finalizer", "_placement", "_session", "inputs", "outputs")

    inputs: Mapping[str, np.ndarray[Any, np.dtype[Any]]]
    outputs: Mapping[str, np.ndarray[Any, np.dtype[Any]]]

    def attach(self, placement: Placement) -> BoundExecution:
        """Name the arrays of the request. Called once, by the session."""
        self._placement = placement
        self._session: object = None
        self._finalizer: object = None
        self.inputs = MappingProxyType(placement.inputs)
        self.outputs = MappingProxyType(placement.outputs)
        return self

    def own(self, session: object) -> BoundExecution:
        """Keep the session while this is used, and give the memory back when it is no longer."""
        self._session = session
        finalizer = self._finalizer = weakref.finalize(self, self._burst.forget_soon, self._placement.memory)
        finalizer.atexit = False
        return self

    def close(self) -> None:
        """Give the memory back on both sides; arrays that you still hold stay readable. Idempotent."""
        self._burst.free_memory(self._placement.memory)
        self.release()

    def forget(self) -> None:
        """As `close`, but do not wait for the service."""
        self._burst.forget(self._placement.memory)
        self.release()

    def release(self) -> None:
        """Give the memory back on this side only: the burst has ended."""
        self._placement.memory.close()

    def __enter__(self) -> BoundExecution:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
