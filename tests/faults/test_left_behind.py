"""What a client leaves behind that was killed, dropped its burst, or was told to go: its runs end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nnburst
from nnburst.errors import InvalidArgument, MissedDeadline
from nnburst.watch import RowKind, RowStats, find_services, look
from support import ROOT
from support.models import tiny_model
from support.processes import line_of, rests, start_python
from support.services import Shared, run_command, shared_service
from support.waiting import PATIENCE, until

pytestmark = pytest.mark.check

CLIENT = """
import sys
sys.path.insert(0, sys.argv[3])
import numpy as np
import nnburst
from support.models import doubling_model

how = sys.argv[2]

def endless_loop():
    from support.onnx_models import FLOAT, graph, node
    inputs = [("i", 7, ()), ("go", 9, ()), ("h", FLOAT, (4,))]
    nodes = [node("Identity", ["go"], ["on"]), node("Add", ["h", "h"], ["g"])]
    body = graph(nodes, inputs, [("on", 9, ()), ("g", FLOAT, (4,))]).graph
    loop = node("Loop", ["n", "", "x"], ["y"], body=body)
    return graph([loop], [("x", FLOAT, (4,))], [("y", FLOAT, (4,))], {"n": np.int64(2**62)}).SerializeToString()

def long_chain():
    # A minute of operations that are all bound before the first run.
    from nnburst import ModelBuilder, OperandType
    b = ModelBuilder()
    x = b.input("x", OperandType.TENSOR_FLOAT32, (4096, 4096))
    for _ in range(2000):
        y = b.reduce_sum(x, [1])
    b.output("y", y)
    return b.build()

service = nnburst.connect(sys.argv[1])
if how == "onnx":
    session, inputs = service.session(endless_loop()), {"x": np.ones(4, np.float32)}
elif how == "chain":
    session = service.session(long_chain(), device="nnburst-reference")  # the other one leaves out what nobody reads
    inputs = {"x": np.zeros((4096, 4096), np.float32)}
else:
    session, inputs = service.session(doubling_model()), {"c": np.uint8([1]), "x": np.float32([1])}
if how in ("fenced", "without a burst"):
    execution = nnburst.nnapi.Execution(session.compilation)
    for i, node in enumerate(session.compilation.inputs):
        execution.set_input(i, inputs[node.name])
    for i, node in enumerate(session.compilation.outputs):
        execution.set_output(i, np.zeros(node.shape, node.dtype))
    event = execution.start_compute_with_dependencies([]) if how == "fenced" else execution.start_compute()
else:
    execution = session.bind()
    for name, value in inputs.items():
        execution.inputs[name][:] = value
    future = execution.submit()
print("begun", flush=True)
for line in sys.stdin:
    if line == "drop\\n":
        session.close()
        print("dropped", flush=True)
    elif line == "result\\n":
        try:
            future.result()
        except Exception as error:
            print(repr(error), flush=True)
"""


@contextlib.contextmanager
def endless_client(shared: Shared, how: str) -> Iterator[subprocess.Popen[str]]:
    """A client with a run under way that does not end by itself."""
    client = start_python(CLIENT, shared.address, how, str(ROOT / "tests"))
    try:
        assert line_of(client) == "begun\n"
        yield client
    finally:
        client.kill()
        client.communicate()


def says(client: subprocess.Popen[str], order: str) -> str:
    assert client.stdin is not None
    client.stdin.write(f"{order}\n")
    client.stdin.flush()
    return line_of(client)


def rows_of(shared: Shared, pid: int) -> list[RowStats]:
    (page,) = find_services(shared.worker)
    return [row for row in look(page).rows if row.client_pid == pid]


def threads(shared: Shared) -> int:
    return len(os.listdir(f"/proc/{shared.worker}/task"))


def run_once(shared: Shared) -> None:
    """An honest client that comes and goes."""
    with nnburst.connect(shared.address) as service, service.session(tiny_model(256), timeout=PATIENCE) as session:
        (y,) = session.run(None, {"x": np.zeros(64, np.float32)})
        np.testing.assert_array_equal(y, np.arange(64))


def wait_until_it_computes(shared: Shared) -> None:
    """Wait until it has used more than a little processor time."""

    def ticks() -> int:
        return sum(map(int, Path(f"/proc/{shared.worker}/stat").read_text().rpartition(")")[2].split()[11:13]))

    before = ticks()
    until(lambda: ticks() - before > 5, "the run does not begin")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    devices = ["--isolate", "none", "--device", "nnburst-reference"]
    with contextlib.suppress(ImportError):
        import onnxruntime  # noqa: F401

        devices += ["--device", "nnburst-onnxruntime"]
    with shared_service(tmp_path_factory.mktemp("left"), *devices) as shared:
        run_once(shared)
        yield shared


@pytest.fixture
def gives_all_back(shared: Shared) -> Iterator[None]:
    """In the end the service has no more descriptors than before, the threads of its group, and nothing to do."""

    until(lambda: rests(shared.worker), "it does not come to rest")
    before, most = shared.descriptors(), threads(shared) + 2 * (os.cpu_count() or 1)
    yield
    until(
        lambda: shared.descriptors() <= before and threads(shared) <= most,
        lambda: (before, shared.descriptors(), most, threads(shared)),
    )
    until(lambda: rests(shared.worker), "something still runs")


@pytest.mark.parametrize("how", ["burst", "without a burst", "fenced", "chain", "onnx"])
def test_runs_of_a_client_that_is_killed_end(shared: Shared, gives_all_back: None, how: str) -> None:
    if how == "onnx":
        pytest.importorskip("onnxruntime")
    with endless_client(shared, how) as client:
        wait_until_it_computes(shared)
        run_once(shared)
        client.send_signal(signal.SIGKILL)
        client.wait()
        until(lambda: not rows_of(shared, client.pid), lambda: rows_of(shared, client.pid))
        run_once(shared)


@pytest.mark.representative
def test_run_of_a_burst_that_is_dropped_ends(shared: Shared, gives_all_back: None) -> None:
    with endless_client(shared, "burst") as client:
        wait_until_it_computes(shared)
        assert says(client, "drop") == "dropped\n"
        until(lambda: not rows_of(shared, client.pid), lambda: rows_of(shared, client.pid))


# ---- nnburst kick ----------------------------------------------------------------------------------------------------


def test_client_that_is_kicked_is_told_and_its_run_ends(shared: Shared, gives_all_back: None) -> None:
    with endless_client(shared, "burst") as client:
        wait_until_it_computes(shared)
        done = run_command("kick", shared.address, str(client.pid))
        assert done.stdout == f"ended 1 connection of process {client.pid} to {shared.address}\n", done.output
        said = says(client, "result")
        assert "DeadObject" in said
        assert "by order of user" in said
        until(lambda: not rows_of(shared, client.pid), lambda: rows_of(shared, client.pid))
        assert client.poll() is None


# ---- nnburst top -----------------------------------------------------------------------------------------------------

FUNCTIONS = """
import pathlib, time
from nnburst.devices.function import Needs, Tensor, declare

