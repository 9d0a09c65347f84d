"""A device whose executions compute nothing, so that a measurement shows only the cost of the calls."""

from __future__ import annotations

from .._core._nnburst import lib
from ..burst.kernel import Kernel
from ..errors import ErrorStatus, OutputShape
from ..model.dimensions import combine_dimensions, is_fully_specified
from ..model.performance import NEVER
from ..model.running import RunOptions
from ..model.types import NO_TIMING, Model, Operation, Request
from .common import capabilities_of
from .local import LocalDevice, LocalModel


class NoopDevice(LocalDevice):
    """A device that accepts every valid model. An execution checks its request, computes nothing and succeeds."""

    name = "nnburst-noop"
    has_buffers = False
    capabilities = capabilities_of(NEVER)
    """A declared speed so low that no model is assigned to this device automatically."""

    def why_not(self, model: Model, operation: Operation) -> str:
        return ""

    def compile(self, model: Model) -> NoopPreparedModel:
        return NoopPreparedModel(model, self._tracker)


class NoopPreparedModel(LocalModel):
    """A prepared model that only checks requests."""

    def bind(self, request: Request, options: RunOptions) -> Kernel:
        """Return a kernel that does nothing. Unknown output dimensions stay 0."""
        operands = [self.model.main.operands[index] for index in self.model.main.output_indexes]
        dims = [combine_dimensions(o.dimensions, a.dimensions) for o, a in zip(operands, request.outputs, strict=True)]
        if all(o.is_scalar or is_fully_specified(known) for o, known in zip(operands, dims, strict=True)):
            return _NOTHING
        return lambda: (ErrorStatus.NONE, tuple(map(OutputShape, dims)), NO_TIMING)


class _Nothing:
    """A kernel that does nothing. It has a Python form and a C form."""

    c_kernel = lib.nnb_kernel_noop()

    def __call__(self) -> None:
        """Do nothing."""


_NOTHING = _Nothing()
