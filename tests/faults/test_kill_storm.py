"""Participants are killed at random under load: every call returns a right result or a typed error, nothing is left."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("onnxruntime")

from support import ROOT
from support.onnx_models import FLOAT, graph, node, save
from support.processes import workers_of
from support.users import GUEST
from support.waiting import PATIENCE, until

pytestmark = pytest.mark.check

CLIENT = """
import collections, contextlib, importlib, json, os, pkgutil, sys, threading, time
import numpy.random
import numpy as np
import nnburst
from nnburst.model import ModelBuilder, OperandType
from nnburst.service import owner_of

shared, rest, path, uid = sys.argv[1] == "shared", float(sys.argv[2]), sys.argv[3], int(sys.argv[4])
DEVICES = ["nnburst-reference", "nnburst-onnxruntime"]
if uid != os.geteuid():  # another user may not read what is imported later
    for module in pkgutil.walk_packages(nnburst.__path__, "nnburst."):
        with contextlib.suppress(ImportError, nnburst.NNBurstError):
            importlib.import_module(module.name.removesuffix(".__main__"))
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
TIMEOUT = 1.0  # of a call
b = ModelBuilder()
x = b.input("x", OperandType.TENSOR_FLOAT32, (64,))
b.output("y", x + x)
model = b.build()
with open(path, "rb") as file:
    onnx = file.read()  # the same in ONNX
stop = threading.Event()

class Report:
    # What came of the calls so far: a line when that changes in kind, and now and then, so that a kill loses little.
    def __init__(self):
        self.lock = threading.Lock()
        self.outcomes, self.last, self.told = collections.Counter(), None, 0.0

    def note(self, outcome, pid=0):
        with self.lock:
            self.outcomes[outcome] += 1
            if (outcome, pid) != self.last or time.monotonic() - self.told > 0.1:
                self.last, self.told = (outcome, pid), time.monotonic()
                print(json.dumps({"outcomes": self.outcomes, "right_from": pid}), flush=True)

report = Report()

def open_sessions():
    while not stop.is_set():
        try:
            home = nnburst.connect("storm") if shared else nnburst.launch(devices=DEVICES)
        except nnburst.NNBurstError as error:
            report.note(type(error).__name__)
            stop.wait(0.02)
            continue
        try:
            return home, [home.session(m, on_death="restart", timeout=TIMEOUT) for m in (model, onnx)]
        except nnburst.NNBurstError as error:
            report.note(type(error).__name__)
            home.close()
    return None, ()

def serving(session):
    return owner_of("storm") if shared else session.service.pid

def call(session, run):
    pid = serving(session)
    try:
        outcome = "right" if run() else "WRONG"
    except nnburst.NNBurstError as error:
        outcome = type(error).__name__
    except BaseException as error:
        outcome = f"UNTYPED {error!r}"
    answered = outcome == "right" and pid == serving(session)
    report.note(outcome, pid if answered else 0)
    stop.wait(rest)

def copying(session, i):
    n = 0
    while not stop.is_set():
        n += 1
        value = np.full(64, i * 1000 + n % 1000, np.float32)
        call(session, lambda: (session.run(None, {"x": value})[0] == 2 * value).all())

def bound(session):
    execution, n = session.bind(), 0
    while not stop.is_set():
        n += 1
        execution.inputs["x"][:] = n % 1000
        def run():
            execution.run()
            return (execution.outputs["y"] == 2 * (n % 1000)).all()
        call(session, run)
    execution.close()

def until_told():
    sys.stdin.read()
    stop.set()