here = pathlib.Path(__file__).parent

@declare(inputs=[Tensor("x", "float32", (4,))], outputs=[Tensor("y", "float32", (4,))], needs=Needs(write=[str(here)]))
def until_told(x):
    (here / "begun").touch()
    while not (here / "told").exists():
        time.sleep(0.02)
    return x
"""


def test_top_shows_a_run_without_a_client_until_it_ends(tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text(FUNCTIONS)
    program = (
        "import sys, numpy as np, nnburst\n"
        "session = nnburst.connect(sys.argv[1]).session('until_told')\n"
        "future = session.bind().submit()\n"
        "print('begun', flush=True)\n"
        "future.result()\n"
    )
    env = {"PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}", "NNBURST_STATE_DIR": str(tmp_path / "state")}
    device = "nnburst-function:call=waits:until_told"
    with shared_service(tmp_path, "--device", device, env=env) as shared:
        client = start_python(program, shared.address)
        try:
            assert line_of(client) == "begun\n"
            bursts = [row for row in rows_of(shared, client.pid) if row.kind is RowKind.BURST]
            assert [row.has_left for row in bursts] == [False]
            until((tmp_path / "begun").exists, "the run does not begin")
        finally:
            client.kill()
            client.communicate()
        until(
            lambda: [row.has_left for row in rows_of(shared, client.pid)] == [True, True],  # of the model and the burst
            lambda: rows_of(shared, client.pid),
        )
        top = ("top", str(shared.worker), "--once")
        shown: list[Any] = json.loads(run_command(*top, "--json").stdout)
        left = [burst["client_has_left"] for model in shown[0]["models"] for burst in model["bursts"]]
        assert left == [True], shown
        table = run_command(*top).stdout
        assert f"({client.pid}) has left" in table
        (tmp_path / "told").touch()
        until(lambda: not rows_of(shared, client.pid), lambda: rows_of(shared, client.pid))


# ---- the longest run -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["burst", "without a burst"])
def test_run_that_takes_longer_than_the_service_allows_is_ended(how: str) -> None:
    from support.models import doubling_model

    inputs = {"c": np.uint8([1]), "x": np.float32([1])}
    with nnburst.launch(max_run=0.2) as service, service.session(doubling_model()) as session:
        if how == "burst":
            with pytest.raises(MissedDeadline, match=r"a run after 0.2 s \(nnburst serve --max-run"):
                session.run(None, inputs)
        else:
            execution = nnburst.nnapi.Execution(session.compilation)
            for i, node in enumerate(session.compilation.inputs):
                execution.set_input(i, inputs[node.name])
            execution.set_output(0, np.zeros(1, np.float32))
            with pytest.raises(MissedDeadline, match=r"a run after 0.2 s \(nnburst serve --max-run"):
                execution.compute()
        with service.session(tiny_model(256)) as other:

            def answers() -> bool:
                with contextlib.suppress(MissedDeadline):  # the processors may be busy for so long
                    (y,) = other.run(None, {"x": np.zeros(64, np.float32)})
                    return np.array_equal(y, np.arange(64))
                return False

            until(answers)


@pytest.mark.parametrize("wrong", [0, -1, "soon"])
def test_longest_run_that_is_no_time_is_refused(wrong: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"max_run|give seconds"):
        nnburst.launch(max_run=wrong)
