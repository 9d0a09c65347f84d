"""`nnburst bench --model`: compare five ways to run one model."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import InvalidArgument
from ...runtime.open_service import launch
from ...runtime.session import Session
from ..child import caller_of
from ..tensors import Array, generate_values
from .report import Report, measure
from .rounds import POLLING_WINDOW, Case, Subject
from .sampling import time_calls

BASE = "inprocess-run"


def in_process_session(path: str, threads: int) -> Any:
    """Return an ONNX Runtime session in this process, with the same options as in the service."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def _runner(path: str, threads: int) -> Callable[[Any], Any]:
    return partial(in_process_session(path, threads).run, None)


class Contest:
    """A model, inputs, and the expected outputs. Each way to run the model must give equal outputs, bit for bit.

    Raises:
        InvalidArgument: A shape is missing, or the model does not accept the inputs.
        NNBurstError: The model cannot run.
    """

    def __init__(self, path: str, threads: int = 1, shapes: Mapping[str, Sequence[int]] | None = None) -> None:
        self._path, self._threads = path, threads
        self._device = f"nnburst-onnxruntime:threads={threads}"
        with Session(path, device=self._device) as session:
            self.inputs = generate_values(session.get_inputs(), shapes or {})
        try:
            self.expected: list[Array] = _runner(path, threads)(self.inputs)
        except Exception as error:  # ONNX Runtime's errors have no common base
            raise InvalidArgument(f"the model does not run in this process: {error}") from None

    def _check(self, outputs: Sequence[Array]) -> None:
        found, wanted = ([(a.shape, a.tobytes()) for a in arrays] for arrays in (outputs, self.expected))
        if found != wanted:
            raise AssertionError("the outputs differ from those of InferenceSession.run")

    def _subject(self, call: Callable[[], object], pid: int) -> Subject:
        return Subject(partial(time_calls, call), pid if self._threads == 1 else None)  # several threads run unpinned

    @contextmanager
    def _run(self) -> Iterator[Subject]:
        yield self._subject(partial(_runner(self._path, self._threads), self.inputs), os.getpid())

    @contextmanager
    def _binding(self) -> Iterator[Subject]:
        session = in_process_session(self._path, self._threads)
        binding = session.io_binding()
        for name, array in self.inputs.items():
            binding.bind_cpu_input(name, array)
        outputs = [np.empty_like(array) for array in self.expected]
        for argument, array in zip(session.get_outputs(), outputs, strict=True):
            binding.bind_output(argument.name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
        session.run_with_iobinding(binding)
        self._check(outputs)
        yield self._subject(partial(session.run_with_iobinding, binding), os.getpid())

    @contextmanager
    def _burst(self, bound: bool) -> Iterator[Subject]:
        with (
            launch(devices=[self._device]) as service,
            service.session(self._path, polling_window=POLLING_WINDOW) as session,
        ):
            call: Callable[[], Any] = partial(session.run, None, self.inputs)
            self._check(call())
            if bound:
                names = [argument.name for argument in session.get_outputs()]
                arrays = self.inputs | dict(zip(names, self.expected, strict=True))
                execution = session.bind(shapes={name: array.shape for name, array in arrays.items()})
                for name, array in self.inputs.items():
                    execution.inputs[name][...] = array
                execution.run()
                self._check([execution.outputs[name] for name in names])
                call = execution.run
            yield self._subject(call, service.pid)

    @contextmanager
    def _pipe(self) -> Iterator[Subject]:
        with caller_of(_runner, self._path, self._threads) as (ask, pid):
            self._check(ask(self.inputs))
            yield self._subject(partial(ask, self.inputs), pid)

    def measure(self, rounds: int, seconds: float) -> Report:
        """Measure all ways to run the model. Ratios are relative to `InferenceSession.run`."""
        payload = sum(array.nbytes for array in (*self.inputs.values(), *self.expected))
        cases = (
            Case(BASE, "m", "in process, InferenceSession.run", "-", payload, self._run, True),
            Case("inprocess-binding", "m", "in process, run_with_iobinding", "-", payload, self._binding, True),
            Case("burst-bound", "m", "burst, bind().run()", "poll", payload, partial(self._burst, True)),
            Case("burst-run", "m", "burst, Session.run (copies)", "poll", payload, partial(self._burst, False)),
            Case("pipe", "m", "Pipe, pickled arrays", "block", payload, self._pipe),
        )
        shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in self.inputs.items())
        title = f"{Path(self._path).name}, {shapes}, threads={self._threads}, one run in µs"
        return Report(*measure(cases, rounds, seconds), title, BASE)
