"""The ONNX Runtime device, but a run whose first input begins with 666 kills the process. Loaded by an entry point."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import numpy as np

from nnburst.devices.onnxruntime import OnnxRuntimeDevice
from nnburst.devices.onnxruntime._prepared import OnnxPreparedModel


class CrashDevice(OnnxRuntimeDevice):
    @property
    def name(self) -> str:
        return "test-crash"

    def prepare_model(self, *args: Any, **options: Any) -> OnnxPreparedModel:
        prepared = super().prepare_model(*args, **options)
        return CrashModel(prepared.model, prepared.graph, prepared.tracker)


class CrashModel(OnnxPreparedModel):
    def bind(self, request: Any, measure: Any) -> Any:
        plan = super().bind(request, measure)
        pool = request.pools[request.inputs[0].location.pool_index]
        first = pool.array(np.float32, (1,), request.inputs[0].location.offset)

        def run() -> Any:
            if first[0] == 666:
                signal.pthread_kill(threading.get_ident(), int(os.environ["NNBURST_TEST_SIGNAL"]))
            return plan()

        return run
