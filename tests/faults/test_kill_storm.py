"""Participants are killed at random under load: every call returns a right result or a typed error, nothing is left."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("onnxruntime")

from support.onnx_models import FLOAT, graph, node, save
from support.processes import start_python, workers_of
from support.services import Shared
from support.waiting import PATIENCE, until

pytestmark = pytest.mark.check

DEVICES = ["nnburst-reference", "nnburst-onnxruntime"]
CLIENT = """
import collections, json, sys, threading
import numpy as np
import nnburst
from nnburst import ModelBuilder, OperandType
from nnburst.service.process.discovery import owner_of

address, rest, path, devices = sys.argv[1], float(sys.argv[2]), sys.argv[3], sys.argv[4:]
b = ModelBuilder()
x = b.input("x", OperandType.TENSOR_FLOAT32, (64,))
b.output("y", x + x)
model = b.build()
with open(path, "rb") as file:
    onnx = file.read()  # the same in ONNX
stop, lock = threading.Event(), threading.Lock()
outcomes, answered_by = collections.Counter(), 0

def note(outcome, pid=0):
    global answered_by
    with lock:
        outcomes[outcome] += 1
        answered_by = pid or answered_by

def tell():
    global answered_by
    with lock:
        print(json.dumps([outcomes, answered_by]), flush=True)
        answered_by = 0

def open_sessions():
    while not stop.wait(0.02):
        try:
            home = nnburst.connect(address) if address else nnburst.launch(devices=devices)
        except nnburst.NNBurstError as error:
            note(type(error).__name__)
            continue
        try:
            return home, [home.session(m, on_death="restart", timeout=1.0) for m in (model, onnx)]
        except nnburst.NNBurstError as error:
            note(type(error).__name__)
            home.close()
    sys.exit()

def serving(session):
    return owner_of(address) if address else session.service.pid

def call(session, run):
    pid = serving(session)
    try:
        outcome = "right" if run() else "WRONG"
    except nnburst.NNBurstError as error:
        outcome = type(error).__name__
    except BaseException as error:
        outcome = f"UNTYPED {error!r}"
    note(outcome, pid if outcome == "right" and pid == serving(session) else 0)
    stop.wait(rest)

def copying(session, i):
    n = 0
    while not stop.is_set():
        n += 1
        value = np.full(64, i * 1000 + n % 1000, np.float32)
        call(session, lambda: (session.run(None, {"x": value})[0] == 2 * value).all())

def bound(session, _):
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
threads = [
    threading.Thread(target=runs, args=(session, i)) for i, session in enumerate(sessions) for runs in (copying, bound)
]
for thread in threads:
    thread.start()
while not stop.wait(0.05):
    tell()
for thread in threads:
    thread.join()
for session in sessions:
    session.close()
