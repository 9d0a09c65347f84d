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

from support import ROOT
from support.waiting import PATIENCE, until

CLIENT = """
import collections, json, sys, threading, time
import numpy as np
import nnburst
from nnburst.model import ModelBuilder, OperandType

shared, rest = sys.argv[1] == "shared", float(sys.argv[2])
TIMEOUT = 1.0  # of a call
b = ModelBuilder()
x = b.input("x", OperandType.TENSOR_FLOAT32, (64,))
b.output("y", x + x)
model = b.build()
stop = threading.Event()

class Report:
    # What came of the calls so far: a line when that changes in kind, and now and then, so that a kill loses little.
    def __init__(self):
        self.lock = threading.Lock()
        self.outcomes, self.worst, self.last, self.told = collections.Counter(), 0.0, None, 0.0

    def note(self, outcome, seconds=0.0, pid=0):
        with self.lock:
            self.outcomes[outcome] += 1
            self.worst = max(self.worst, seconds)
            if (outcome, pid) != self.last or time.monotonic() - self.told > 0.1:
                self.last, self.told = (outcome, pid), time.monotonic()
                print(json.dumps({"outcomes": self.outcomes, "worst": self.worst, "right_from": pid}), flush=True)

report = Report()

def open_session():
    while not stop.is_set():
        try:
            home = nnburst.connect("storm") if shared else nnburst.launch(devices=["nnburst-reference"])
        except nnburst.NNBurstError as error:
            report.note(type(error).__name__)
            stop.wait(0.02)
            continue
        try:
            return home, home.session(model, on_death="restart", timeout=TIMEOUT, open_timeout=20)
        except nnburst.NNBurstError as error:
            report.note(type(error).__name__)
            home.close()
    return None, None

def call(session, run):
    begin, pid = time.monotonic(), session.service.pid
    try:
        outcome = "right" if run() else "WRONG"
    except nnburst.NNBurstError as error:
        outcome = type(error).__name__
    except BaseException as error:
        outcome = f"UNTYPED {error!r}"
    answered = outcome == "right" and pid == session.service.pid
    report.note(outcome, time.monotonic() - begin, pid if answered else 0)
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
service, session = open_session()
if session is not None:
    threads = [threading.Thread(target=copying, args=(session, i)) for i in range(2)]
    threads.append(threading.Thread(target=bound, args=(session,)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    session.close()
    service.close()
report.note("left")
"""
LIMIT = 1.0 + PATIENCE
"""Seconds that a call may take: its deadline, and a watchdog's patience."""


class Participant:
    """A client program, and what it has said so far. What a killed one has said counts, too.

    Args:
        kind: ``shared``, or ``own`` for a service of its own.
        rest: Seconds that each of its threads rests between calls.
    """

    def __init__(self, kind: str, rest: float) -> None:
        self.kind = kind
        self.outcomes: Counter[str] = Counter()
        self.worst = 0.0
        self.answered: list[int] = []
        """Processes of the services that have answered rightly, in order; without those that were killed."""
        self.known: set[int] = set()
        self.lately = 0
        """The process of the service that has answered rightly last."""
        self.process = subprocess.Popen(
            [sys.executable, "-c", CLIENT, kind, str(rest)],
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
            self.outcomes, self.worst = Counter(said["outcomes"]), said["worst"]
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
    return subprocess.Popen(
        [*command, "--device", "nnburst-reference", "--log-level", "error"],
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
    """A shared service, clients of it, a client with a service of its own, and who was killed of them."""

    def __init__(self, sharing: int, rest: float) -> None:
        self.rest = rest
        self.service = serve()
        self.clients = [Participant(kind, rest) for kind in (*["shared"] * sharing, "own")]
        self.gone: list[Participant] = []
        self.killed = {"client": 0, "child": 0, "shared": 0}
        self.rng = random.Random(12)

    def strike(self) -> None:
        """Kill one of them, if it has come far enough since the last time."""
        *sharing, owner = self.clients
        spared = [kind for kind, times in self.killed.items() if not times]
        victim = self.rng.choice(spared or ["shared", "child", "client", "client"])
        if victim == "shared" and any(self.service.pid in client.answered for client in sharing):
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
                self.clients[i] = Participant(client.kind, self.rest)
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
        mark = f"NNBURST_RUNTIME_DIR={directory}"
        monkeypatch.setenv("NNBURST_RUNTIME_DIR", directory)
        storm = Storm(sharing, rest)
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
            assert client.worst < LIMIT, client.outcomes
        assert all(client.outcomes["right"] and client.outcomes["left"] for client in storm.clients)
        until(lambda: not processes_with(mark), "processes are left")
        service = serve(subprocess.PIPE)  # takes over what a killed one has left, and clears it away
        assert service.stdout is not None
        ready = service.stdout.readline()
        service.terminate()
        service.communicate(timeout=PATIENCE)
        assert ready
        assert service.returncode == 0
        assert list(Path(directory).iterdir()) == []
