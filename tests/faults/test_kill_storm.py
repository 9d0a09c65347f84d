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
from pathlib import Path
from typing import Any

import pytest
from fault_support import ROOT, WATCHDOG

CLIENT = """
import collections, json, sys, threading, time
import numpy as np
import nnburst
from nnburst.model import ModelBuilder, OperandType, OperationType

shared = sys.argv[1] == "shared"
TIMEOUT, SLACK = 1.0, 15.0  # of a call; the slack is a watchdog's
b = ModelBuilder()
x = b.input("x", OperandType.TENSOR_FLOAT32, (64,))
b.output("y", b.binary(OperationType.ADD, x, x))
model = b.build()
outcomes, worst, stop = collections.Counter(), [0.0], threading.Event()

def open_session():
    while not stop.is_set():
        try:
            home = nnburst.connect("storm") if shared else nnburst.launch(devices=["nnburst-reference"])
        except nnburst.NNBurstError as error:
            outcomes[type(error).__name__] += 1
            continue
        try:
            return home, home.session(model, on_death="restart", timeout=TIMEOUT, open_timeout=20)
        except nnburst.NNBurstError as error:
            outcomes[type(error).__name__] += 1
            home.close()
    return None, None

def call(run):
    begin = time.monotonic()
    try:
        outcome = "right" if run() else "WRONG"
    except nnburst.NNBurstError as error:
        outcome = type(error).__name__
    except BaseException as error:
        outcome = f"UNTYPED {error!r}"
    outcomes[outcome] += 1
    worst[0] = max(worst[0], time.monotonic() - begin)
    return outcome == "right"

def copying(session, i):
    n = 0
    while not stop.is_set():
        n += 1
        value = np.full(64, i * 1000 + n % 1000, np.float32)
        call(lambda: (session.run(None, {"x": value})[0] == 2 * value).all())

def bound(session):
    execution, n, told = session.bind(), 0, -1
    while not stop.is_set():
        n += 1
        execution.inputs["x"][:] = n % 1000
        def run():
            execution.run()
            return (execution.outputs["y"] == 2 * (n % 1000)).all()
        if call(run) and told != len(session.restarts):
            told = len(session.restarts)
            print(session.service.pid, flush=True)
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
print(json.dumps({"outcomes": outcomes, "worst": worst[0], "limit": TIMEOUT + SLACK}), flush=True)
"""


class Participant:
    """A client program. It tells the process of its service whenever that has answered rightly for the first time."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.told: list[int] = []
        self.last = ""
        self.process = subprocess.Popen(
            [sys.executable, "-c", CLIENT, kind], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
        )
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.last = line
            if line.strip().isdigit():
                self.told.append(int(line))

    def end(self) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(2 * WATCHDOG)
        finally:
            self.process.kill()
            self.process.wait()
            self.reader.join()
            assert self.process.stdout is not None
            self.process.stdout.close()

    def summary(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.last)
        return found


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


@pytest.mark.parametrize(
    ("seconds", "pause"), [(10.0, 0.25), pytest.param(300.0, 0.05, marks=pytest.mark.soak)], ids=["short", "long"]
)
def test_storm_of_kills_leaves_right_results_typed_errors_and_nothing_else(
    seconds: float, pause: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(12)
    killed = {"client": 0, "child": 0, "shared": 0}
    with tempfile.TemporaryDirectory(prefix="nnburst-") as directory:
        mark = f"NNBURST_RUNTIME_DIR={directory}"
        monkeypatch.setenv("NNBURST_RUNTIME_DIR", directory)
        service = serve()
        clients = [Participant(kind) for kind in ("shared", "shared", "own")]
        summaries: list[dict[str, Any]] = []
        try:
            first = time.monotonic() + 2 * WATCHDOG
            while not all(client.told for client in clients) and time.monotonic() < first:
                time.sleep(0.01)
            assert all(client.told for client in clients)
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                time.sleep(pause)
                victim = rng.randrange(4)
                if victim == 0 and any(service.pid in client.told for client in clients):
                    service.kill()
                    service.wait()
                    service = serve()
                    killed["shared"] += 1
                elif victim == 1 and clients[2].told:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(clients[2].told.pop(), signal.SIGKILL)
                        killed["child"] += 1
                elif victim > 1:
                    i = rng.randrange(len(clients))
                    if len(clients[i].told) > (0 if clients[i].kind == "own" else 1) or rng.random() < 0.1:
                        clients[i].process.kill()
                        clients[i].end()
                        clients[i] = Participant(clients[i].kind)
                        killed["client"] += 1
                assert all(client.process.poll() is None for client in clients), "a client ended by itself"
                assert service.poll() is None, "the service ended by itself"
            with contextlib.ExitStack() as ending:  # each, though another one fails
                ending.callback(service.send_signal, signal.SIGTERM)
                for client in clients:
                    ending.callback(client.end)
            service.wait(WATCHDOG)
        finally:
            for process in (service, *(client.process for client in clients)):
                process.kill()
                process.wait()
        summaries = [client.summary() for client in clients]
        for summary in summaries:
            odd = [outcome for outcome in summary["outcomes"] if outcome.startswith(("WRONG", "UNTYPED"))]
            assert not odd, summary
            assert summary["worst"] < summary["limit"], summary
        assert sum(summary["outcomes"].get("right", 0) for summary in summaries) > 0
        assert min(killed.values()) > 0, killed
        deadline = time.monotonic() + WATCHDOG
        while (left := processes_with(mark)) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not left
        service = serve(subprocess.PIPE)  # takes over what a killed one has left, and clears it away
        assert service.stdout is not None
        ready = service.stdout.readline()
        service.terminate()
        service.communicate(timeout=WATCHDOG)
        assert ready
        assert service.returncode == 0
        assert list(Path(directory).iterdir()) == []
