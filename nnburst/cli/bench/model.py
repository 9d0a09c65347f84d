"""`nnburst bench --model`: one model, five ways to run it, in turns."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import InvalidArgument
from ..tensors import made_up
from .case import Bench, Case, Subject
from .placement import APART, ONE_CORE, pin_process
from .report import finite
from .sampling import Result, Samples, time_calls
from .server import server_process

_DEVICE = "nnburst-onnxruntime"
_REFERENCE = "inprocess-run"
_TITLES = {
    _REFERENCE: "in process, InferenceSession.run",
    "inprocess-binding": "in process, run_with_iobinding",
    "burst-bound": "burst, bind().run()",
    "burst-run": "burst, Session.run (copies)",
    "pipe": "Pipe, pickled arrays",
}

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


_OPENERS: dict[str, Callable[..., Any]] = {
    _REFERENCE: _open_run,
    "inprocess-binding": _open_binding,
    "burst-bound": lambda contest, bench: _open_burst(contest, True, bench),
    "burst-run": lambda contest, bench: _open_burst(contest, False, bench),
    "pipe": _open_pipe,
}


def model_cases(contest: Contest, two_cpus: bool) -> tuple[Case, ...]:
    """Return one row per contender."""
    payload = sum(array.nbytes for array in (*contest.inputs.values(), *contest.expected))
    placement = APART if two_cpus else ONE_CORE
    return tuple(
        Case(key, "m", title, "block" if key == "pipe" else "poll", payload, partial(_OPENERS[key], contest), placement)
        for key, title in _TITLES.items()
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
        """One per contender, in microseconds."""
        ratios = self.ratios()
        return [
            {
                "name": key,
                "title": _TITLES[key],
                "ratio": ratios[key],
                "count": sum(len(r.samples) for r in result.rounds),
                **(result.percentiles_us() if result.rounds else {}),
                "note": result.note,
            }
            for key, result in self.results.items()
        ]

    def words(self) -> list[str]:
        """The conditions."""
        c = self.conditions
        where = (
            f"client on CPU {c['client_cpu']}, service on CPU {c['server_cpu']}"
            if self.contest.threads == 1
            else "nothing pinned"
        )
        shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in self.contest.inputs.items())
        return [
            f"{c['cpu']}, {c['cores']} cores{', virtual machine' if c['virtual_machine'] else ''}, "
            f"Linux {c['kernel']}, {c['python']}, ONNX Runtime {c['onnxruntime']}",
            f"{self.contest.threads} ONNX Runtime thread(s), {where}, polling window {c['polling_window_us']:g} µs",
            f"inputs {shapes}; all outputs are the same in every bit; {c['rounds']} rounds in turns",
            f"bytecode: {c['bytecode']}",
            f"load average at the start {c['load_average_at_start']}",
        ]

    def show(self, console: Any) -> None:
        """Print the table."""
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
        for row in self.rows():
            if row["note"]:
                console.print(f"{row['name']}: {row['note']}", style="yellow", markup=False, highlight=False)
        for line in self.words():
            console.print("  " + line, markup=False, highlight=False, soft_wrap=True)

    def write_json(self, path: Path) -> None:
        """Write rows and conditions."""
        document = {"model": self.contest.path, "conditions": dict(self.conditions), "rows": self.rows()}
        path.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def run_contest(contest: Contest, plan: Any, polling_window: float, progress_console: Any) -> ModelReport:
    """Measure all contenders with a progress bar."""
    import tempfile

    from rich.progress import Progress

    from .placement import allowed_cpus, conditions, keep_affinity
    from .schedule import run

    cpus = allowed_cpus()
    contest.prepare()
    known: dict[str, Any] = {**conditions(cpus, polling_window), "onnxruntime": _library().__version__}
    known |= {"rounds": plan.rounds, "count": plan.count, "threads": contest.threads}
    cases = model_cases(contest, cpus.two)
    bar = Progress(console=progress_console, transient=True, auto_refresh=False)
    with keep_affinity(), tempfile.TemporaryDirectory(prefix="nnburst-bench-") as directory, bar, ExitStack() as stack:
        task = bar.add_task("", total=len(cases) * (plan.rounds + 1))

        def progress(what: str) -> None:
            bar.update(task, advance=1, description=what, refresh=True)

        results = run(cases, Bench(cpus, directory, polling_window, stack), plan, stack, progress)
    return ModelReport(contest, known, results)
