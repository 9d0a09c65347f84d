"""OpenTelemetry spans for `Session.run`, in programs that use OpenTelemetry; others pay nothing."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from types import EllipsisType
from typing import TYPE_CHECKING, Any

import numpy as np

from .._version import VERSION
from .display import described
from .session import Session

if TYPE_CHECKING:
    import numpy.typing as npt


class TracedSession(Session):
    """A session whose runs are spans, as far as the program's sampler wants them."""

    def run(
        self,
        output_names: Sequence[str] | None,
        inputs: Mapping[str, npt.ArrayLike],
        timeout: float | EllipsisType | None = ...,
    ) -> list[np.ndarray[Any, np.dtype[Any]]]:
        """See `Session.run`."""
        trace = sys.modules["opentelemetry.trace"]
        attributes = {
            "nnburst.model": described(self.compilation),
            "nnburst.device": self.device.name,
            "nnburst.service.pid": self.service.pid,
        }
        tracer = trace.get_tracer("nnburst", VERSION)
        with tracer.start_as_current_span("nnburst.run", kind=trace.SpanKind.CLIENT, attributes=attributes):
            return super().run(output_names, inputs, timeout)
