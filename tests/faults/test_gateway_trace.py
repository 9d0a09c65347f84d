"""Trace context that comes over the network is handed on: the span of a run is below that of the request."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx", reason="needs the extra nnburst[onnx]")
pytest.importorskip("tritonclient", reason="needs the extra nnburst[oip]")
pytest.importorskip("opentelemetry.sdk.trace", reason="needs opentelemetry-sdk")

from support import ROOT
from support.gateways import MARKS, PROTOCOLS, tensor
from support.services import save_scaling, shared_service
from support.waiting import until

pytestmark = [pytest.mark.check, *MARKS]
AS_OPENTELEMETRY_INSTRUMENT = """
import os, sys
if "nnburst.gateway.run" in sys.orig_argv:
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor

    provider = TracerProvider()
    out = open(os.environ["SPANS"], "a", buffering=1)
    line = lambda span: span.to_json(indent=None) + chr(10)
    provider.add_span_processor(SimpleSpanProcessor(ConsoleSpanExporter(out=out, formatter=line)))
    trace.set_tracer_provider(provider)
"""
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def test_span_of_a_run_is_below_the_one_that_its_request_names(tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(AS_OPENTELEMETRY_INSTRUMENT)
    model, written = save_scaling(tmp_path / "scale.onnx", 2), tmp_path / "spans"
    env = {"PYTHONPATH": f"{ROOT}:{tmp_path / 'site'}", "SPANS": str(written), "NNBURST_STATE_DIR": str(tmp_path)}
    listen = ("--oip", "127.0.0.1:0", "--oip-rest", "127.0.0.1:0")
    with shared_service(tmp_path, "--model", f"scale={model}", *listen, env=env) as shared:
        for protocol, kind in PROTOCOLS.items():
            client = kind.InferenceServerClient(f"127.0.0.1:{shared.ready['oip'][protocol]}")
            x = tensor(kind, "x", np.ones((1, 4), np.float32))
            client.infer("scale", [x], headers={"traceparent": f"00-{TRACE}-{PARENT}-01"})
            client.infer("scale", [x])
            client.close()

        def spans() -> list[Any]:
            found = [json.loads(line) for line in written.read_text().splitlines()]
            return found if len(found) == 4 else []

        found = until(spans, lambda: written.read_text())
    assert {span["name"] for span in found} == {"nnburst.run"}
    assert [span["parent_id"] for span in found] == [f"0x{PARENT}", None, f"0x{PARENT}", None]
    assert [span["context"]["trace_id"] == f"0x{TRACE}" for span in found] == [True, False, True, False]
