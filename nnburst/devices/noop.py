"""A device whose executions do nothing: what remains of a call is the transport."""

from __future__ import annotations

from .._core._nnburst import lib
from ..burst import Kernel
from ..errors import ErrorStatus
from ..model import (
    NEVER,
    NO_TIMING,
    Capabilities,
    Model,
    Operation,
    OutputShape,
    Request,
    RunOptions,
    combine_dimensions,
    is_fully_specified,
)
from .common import capabilities_of
from .local import LocalDevice, LocalModel


class NoopDevice(LocalDevice):
    """Accepts every valid model; an execution checks its request, computes nothing and succeeds."""

    has_buffers = False

    @property
    def name(self) -> str:
        return "nnburst-noop"

    @property
    def capabilities(self) -> Capabilities:
        """Slower than any other, for it computes nothing."""
        return capabilities_of(NEVER)

    def why_not(self, model: Model, operation: Operation) -> str:
        return ""

    def compile(self, model: Model) -> NoopPreparedModel:
        return NoopPreparedModel(model, self._tracker)


class NoopPreparedModel(LocalModel):
    """A model that is checked against requests and otherwise ignored."""

    def bind(self, request: Request, options: RunOptions) -> Kernel:
        """Return a callable that does nothing. Dimensions that are open remain 0, as nothing was written."""
        main, shapes, is_open = self.model.main, [], False
        for index, argument in zip(main.output_indexes, request.outputs, strict=True):
            operand = main.operands[index]
            dims = combine_dimensions(operand.dimensions, argument.dimensions)
            is_open |= not is_fully_specified(dims) and not operand.is_scalar
            shapes.append(OutputShape(dims))
        result = (ErrorStatus.NONE, tuple(shapes), NO_TIMING) if is_open else None
        return _NOTHING if result is None else lambda: result


class _Nothing:
    """An execution of a model that does nothing, here and in C."""

    c_kernel = lib.nnb_kernel_noop()

    def __call__(self) -> None:
        """Do nothing."""


_NOTHING = _Nothing()
