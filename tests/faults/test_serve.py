"""``nnburst serve`` as other programs meet it: found by name, shared, reloaded, ended, and closed to strangers."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nnburst
from nnburst._core.errno import this_process
from nnburst.errors import DeadObject, DeviceUnavailable, InvalidArgument
from nnburst.service.process.command import service_environment
from nnburst.service.process.discovery import dial
from support import ROOT
from support.processes import line_of, stop
from support.services import COMMAND, let_pass, run_command, save_scaling, shared_service, told_to_pass
from support.users import GUEST, as_root, as_user
from support.waiting import PATIENCE, Background, until

pytestmark = pytest.mark.check

pytest.importorskip("onnx", reason="named models are read from ONNX files here")
pytest.importorskip("onnxruntime", reason="named models are read from ONNX files here")

X = np.arange(8, dtype=np.float32).reshape(2, 4)


class Served:
    """A running ``nnburst serve``, and the line with which it said that it is ready."""

    def __init__(self, process: subprocess.Popen[str], ready: dict[str, Any]) -> None:
        self.process = process
        self.ready = ready

    def ended(self) -> int:
        """Wait for its end; returns the exit status."""
        return self.process.wait(PATIENCE)


@contextlib.contextmanager
def starting(directory: Path) -> Iterator[Callable[..., Served]]:
    """Starts services of a directory; whatever is left is killed."""
    started: list[subprocess.Popen[str]] = []

    def run(*options: str, **more: Any) -> Served:
        process = subprocess.Popen(
            [*COMMAND, "serve", "--json", *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=directory,
            **{"env": service_environment({**os.environ, "PYTHONPATH": str(ROOT)}), **more},
        )
        started.append(process)
        line = line_of(process)
        if not line:
            _, said = process.communicate(timeout=PATIENCE)
            raise AssertionError(said)
        return Served(process, json.loads(line))

    try:
        yield run
    finally:
        for process in started:
            process.kill()
            process.communicate(timeout=PATIENCE)


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Served]]:
    """Starts services of this test's own."""
    monkeypatch.setenv("NNBURST_RUNTIME_DIR", str(tmp_path / "run"))
    with starting(tmp_path) as start:
        yield start


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Served]]:
    directory = tmp_path_factory.mktemp("vision")
    doubling = save_scaling(directory / "scaling.onnx", 2.0)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NNBURST_RUNTIME_DIR": str(directory / "run")}
    with starting(directory) as start:
        models = [option for name in ("double", "twice") for option in ("--model", f"{name}={doubling}")]
        yield directory / "run", start("--name", "vision", *models, env=environment)


@pytest.fixture
def vision(running: tuple[Path, Served], monkeypatch: pytest.MonkeyPatch) -> Served:
    """A service for tests that leave it as it was: of this name, with a model under two names."""
    monkeypatch.setenv("NNBURST_RUNTIME_DIR", str(running[0]))
    return running[1]


@pytest.fixture
def scaling(tmp_path: Path) -> str:
    return save_scaling(tmp_path / "scaling.onnx", 2.0)


# ---- sharing ---------------------------------------------------------------------------------------------------


@pytest.mark.representative
def test_programs_share_a_named_model(vision: Served) -> None:
    assert vision.ready["models"] == ["double", "twice"]
    program = (
        "import nnburst, numpy as np\n"
        "with nnburst.connect('vision') as service, service.session('double') as s:\n"
        "    print(service.pid, s.run(None, {'x': np.full((3, 4), 5, np.float32)})[0].sum())\n"
    )
    clients = [
        subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=ROOT) for _ in range(3)
    ]
    workers = set()
    for client in clients:
        out, _ = client.communicate(timeout=PATIENCE)
        pid, answer = out.split()
        assert answer == "120.0"
        workers.add(pid)
    assert len(workers) == 1, "they do not share the model"
    assert str(vision.process.pid) not in workers, "the broker runs models"


