"""OpenTelemetry spans for the runs of a session, in programs that use OpenTelemetry; others pay nothing."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Generator, Iterator, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeVar

from .._version import VERSION
from .display import described

if TYPE_CHECKING:
    from .session import Session

T = TypeVar("T")

_inside: ContextVar[bool] = ContextVar("nnburst_inside_span", default=False)


class Spans:
    """Makes spans of a session's runs, as far as the program's sampler wants them."""

    def __init__(self) -> None:
        self._trace = sys.modules["opentelemetry.trace"]

    @property
    def wanted(self) -> bool:
        """Whether a run that begins now is not within a span of its own yet."""
        return not _inside.get()

    @contextlib.contextmanager
    def of_run(self, session: Session) -> Iterator[None]:
        """Make a span of the run inside, below the span that is current."""
        with self._tracer.start_as_current_span("nnburst.run", **self._about(session)):
            before = _inside.set(True)
            try:
                yield
            finally:
                _inside.reset(before)

    def of_many(self, session: Session, outcomes: Generator[T, None, None]) -> Generator[T, None, None]:
        """Make a span of what a generator does, which is not current where it is consumed."""
        with self._tracer.start_span("nnburst.run_many", **self._about(session)):
            yield from outcomes

    @property
    def _tracer(self) -> Any:
        return self._trace.get_tracer("nnburst", VERSION)

    def _about(self, session: Session) -> dict[str, Any]:
        attributes = {
            "nnburst.model": described(session.compilation),
            "nnburst.device": session.compilation.device.name,
            "nnburst.service.pid": session._service.pid,
        }
        return {"kind": self._trace.SpanKind.CLIENT, "attributes": attributes}


def below(headers: Callable[[], Mapping[str, str]]) -> contextlib.AbstractContextManager[None]:
    """Have the span that a request's headers name (``traceparent``) be the current one inside.

    Source: https://www.w3.org/TR/trace-context/
    """
    return _below(headers()) if "opentelemetry.trace" in sys.modules else contextlib.nullcontext()


@contextlib.contextmanager
def _below(headers: Mapping[str, str]) -> Iterator[None]:
    from opentelemetry import context, propagate

    token = context.attach(propagate.extract(headers))
    try:
        yield
    finally:
        context.detach(token)


def spans() -> Spans | None:
    """Return what makes spans, if the program uses OpenTelemetry."""
    return Spans() if "opentelemetry.trace" in sys.modules else None