threading.Thread(target=until_told, daemon=True).start()
service, sessions = open_sessions()
if service is not None:
    threads = [threading.Thread(target=copying, args=(session, i)) for i, session in enumerate(sessions, 1)]
    threads += [threading.Thread(target=bound, args=(session,)) for session in sessions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for session in sessions:
        session.close()
    service.close()
report.note("left")
"""


class Participant:
    """A client program, and what it has said so far. What a killed one has said counts, too.

    Args:
        kind: ``shared``, or ``own`` for a service of its own.
        rest: Seconds that each of its threads rests between calls.
        model: A file of ONNX; the program runs that and its own model.
        uid: The user that the program becomes.
    """

    def __init__(self, kind: str, rest: float, model: str, uid: int) -> None:
        self.kind, self.uid = kind, uid
        self.outcomes: Counter[str] = Counter()
        self.answered: list[int] = []
        """Processes of the services that have answered rightly, in order; without those that were killed."""
        self.known: set[int] = set()
        self.lately = 0
        """The process of the service that has answered rightly last."""
        self.process = subprocess.Popen(
            [sys.executable, "-c", CLIENT, kind, str(rest), model, str(uid)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if not line.endswith("\n"):  # cut by a kill
                return
            said = json.loads(line)
            self.outcomes = Counter(said["outcomes"])
            if said["right_from"]:
                if said["right_from"] not in self.known:  # also a late word of one that was killed meanwhile
                    self.known.add(said["right_from"])
                    self.answered.append(said["right_from"])
                self.lately = said["right_from"]

    def end(self) -> None:
        """Have it end in order, unless it was killed."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(2 * PATIENCE)
        finally:
            self.process.kill()
            self.process.wait()
            self.reader.join()
            assert self.process.stdout is not None
            self.process.stdout.close()


def serve(output: int = subprocess.DEVNULL) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", "from nnburst.cli import main; main()", "serve", "--name", "storm"]
    options = [f"--device={device}" for device in ("nnburst-reference", "nnburst-onnxruntime")]
    return subprocess.Popen(
        [*command, *options, f"--allow-uid={GUEST}", "--log-level", "error"],
        stdout=output,
        text=True,
        cwd=ROOT,
    )


def processes_with(mark: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if mark.encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
    return found


class Storm:
    """A shared service with its workers, its clients, a client with a service of its own, and who was killed.

    Where it may, one of the clients is another user's, and has a worker of its own.
    """

    def __init__(self, sharing: int, rest: float, model: str) -> None:
        self.rest, self.model = rest, model
        self.service = serve()
        own = os.geteuid()
        users = [*[own] * sharing, *[GUEST] * (own == 0)]
        self.clients = [Participant("shared", rest, model, uid) for uid in users]
        self.clients.append(Participant("own", rest, model, own))
        self.gone: list[Participant] = []
        self.killed = {"client": 0, "child": 0, "shared": 0, "worker": 0}
        self.rng = random.Random(12)

    def strike(self) -> None:
        """Kill one of them, if it has come far enough since the last time."""
        *sharing, owner = self.clients
        spared = [kind for kind, times in self.killed.items() if not times]
        victim = self.rng.choice(spared or ["shared", "worker", "worker", "child", "client", "client"])
        served = any(self.service.pid in client.answered for client in sharing)
        if victim == "worker" and served:
            with contextlib.suppress(ProcessLookupError, IndexError):
                os.kill(self.rng.choice(sorted(workers_of(self.service.pid))), signal.SIGKILL)
                self.killed["worker"] += 1
        elif victim == "shared" and served:
            self.service.kill()
            self.service.wait()
            self.service = serve()
            self.killed["shared"] += 1
        elif victim == "child" and owner.answered:
            with contextlib.suppress(ProcessLookupError):
                os.kill(owner.answered.pop(), signal.SIGKILL)
                self.killed["child"] += 1
        elif victim == "client":
            i = self.rng.randrange(len(self.clients))
            client = self.clients[i]
            if client.answered and (len(client.answered) > 1 or self.rng.random() < 0.3):
                client.process.kill()
                client.end()
                self.gone.append(client)
                self.clients[i] = Participant(client.kind, self.rest, self.model, client.uid)
                self.killed["client"] += 1
        assert all(client.process.poll() is None for client in self.clients), "a client ended by itself"
        assert self.service.poll() is None, "the service ended by itself"

    def calm(self) -> None:
        """Wait until each client is served again: by the service that there is now, or by a child that lives."""
        *sharing, owner = self.clients
        for client in sharing:
            until(lambda client=client: client.lately == self.service.pid, "a client was not served again")  # type: ignore[misc]
        for client in self.clients:
            client.lately = 0
        for client in self.clients:
            until(lambda client=client: client.lately > 0, "a client was not served again")  # type: ignore[misc]
        os.kill(owner.lately, 0)

    def end(self) -> None:
        """End all in order, each though another one fails."""
        try:
            with contextlib.ExitStack() as ending:
                ending.callback(self.service.send_signal, signal.SIGTERM)
                for client in self.clients:
                    ending.callback(client.end)
            self.service.wait(PATIENCE)
        finally:
            self.kill()

    def kill(self) -> None:
        """Leave none behind."""
        for process in (self.service, *(client.process for client in self.clients)):
            process.kill()
            process.wait()
        for client in self.clients:
            client.end()


@pytest.mark.parametrize(
    ("seconds", "pause", "sharing", "rest"),
    [(0.0, 0.1, 1, 0.005), pytest.param(300.0, 0.05, 2, 0.0, marks=[pytest.mark.soak, pytest.mark.timeout(0)])],
    ids=["short", "long"],
)
def test_storm_of_kills_leaves_right_results_typed_errors_and_nothing_else(
    seconds: float, pause: float, sharing: int, rest: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory(prefix="nnburst-") as directory:
        mark = f"STORM={directory}"
        monkeypatch.setenv("STORM", directory)
        monkeypatch.setenv("NNBURST_RUNTIME_DIR", directory)
        os.chmod(directory, 0o711)
        model = Path(directory, "twice.onnx")
        value = "x", FLOAT, (64,)
        save(graph([node("Add", ["x", "x"], ["y"])], [value], [("y", *value[1:])]), model)
        storm = Storm(sharing, rest, str(model))
        try:
            begin = time.monotonic()
            while time.monotonic() < begin + seconds or min(storm.killed.values()) == 0:
                assert time.monotonic() < begin + seconds + 4 * PATIENCE, storm.killed
                time.sleep(pause)
                storm.strike()
            storm.calm()
            storm.end()
        finally:
            storm.kill()
        everyone = [*storm.gone, *storm.clients]
        print(storm.killed, sum((client.outcomes for client in everyone), Counter()))
        for client in everyone:
            assert not [said for said in client.outcomes if said.startswith(("WRONG", "UNTYPED"))], client.outcomes
        assert all(client.outcomes["right"] and client.outcomes["left"] for client in storm.clients)
        until(lambda: not processes_with(mark), "processes are left")
        service = serve(subprocess.PIPE)  # takes over what a killed one has left, and clears it away
        assert service.stdout is not None
        ready = service.stdout.readline()
        service.terminate()
        service.communicate(timeout=PATIENCE)
        assert ready
        assert service.returncode == 0
        assert list(Path(directory).iterdir()) == [model]
