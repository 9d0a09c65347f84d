"""OpenTelemetry spans for the runs of a session."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Generator, Iterator, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeVar

from .._version import VERSION
from .display import describe

if TYPE_CHECKING:
    from .session import Session

T = TypeVar("T")

_inside: ContextVar[bool] = ContextVar("nnburst_inside_span", default=False)


class Spans:
    """Maker of OpenTelemetry spans for a session's runs."""

    def __init__(self) -> None:
        self._trace = sys.modules["opentelemetry.trace"]

    @property
    def wanted(self) -> bool:
        """Return True if the current run has no span yet."""
        return not _inside.get()

    @contextlib.contextmanager
    def record_run(self, session: Session) -> Iterator[None]:
        """Record the run in a ``with`` block as a span, a child of the current span."""
        with self._tracer.start_as_current_span("nnburst.run", **self._attributes(session)):
            before = _inside.set(True)
            try:
                yield
            finally:
                _inside.reset(before)

    def record_stream(self, session: Session, outcomes: Generator[T, None, None]) -> Generator[T, None, None]:
        """Wrap a generator's work in a span. The generator's consumer keeps its current span."""
        with self._tracer.start_span("nnburst.run_many", **self._attributes(session)):
            yield from outcomes

    @property
    def _tracer(self) -> Any:
        return self._trace.get_tracer("nnburst", VERSION)

    def _attributes(self, session: Session) -> dict[str, Any]:
        attributes = {
            "nnburst.model": describe(session.compilation),
            "nnburst.device": session.compilation.device.name,
            "nnburst.service.pid": session._service.pid,
        }
        return {"kind": self._trace.SpanKind.CLIENT, "attributes": attributes}


@contextlib.contextmanager
def use_parent(headers: Callable[[], Mapping[str, str]]) -> Iterator[None]:
    """Set the current span of a ``with`` block to the span that a request's ``traceparent`` header names.

    Source: https://www.w3.org/TR/trace-context/
    """
    if "opentelemetry.trace" not in sys.modules:
        yield
        return
    from opentelemetry import context, propagate

    token = context.attach(propagate.extract(headers()))
    try:
        yield
    finally:
        context.detach(token)


def find_tracer() -> Spans | None:
    """Return the maker of spans; None if the program does not use OpenTelemetry."""
    return Spans() if "opentelemetry.trace" in sys.modules else None