def test_named_model_serves_every_session_of_every_connection(vision: Served) -> None:
    with nnburst.connect("vision") as service, nnburst.connect("vision") as other:
        for home in (service, other, service):
            with home.session("double") as session:
                np.testing.assert_array_equal(session.run(None, {"x": X})[0], 2 * X)


def test_models_of_a_clients_own_run_beside_named_ones(start: Callable[..., Served], scaling: str) -> None:
    start("--model", f"double={scaling}")  # under the usual name
    with nnburst.connect("nnburst") as service, service.session(scaling) as own, service.session("double") as named:
        for session in (own, named):
            np.testing.assert_array_equal(session.run(None, {"x": X})[0], 2 * X)


def test_state_of_a_named_model_belongs_to_one_session(start: Callable[..., Served], tmp_path: Path) -> None:
    import onnx
    from onnx import TensorProto, helper

    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [4]) for name in ("x", "h", "g")]
    graph = helper.make_graph([helper.make_node("Add", ["x", "h"], ["g"])], "sum", values[:2], values[2:])
    file = tmp_path / "sum.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), file)
    start("--name", "vision", "--model", f"sum={file}")
    with nnburst.connect("vision") as service, service.session("sum") as a, service.session("sum") as b:
        first, second = (session.bind(state={"g": "h"}) for session in (a, b))
        for execution, steps in ((first, 3), (second, 1)):
            execution.inputs["x"][:] = 1
            for _ in range(steps):
                execution.run()
        assert first.get_state()["h"].tolist() == [3.0] * 4
        assert second.get_state()["h"].tolist() == [1.0] * 4


def test_unknown_model_names_those_that_there_are(vision: Served) -> None:
    unknown = pytest.raises(InvalidArgument, match=r"no model 'doubl': .*\['double', 'twice'\]")
    with nnburst.connect("vision") as service, unknown:
        service.session("doubl")


def test_closing_a_connection_leaves_the_service_to_others(vision: Served) -> None:
    with nnburst.connect("vision") as stays, stays.session("double") as session:
        for _ in range(5):
            with nnburst.connect("vision") as goes:
                goes.session("double")  # dropped as it is
        np.testing.assert_array_equal(session.run(None, {"x": X})[0], 2 * X)


def test_killed_client_disturbs_no_other(vision: Served) -> None:
    program = (
        "import nnburst, numpy as np\n"
        "s = nnburst.connect('vision').session('double')\n"
        "x = s.bind(shapes={'rows': 2})\n"
        "print('running', flush=True)\n"
        "while True: x.run()\n"
    )
    with nnburst.connect("vision") as service, service.session("double") as session:
        for _ in range(3):
            client = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=ROOT)
            assert line_of(client) == "running\n"
            client.kill()
            client.communicate(timeout=PATIENCE)
            np.testing.assert_array_equal(session.run(None, {"x": X})[0], 2 * X)


# ---- starting and ending ---------------------------------------------------------------------------------------


def test_term_tells_clients_and_leaves_nothing(start: Callable[..., Served], scaling: str, tmp_path: Path) -> None:
    served = start("--name", "vision", "--model", f"double={scaling}")
    with nnburst.connect("vision") as service, service.session("double") as session:
        session.run(None, {"x": X})
        served.process.terminate()
        assert served.ended() == 0
        with pytest.raises(DeadObject, match="the service ended: it was told to stop"):
            session.run(None, {"x": X})
    assert list((tmp_path / "run").iterdir()) == []


@pytest.fixture
def waiting(start: Callable[..., Served], tmp_path: Path) -> Served:
    """Serves a function that tells through a FIFO that it has begun, and waits until it may go on."""
    (tmp_path / "slow.py").write_text(
        "import os\n"
        "from nnburst.devices.function import Needs, Tensor, declare\n"
        f"needs = Needs(write=[{str(tmp_path / 'began')!r}], read=[{str(tmp_path / 'go_on')!r}])\n"
        "@declare(inputs=[Tensor('x', 'float32', (1,))], outputs=[Tensor('y', 'float32', (1,))], needs=needs)\n"
        "def wait(x):\n"
        f"    with open({str(tmp_path / 'began')!r}, 'w') as began: began.write('!')\n"
        f"    with open({str(tmp_path / 'go_on')!r}) as go_on: go_on.read()\n"
        "    return x + 1\n"
    )
    for name in ("began", "go_on"):
        os.mkfifo(tmp_path / name)
    return start("--name", "slow", "--device", "nnburst-function:call=slow:wait", env=finding(tmp_path))


