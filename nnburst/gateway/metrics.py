"""Metrics over HTTP: a service's statistics, and counts of inferences under Triton's names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from aiohttp import web

from .._core.tokens import Tokens
from .listen import guard, listen
from .models import REASONS, ModelCounts

_MOST_CONNECTIONS = 8
"""Maximum number of connections. A further connection resets the oldest."""
_IDLE_S = 5

_US = 1000
_METRICS: tuple[tuple[str, str, str, Callable[[ModelCounts], int]], ...] = (
    ("request_success", "counter", "Requests that were answered.", lambda n: n.inferences),
    ("count", "counter", "Inferences.", lambda n: n.inferences),
    ("exec_count", "counter", "Runs of a model.", lambda n: n.inferences),
    ("pending_request_count", "gauge", "Requests that are under way.", lambda n: n.pending),
    ("request_duration_us", "counter", "Time of requests that were answered.", lambda n: n.success_ns // _US),
    ("compute_input_duration_us", "counter", "Time of making arrays of their inputs.", lambda n: n.input_ns // _US),
    ("compute_infer_duration_us", "counter", "Time of their runs, with waiting.", lambda n: n.run_ns // _US),
    ("compute_output_duration_us", "counter", "Time of taking their outputs.", lambda n: n.output_ns // _US),
)


def triton_metrics(counts: Sequence[tuple[str, str, ModelCounts]]) -> str:
    """Return `Models.counts` as Prometheus text, such as ``nv_inference_count{model="m",version="1"} 3``.

    Source: https://prometheus.io/docs/instrumenting/exposition_formats/
    """
    lines: list[str] = []

    def add(name: str, kind: str, what: str, rows: Iterable[tuple[dict[str, str], int]]) -> None:
        lines.extend((f"# HELP nv_inference_{name} {what}", f"# TYPE nv_inference_{name} {kind}"))
        for labels, value in rows:
            listed = ",".join(f'{label}="{_escape(text)}"' for label, text in labels.items())
            lines.append(f"nv_inference_{name}{{{listed}}} {value}")

    for name, kind, what, value in _METRICS:
        add(name, kind, what, (({"model": model, "version": v}, value(n)) for model, v, n in counts))
    reasons = dict.fromkeys(reason for _, reason in REASONS)
    failed = [
        ({"model": model, "version": v, "reason": reason}, n.failures[reason])
        for model, v, n in counts
        for reason in reasons
    ]
    add("request_failure", "counter", "Requests that failed.", failed)
    return "\n".join(lines) + "\n"


def _escape(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


async def serve_metrics(
    registry: Any, address: str, tokens: Tokens, most: int = _MOST_CONNECTIONS
) -> tuple[web.AppRunner, int | str]:
    """Start a server of metrics. See `listen` for arguments and errors."""
    from prometheus_client.exposition import choose_encoder

    async def answer(request: web.Request) -> web.Response:
        encode, kind = choose_encoder(request.headers.get("Accept", ""))
        return web.Response(body=encode(registry), headers={"Content-Type": kind})

    application = web.Application(middlewares=[guard(tokens)])
    application.router.add_get("/{path:.*}", answer)
    return await listen(application, address, most, idle=_IDLE_S, ends_oldest=True)
