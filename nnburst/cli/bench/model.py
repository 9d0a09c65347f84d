"""`nnburst bench --model`: one model, five ways to run it, in turns."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import InvalidArgument
from ..tensors import made_up
from .case import Bench, Case, Subject
from .placement import APART, ONE_CORE, allowed_cpus, conditions, pin_process
from .report import finite, machine, show_notes, write_document
from .sampling import Result, Samples, time_calls
from .schedule import Plan, run_all
from .server import server_process

_DEVICE = "nnburst-onnxruntime"
_REFERENCE = "inprocess-run"
Array = np.ndarray[Any, np.dtype[Any]]


def _library() -> Any:
    try:
        import onnxruntime
    except ImportError:
        raise InvalidArgument("bench --model needs ONNX Runtime: pip install 'nnburst[onnx]'") from None
    return onnxruntime


def in_process_session(path: str, threads: int) -> Any:
    """ONNX Runtime's own session, with the options of the device."""
    library = _library()
    options = library.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    return library.InferenceSession(path, options, providers=["CPUExecutionProvider"])


@dataclass
class Contest:
    """What the contenders share.

    Attributes:
        path: Of the model.
        threads: Number of threads that work on one operation.
        shapes: Of inputs with open dimensions.
        inputs: Arrays that all of them get; made by the first that is set up.
        expected: The outputs of the first run in process, which all others must equal.
    """

    path: str
    threads: int = 1
    shapes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    inputs: dict[str, Array] = field(default_factory=dict)
    expected: list[Array] = field(default_factory=list)

    def prepare(self) -> None:
        """Make up the inputs and find out the outputs.

        Raises:
            InvalidArgument: ONNX Runtime is missing, or a shape is, or the model does not run on such inputs.
            NNBurstError: The model cannot run.
        """
        from ...runtime import Session

        _library()
        with Session(self.path, device=f"{_DEVICE}:threads={self.threads}") as session:
            self.inputs = made_up(session.get_inputs(), self.shapes)
        try:
            self.expected = in_process_session(self.path, self.threads).run(None, self.inputs)
        except Exception as error:  # ONNX Runtime's own classes have no common base
            raise InvalidArgument(f"the model does not run in this process: {error}") from None

    def check(self, outputs: Sequence[Array]) -> None:
        """Raise if outputs are not those of `InferenceSession.run`, bit for bit."""
        same = len(outputs) == len(self.expected) and all(
            a.shape == b.shape and a.tobytes() == b.tobytes() for a, b in zip(outputs, self.expected, strict=False)
        )
        if not same:
            raise AssertionError("the outputs differ from those of InferenceSession.run")


def _pinned(bench: Bench, contest: Contest, call: Callable[[], object]) -> Callable[[int], Samples]:
    """Take samples on the client's CPU; on any, if several threads are to work."""

    def sample(count: int) -> Samples:
        if contest.threads == 1:
            pin_process(os.getpid(), {bench.cpus.client})
        return time_calls(call, count)

    return sample


@contextmanager
def _open_run(contest: Contest, bench: Bench) -> Iterator[Subject]:
    session = in_process_session(contest.path, contest.threads)
    yield Subject(_pinned(bench, contest, partial(session.run, None, contest.inputs)))