def finding(modules: Path) -> dict[str, str]:
    """Return an environment in which a service finds modules in a directory."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(modules)))}


def test_functions_of_a_file_are_served_by_their_names(start: Callable[..., Served], tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(
        "from nnburst.devices.function import Tensor, declare\n"
        "VECTOR = dict(inputs=[Tensor('x', 'float32', ('n',))], outputs=[Tensor('y', 'float32', ('n',))])\n"
        "@declare(**VECTOR)\ndef double(x):\n    return x * 2\n"
        "@declare(**VECTOR)\ndef half(x):\n    return x / 2\n"
    )
    served = start("app.py:double", "app.py:half", "--name", "functions")
    assert served.ready["models"] == ["double", "half"]
    with nnburst.connect("functions") as service:
        for name, factor in (("double", 2), ("half", 0.5)):
            with service.session(name) as session:
                np.testing.assert_array_equal(session.run(None, {"x": X[0]})[0], X[0] * factor)


def test_term_lets_a_running_execution_finish(waiting: Served, tmp_path: Path) -> None:
    with nnburst.connect("slow") as service, service.session("wait") as session:
        run = Background(lambda: session.run(None, {"x": np.ones(1, np.float32)}))
        assert (tmp_path / "began").read_text() == "!"
        waiting.process.terminate()
        waiting.process.terminate()  # changes nothing
        (tmp_path / "go_on").write_text("go on")
        assert run.result()[0].tolist() == [2.0]
        assert waiting.ended() == 0


def test_term_ends_a_service_though_a_run_does_not_return(waiting: Served, tmp_path: Path) -> None:
    with nnburst.connect("slow") as service, service.session("wait") as session:
        run = Background(lambda: session.run(None, {"x": np.ones(1, np.float32)}))
        assert (tmp_path / "began").read_text() == "!"
        waiting.process.terminate()
        assert waiting.ended() == 0
        assert isinstance(run.result(), DeadObject)
    assert not list((tmp_path / "run").glob("slow*"))


def logged_until(served: Served, last: str) -> list[str]:
    """Return the lines of a service's log up to one with a text."""
    assert served.process.stderr is not None
    lines = [""]
    while last not in lines[-1]:
        lines.append(served.process.stderr.readline())
        assert lines[-1], "the log has ended"
    return lines


def test_hup_serves_the_new_file_and_keeps_open_sessions(
    start: Callable[..., Served], scaling: str, tmp_path: Path
) -> None:
    served = start("--name", "vision", "--model", f"scale={scaling}", "--log-level", "info")
    with nnburst.connect("vision") as service, service.session("scale") as old:
        save_scaling(Path(scaling), 3.0)
        served.process.send_signal(signal.SIGHUP)
        said = logged_until(served, "models were loaded again")
        assert sum("was loaded" in line for line in said) == 2  # the first time when it started
        with service.session("scale") as new:
            np.testing.assert_array_equal(new.run(None, {"x": X})[0], 3 * X)
        np.testing.assert_array_equal(old.run(None, {"x": X})[0], 2 * X)
        Path(scaling).write_bytes(b"no model")
        served.process.send_signal(signal.SIGHUP)
        logged_until(served, "is served as before")
        with service.session("scale") as new:
            np.testing.assert_array_equal(new.run(None, {"x": X})[0], 3 * X)