service.close()
note("left")
tell()
"""


class Participant:
    """A client program, and what it has said so far. What a killed one has said counts, too.

    Args:
        arguments: The service's address, none for a service of its own; seconds that each of its threads rests between
            calls; a file of ONNX, which it runs beside its own model; devices.
    """

    def __init__(self, *arguments: str) -> None:
        self.arguments = arguments
        self.outcomes: Counter[str] = Counter()
        self.answered_by = 0
        """The process of the service that has answered rightly last."""
        self.process = start_python(CLIENT, *arguments)
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.endswith("\n"):  # else cut by a kill
                outcomes, pid = json.loads(line)
                self.outcomes = Counter(outcomes)
                self.answered_by = pid or self.answered_by

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


def processes_with(mark: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if mark.encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
    return found


def lives(pid: int) -> bool:
    return pid != 0 and Path(f"/proc/{pid}").exists()


class Storm:
    """A shared service with its workers, its clients, a client with a service of its own, and who was killed."""

    def __init__(self, directory: Path, sharing: int, rest: float, model: str) -> None:
        self.directory = directory
        self.service = self.serve()
        given = self.service.address, str(rest), model
        self.clients = [Participant(*given) for _ in range(sharing)] + [Participant("", *given[1:], *DEVICES)]
        self.gone: list[Participant] = []
        self.killed = {"client": 0, "child": 0, "shared": 0, "worker": 0}
        self.rng = random.Random(12)

    def serve(self) -> Shared:
        return Shared(self.directory, *(f"--device={device}" for device in DEVICES))

    def strike(self) -> None:
        """Kill one of them, if it has come far enough since the last time."""
        *sharing, owner = self.clients
        spared = [kind for kind, times in self.killed.items() if not times]
        victim = self.rng.choice(spared or ["shared", "worker", "worker", "child", "client", "client"])
        served = any(client.answered_by == self.service.pid for client in sharing)
        if victim == "worker" and served:
            with contextlib.suppress(ProcessLookupError, IndexError):
                os.kill(self.rng.choice(sorted(workers_of(self.service.pid))), signal.SIGKILL)
                self.killed["worker"] += 1
        elif victim == "shared" and served:
            self.service.process.kill()
            self.service.process.wait()
            self.service.end()
            self.service = self.serve()
            self.killed["shared"] += 1
        elif victim == "child" and lives(owner.answered_by):
            with contextlib.suppress(ProcessLookupError):
                os.kill(owner.answered_by, signal.SIGKILL)
                self.killed["child"] += 1
        elif victim == "client":
            i = self.rng.randrange(len(self.clients))
            client = self.clients[i]
            if client.answered_by and self.rng.random() < 0.5:
                client.process.kill()
                client.end()
                self.gone.append(client)
                self.clients[i] = Participant(*client.arguments)
                self.killed["client"] += 1
        assert all(client.process.poll() is None for client in self.clients), "a client ended by itself"
        assert self.service.process.poll() is None, "the service ended by itself"

    def calm(self) -> None:
        """Wait until each client is served again: by the service that there is now, or by a child that lives."""
        *sharing, owner = self.clients
        for client in self.clients:
            client.answered_by = 0
        for client in sharing:
            until(lambda client=client: client.answered_by == self.service.pid, "a client was not served again")  # type: ignore[misc]
        until(lambda: lives(owner.answered_by), "a client was not served again")

    def end(self) -> None:
        """End all in order, each though another one fails."""
        with contextlib.ExitStack() as ending:
            ending.callback(self.service.end)
            for client in self.clients:
                ending.callback(client.end)


@pytest.mark.parametrize(
    ("seconds", "pause", "sharing", "rest"),
    [(0.0, 0.1, 1, 0.005), pytest.param(300.0, 0.05, 3, 0.0, marks=[pytest.mark.soak, pytest.mark.timeout(0)])],
    ids=["short", "long"],
)
def test_storm_of_kills_leaves_right_results_typed_errors_and_nothing_else(
    seconds: float, pause: float, sharing: int, rest: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory(prefix="nnburst-") as place:
        directory = Path(place)
        monkeypatch.setenv("STORM", place)
        monkeypatch.setenv("NNBURST_RUNTIME_DIR", place)
        value = "x", FLOAT, (64,)
        model = save(graph([node("Add", ["x", "x"], ["y"])], [value], [("y", *value[1:])]), directory / "twice.onnx")
        storm = Storm(directory, sharing, rest, str(model))
        try:
            begin = time.monotonic()
            while time.monotonic() < begin + seconds or min(storm.killed.values()) == 0:
                assert time.monotonic() < begin + seconds + 4 * PATIENCE, storm.killed
                time.sleep(pause)
                storm.strike()
            storm.calm()
        finally:
            storm.end()
        everyone = [*storm.gone, *storm.clients]
        print(storm.killed, sum((client.outcomes for client in everyone), Counter()))
        for client in everyone:
            assert not [said for said in client.outcomes if said.startswith(("WRONG", "UNTYPED"))], client.outcomes
        assert all(client.outcomes["right"] and client.outcomes["left"] for client in storm.clients)
        until(lambda: not processes_with(f"STORM={place}"), "processes are left")
        storm.serve().end()  # takes over what a killed one has left, and clears it away
        assert {path.name for path in directory.iterdir()} == {"twice.onnx", "shared.log", "state"}