@contextmanager
def _open_binding(contest: Contest, bench: Bench) -> Iterator[Subject]:
    session = in_process_session(contest.path, contest.threads)
    binding = session.io_binding()
    for name, array in contest.inputs.items():
        binding.bind_cpu_input(name, array)
    outputs = [np.empty_like(array) for array in contest.expected]
    for argument, array in zip(session.get_outputs(), outputs, strict=True):
        binding.bind_output(argument.name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
    session.run_with_iobinding(binding)
    contest.check(outputs)
    yield Subject(_pinned(bench, contest, partial(session.run_with_iobinding, binding)))


@contextmanager
def _open_burst(contest: Contest, bound: bool, bench: Bench) -> Iterator[Subject]:
    from ...runtime import launch

    device = f"{_DEVICE}:threads={contest.threads}"
    with (
        launch(devices=[device]) as service,
        service.session(contest.path, polling_window=bench.polling_window) as session,
    ):
        pid = service.pid if contest.threads == 1 else None
        if not bound:
            contest.check(session.run(None, contest.inputs))
            yield Subject(partial(time_calls, partial(session.run, None, contest.inputs)), pid)
            return
        shapes = {name: array.shape for name, array in contest.inputs.items()}
        shapes |= {a.name: b.shape for a, b in zip(session.get_outputs(), contest.expected, strict=True)}
        execution = session.bind(shapes=shapes)
        for name, array in contest.inputs.items():
            execution.inputs[name][...] = array
        execution.run()
        contest.check([execution.outputs[argument.name] for argument in session.get_outputs()])
        yield Subject(partial(time_calls, execution.run), pid)


def _pipe_server(end: Any) -> Generator[None, None, None]:
    """Run whatever comes and answer with the outputs."""
    connection, path, threads = end
    session = in_process_session(path, threads)
    yield
    while True:
        connection.send(session.run(None, connection.recv()))


@contextmanager
def _open_pipe(contest: Contest, bench: Bench) -> Iterator[Subject]:
    ours, theirs = multiprocessing.Pipe()
    with ours, server_process(_pipe_server, (theirs, contest.path, contest.threads)) as process:
        theirs.close()

        def call() -> Any:
            ours.send(contest.inputs)
            return ours.recv()

        contest.check(call())
        yield Subject(partial(time_calls, call), process.pid if contest.threads == 1 else None)


_CONTENDERS: dict[str, tuple[str, Callable[..., Any]]] = {
    _REFERENCE: ("in process, InferenceSession.run", _open_run),
    "inprocess-binding": ("in process, run_with_iobinding", _open_binding),
    "burst-bound": ("burst, bind().run()", lambda contest, bench: _open_burst(contest, True, bench)),
    "burst-run": ("burst, Session.run (copies)", lambda contest, bench: _open_burst(contest, False, bench)),
    "pipe": ("Pipe, pickled arrays", _open_pipe),
}


def model_cases(contest: Contest, two_cpus: bool) -> tuple[Case, ...]:
    payload = sum(array.nbytes for array in (*contest.inputs.values(), *contest.expected))
    placement = APART if two_cpus else ONE_CORE
    return tuple(
        Case(key, "m", title, "block" if key == "pipe" else "poll", payload, partial(opener, contest), placement)
        for key, (title, opener) in _CONTENDERS.items()
    )


@dataclass(frozen=True, slots=True)
class ModelReport:
    """A finished contest."""

    contest: Contest
    conditions: Mapping[str, Any]
    results: Mapping[str, Result]

    def ratios(self) -> dict[str, float | None]:
        """Median of each contender over that of `InferenceSession.run`; None if no round of both is settled."""
        reference = self.results[_REFERENCE]
        return {key: finite(result.ratio_to(reference)) for key, result in self.results.items()}

    def rows(self) -> list[dict[str, Any]]:
        ratios = self.ratios()
        return [
            {
                "name": key,
                "title": _CONTENDERS[key][0],
                "ratio": ratios[key],
                "count": sum(len(r.samples) for r in result.rounds),
                **(result.percentiles_us() if result.rounds else {}),
                "note": result.note,
            }
            for key, result in self.results.items()
        ]

    def words(self) -> list[str]:
        c = self.conditions
        where = (
            f"client on CPU {c['client_cpu']}, service on CPU {c['server_cpu']}"
            if self.contest.threads == 1
            else "nothing pinned"
        )
        shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in self.contest.inputs.items())
        return [
            f"{machine(c)}, ONNX Runtime {c['onnxruntime']}",
            f"{self.contest.threads} ONNX Runtime thread(s), {where}, polling window {c['polling_window_us']:g} µs",
            f"inputs {shapes}; outputs of rows with figures are the same to the bit; {c['rounds']} rounds in turns",
            f"bytecode: {c['bytecode']}",
            f"load average at the start {c['load_average_at_start']}",
        ]

    def show(self, console: Any) -> None:
        from rich.table import Table

        table = Table(title=f"{Path(self.contest.path).name}, one run in µs", title_justify="left")
        table.add_column("")
        for column in ("p50", "p90", "p99", "max", "ratio"):
            table.add_column(column, justify="right")
        for row in self.rows():
            if row["count"]:
                figures = [f"{row[name]:,.2f}" for name in ("p50_us", "p90_us", "p99_us", "max_us")]
                table.add_row(row["title"], *figures, "-" if row["ratio"] is None else f"{row['ratio']:.2f}")
            else:
                table.add_row(row["title"], "-", "-", "-", "-", "-", style="dim")
        console.print(table)
        show_notes(console, self.results)
        for line in self.words():
            console.print("  " + line, markup=False, highlight=False, soft_wrap=True)

    def write_json(self, path: Path) -> None:
        document = {"model": self.contest.path, "conditions": dict(self.conditions), "rows": self.rows()}
        write_document(path, document)


def run_contest(contest: Contest, plan: Plan, polling_window: float) -> ModelReport:
    cpus = allowed_cpus()
    contest.prepare()
    known: dict[str, Any] = {**conditions(cpus, polling_window), "onnxruntime": _library().__version__}
    known |= {"rounds": plan.rounds, "count": plan.count, "threads": contest.threads}
    return ModelReport(contest, known, run_all(model_cases(contest, cpus.two), cpus, plan, polling_window))