def test_hup_while_it_starts_loads_the_models_again(start: Callable[..., Served], scaling: str, tmp_path: Path) -> None:
    (tmp_path / "hung.py").write_text(
        "import os, signal\n"
        "from nnburst.devices.function import Tensor, declare\n"
        "os.kill(os.getppid(), signal.SIGHUP)\n"
        "@declare(inputs=[Tensor('x', 'float32', (1,))], outputs=[Tensor('y', 'float32', (1,))])\n"
        "def same(x):\n"
        "    return x\n"
    )
    devices = ("--device", "nnburst-function:call=hung:same", "--device", "nnburst-onnxruntime")
    options = ("--name", "vision", "--model", f"scale={scaling}", "--log-level", "info")
    served = start(*options, *devices, env=finding(tmp_path))
    logged_until(served, "models were loaded again")
    served.process.terminate()
    assert served.ended() == 0


@pytest.mark.parametrize("number", ["SIGTERM", "SIGINT"])
def test_signal_while_it_starts_ends_it_in_order(number: str, scaling: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        f"import os, signal\nos.kill(os.getppid(), signal.{number})\nfrom nnburst.devices.function import *\n"
    )
    run = tmp_path / "run"
    env = {**finding(tmp_path), "NNBURST_RUNTIME_DIR": str(run)}
    devices = ("--device", "nnburst-onnxruntime", "--device", "nnburst-function:call=mine:f")
    done = subprocess.run(
        [*COMMAND, "serve", "--name", "vision", "--model", f"scale={scaling}", *devices],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env=env,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "ready" not in done.stdout
    assert not list(run.iterdir())


def test_idle_service_ends_when_it_was_asked_to(tmp_path: Path) -> None:
    before = told_to_pass(tmp_path)
    options = ("--device", "nnburst-noop", "--idle-exit", "1000", "--log-level", "info")
    with shared_service(tmp_path, *options, before=before) as shared:

        def slept() -> str:
            return Path(f"/proc/{shared.pid}/status").read_text().partition("voluntary_ctxt_switches:")[2]

        def look() -> None:
            """Have it look up after a long time."""
            let_pass(tmp_path, 1001)
            before = slept()
            os.kill(shared.pid, signal.SIGHUP)  # which does not reap it, as Popen.send_signal() does
            until(lambda: shared.process.poll() is not None or slept() != before, "it does not look")

        with nnburst.connect(shared.address) as service:
            look()
            nnburst.connect(shared.address).close()  # not while somebody is connected
            assert service.alive
        until(lambda: (look(), shared.process.poll() is not None)[1], "it does not end")
        assert "ended: no client for 1000 s" in shared.log.read_text()
        assert shared.process.returncode in (0, -signal.SIGHUP)  # which may come when it has ended in order


def activity(pid: int) -> dict[str, list[str]]:
    """Return how often each thread of a process was given a processor, and the processor time of all."""
    found: dict[str, list[str]] = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            found[task.name] = (task / "status").read_text().splitlines()[-2:]
    return found | {"time": Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]}


@pytest.mark.parametrize(
    "seconds", [1.0, pytest.param(10.0, marks=pytest.mark.soak)], ids=["for a second", "for ten seconds"]
)
def test_idle_service_uses_no_processor(vision: Served, seconds: float) -> None:
    """No thread wakes up: there is no timer."""

    def is_idle() -> bool:
        before = activity(vision.process.pid)
        with pytest.raises(subprocess.TimeoutExpired):
            vision.process.wait(seconds)
        return activity(vision.process.pid) == before

    with nnburst.connect("vision") as service, service.session("double") as session:
        session.run(None, {"x": X})
        until(is_idle, "it does not come to rest with a client")  # what was under way ends
    until(is_idle, "it does not come to rest alone")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--name", "a/b"], "name of a service"),
        (["--model", "x"], "NAME=VALUE"),
        (["--scheduler", "fifo"], "such as fifo:20"),
        (["--scheduler", "best:2"], "the policy is 'fifo' or 'rr'"),
        (["--quota", "cats=3"], "mapped_bytes"),
        (["--quota", "models=many"], "whole number"),
        (["--quota", "connections=1"], "connections=1: give a whole number for one of models"),
        (["--quota", "models=\u00b2"], "whole number"),
        (["--quota", f"models={'9' * 5000}"], "whole number"),
        (["--allow-uid", "\u00b2"], "no such user"),
        (["--allow-gid", "9" * 5000], "no such group"),
        (["--oip", "localhost:\u00b2"], "HOST:PORT"),
        (["--socket", "/"], "is a directory"),
        (["--socket", ""], "is a directory"),
        (["--allow-uid", "nobody-like-this"], "no such user"),
        (["--allow-gid", "nobody-like-this"], "no such group"),
    ],
)
def test_wrong_option_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], message: str
) -> None:
    monkeypatch.setenv("NNBURST_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setattr(this_process, "name", this_process.name)  # the command changes it
    done = run_command("serve", *options)
    assert done.exit_code == 1
    assert message in done.output
    assert "Traceback" not in done.output
    assert not list((tmp_path / "run").glob("*"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "m=nope.onnx"], "model m of nope.onnx: "),
        (["--device", "no-such"], "no device"),
        (["nope.py:f"], "there is no file"),
        (["nope:f"], "PYTHONPATH"),
        (["--device", "nnburst-function", "nope:f"], "give all functions as FILE.py:FUNCTION"),
    ],
)
def test_service_that_cannot_start_says_so_in_one_sentence(
    start: Callable[..., Served], tmp_path: Path, options: list[str], message: str
) -> None:
    with pytest.raises(AssertionError, match=message) as raised:
        start(*options)
    assert "Traceback" not in str(raised.value)
    assert not list((tmp_path / "run").glob("*"))


def test_quota_is_named_in_the_error(start: Callable[..., Served], scaling: str) -> None:
    start("--name", "small", "--model", f"double={scaling}", "--quota", "models=1")
    with nnburst.connect("small") as service, service.session("double"):
        with pytest.raises(nnburst.ResourceExhausted, match="models"):
            service.session("double")
        with nnburst.connect("small") as other, other.session("double"):
            pass  # another connection has its own


def test_ls_shows_what_runs_and_stop_ends_it(start: Callable[..., Served]) -> None:
    assert json.loads(run_command("ls", "--json").stdout) == []
    served = start("--name", "vision")
    (row,) = json.loads(run_command("ls", "--json").stdout)
    assert (row["name"], row["pid"], row["running"]) == ("vision", served.process.pid, True)
    assert str(served.process.pid) in run_command("ls").stdout
    waiting = Background(served.ended)  # reaps it, so that `stop` sees its end
    stopped = run_command("stop", "vision")
    assert stopped.exit_code == 0, stopped.output
    assert waiting.result() == 0
    again = run_command("stop", "vision")
    assert again.exit_code == 1
    assert "nnburst serve --name vision" in again.output


def test_stop_kills_a_service_that_does_not_answer(start: Callable[..., Served]) -> None:
    served = start("--name", "hangs")
    stop(served.process.pid)
    waiting = Background(served.ended)
    told = run_command("stop", "hangs", "--timeout", "0.1")
    assert told.exit_code == 1
    assert "use --kill" in told.output
    killed = run_command("stop", "hangs", "--kill")
    assert killed.exit_code == 0, killed.output
    assert waiting.result() == -signal.SIGKILL


def test_socket_of_any_name_that_the_file_system_takes(start: Callable[..., Served]) -> None:
    served = start("--socket", os.fsdecode(b"\xff\n.sock"))
    assert served.ready["name"] == "unix:\udcff\n.sock"


# ---- service managers ------------------------------------------------------------------------------------------


def test_service_manager_is_told_and_its_socket_is_used(start: Callable[..., Served], tmp_path: Path) -> None:
    path = tmp_path / "activated.sock"
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager,
    ):
        listener.bind(str(path))
        listener.listen()
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(PATIENCE)
        manager.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        # The socket becomes descriptor 3 of the process whose number LISTEN_PID has, as a service manager does it.
        launcher = (
            "import os, sys\n"
            f"os.dup2({listener.fileno()}, 3)\n"
            "os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS='1')\n"
            "os.execv(sys.executable, [sys.executable, '-c', 'from nnburst.cli import main; main()', *sys.argv[1:]])\n"
        )
        env = {**os.environ, "PYTHONPATH": str(ROOT), "NOTIFY_SOCKET": str(tmp_path / "notify")}
        process = subprocess.Popen(
            [sys.executable, "-c", launcher, "serve", "--json"],
            stdout=subprocess.PIPE,
            text=True,
            env=env,
            pass_fds=[listener.fileno()],
        )
        try:
            ready = json.loads(line_of(process))
            assert (ready["pid"], ready["socket"]) == (process.pid, str(path))
            said, ((_, _, credentials),), _, _ = manager.recvmsg(100, 100)
            assert said == b"READY=1"
            sender = int.from_bytes(credentials[:4], sys.byteorder)
            assert sender == process.pid  # as a unit with NotifyAccess=main needs it
            with nnburst.connect(f"unix:{path}"):
                refused = run_command("stop", f"unix:{path}")  # would otherwise end what made the socket: this test
                assert refused.exit_code == 1
                assert "service manager" in refused.output
            process.terminate()
            assert process.wait(PATIENCE) == 0
            assert path.exists()  # its socket is the manager's
        finally:
            process.kill()
            process.communicate(timeout=PATIENCE)


# ---- who is served ---------------------------------------------------------------------------------------------


@pytest.fixture
def public() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="nnburst-test-", dir="/tmp"))
    directory.chmod(0o755)
    yield directory
    shutil.rmtree(directory)


def ask(address: str) -> str:
    with nnburst.connect(address) as service, service.session("double") as session:
        return str(session.run(None, {"x": X})[0].sum())


@as_root
@pytest.mark.parametrize("option", ["--allow-uid", "--allow-gid"])
def test_other_user_is_served_where_allowed(
    start: Callable[..., Served], scaling: str, public: Path, option: str
) -> None:
    path = f"{public}/vision.sock"
    start("--socket", path, "--model", f"double={scaling}", option, str(GUEST))
    assert ask(f"unix:{path}") == "56.0"  # everything is imported before the child gives up its rights
    assert as_user(GUEST, lambda: ask(f"unix:{path}")) == "56.0"


@as_root
def test_other_user_is_refused_with_the_option_that_would_help(start: Callable[..., Served], public: Path) -> None:
    path = f"{public}/vision.sock"
    start("--socket", path)
    nnburst.connect(f"unix:{path}").close()
    assert "--allow-uid 65534" in as_user(GUEST, lambda: ask(f"unix:{path}"))
    Path(path).chmod(0o666)  # the file system lets him in: the service itself does not
    said = as_user(GUEST, lambda: ask(f"unix:{path}"))
    assert said.startswith("DeviceUnavailable")
    assert "does not serve user 65534" in said


@as_root
def test_refused_peers_that_say_nothing_keep_nobody_out(start: Callable[..., Served], public: Path) -> None:
    path = f"{public}/vision.sock"
    start("--socket", path)
    nnburst.connect(f"unix:{path}").close()
    Path(path).chmod(0o666)

    def crowd() -> str:
        silent = [dial(f"unix:{path}", PATIENCE) for _ in range(100)]
        return str(len(silent))

    assert as_user(GUEST, crowd) == "100"
    nnburst.connect(f"unix:{path}").close()


def test_quota_of_a_user_counts_all_connections(start: Callable[..., Served], scaling: str) -> None:
    options = ("--quota", "user.models=1", "--quota", "user.connections=2")
    start("--name", "small", "--model", f"double={scaling}", *options)
    with nnburst.connect("small") as first, first.session("double"), nnburst.connect("small") as second:
        with pytest.raises(nnburst.ResourceExhausted, match=r"user \d+ may have 1 models.*--quota user.models=N"):
            second.session("double")
        with pytest.raises((nnburst.ResourceExhausted, DeviceUnavailable), match="connections"):
            nnburst.connect("small")
    with nnburst.connect("small") as third, third.session("double"):
        pass  # what was closed counts no more
