"""Programs that have Python in them and are no interpreter, and programs whose threads are greenlets."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

import nnburst
from nnburst._core import threads
from nnburst.cli import main
from nnburst.errors import BadState, DeviceUnavailable
from nnburst.service.process.command import safe_command

PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The value of `sys.executable`: a program that leaves a file beside itself when it is started."""
    made = tmp_path / "python-application"
    made.write_text('#!/bin/sh\n>"$0.started"\nexit 1\n')
    made.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(made))
    return made


def was_started(program: Path) -> bool:
    return program.with_name(f"{program.name}.started").exists()


@pytest.mark.parametrize("executable", [None, "", "/bin/sh", "/nowhere/python3"])
def test_interpreter_of_a_program_that_is_none_is_the_one_of_its_prefix(
    monkeypatch: pytest.MonkeyPatch, executable: str | None
) -> None:
    monkeypatch.setattr(sys, "executable", executable)
    assert safe_command("module")[0] == f"{sys.prefix}/bin/{PYTHON}"


def test_interpreter_under_another_name_is_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "tool").symlink_to(os.path.realpath(sys.executable))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "tool"))
    assert safe_command("module")[0] == str(tmp_path / "tool")


def test_program_without_an_interpreter_is_told_what_works(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", "/usr/sbin/uwsgi")
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    with pytest.raises(DeviceUnavailable, match=r"'/usr/sbin/uwsgi'.*connect\(\).*in_process\(\).*--py-executable"):
        nnburst.launch()


def test_frozen_program_is_told_what_works_and_never_starts_itself(
    program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    with pytest.raises(DeviceUnavailable, match=r"connect\(\).*in_process\(\)"):
        nnburst.launch(devices=["nnburst-noop"])
    with nnburst.in_process(devices=["nnburst-noop"]) as service:
        assert service.alive
    assert not was_started(program)


def test_frozen_program_does_not_become_a_service_by_starting_itself(
    program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executed: list[object] = []
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    monkeypatch.setattr(os, "execve", lambda *command: executed.append(command))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    done = CliRunner().invoke(main, ["serve", "--name", "frozen"])
    assert (done.exit_code, executed) == (1, [])
    assert "DeviceUnavailable" in done.output


def replaced(library: str, function: Callable[..., object]) -> Callable[..., object]:
    def replacement(*arguments: object) -> object:
        return function(*arguments)

    replacement.__module__ = f"{library}.module"
    return replacement


@pytest.mark.parametrize("library", ["gevent", "eventlet"])
@pytest.mark.parametrize(
    "name", ["threading.get_ident", "queue.SimpleQueue", "select.select", "os.fork", "subprocess.Popen"]
)
def test_module_that_greenlets_have_taken_is_named_before_a_thread_starts(
    monkeypatch: pytest.MonkeyPatch, library: str, name: str
) -> None:
    module, _, function = name.partition(".")
    monkeypatch.setattr(sys.modules[module], function, replaced(library, getattr(sys.modules[module], function)))
    with pytest.raises(BadState, match=f"a call needs a thread, and {library} has patched {module}: .*gthread"):
        threads.start_daemon(pytest.fail, name="never", what="a call")


def test_function_that_another_library_has_replaced_is_no_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fork", replaced("debugger", os.fork))
    threads.start_daemon(lambda: None, name="plain", what="a call").join()


GREENLETS = """
from gevent import monkey; monkey.{patch}()
import numpy, nnburst
builder = nnburst.ModelBuilder()
builder.output("y", builder.relu(builder.input("x", nnburst.OperandType.TENSOR_FLOAT32, (1, 4))))
model = builder.build()
for open_service in (nnburst.launch, nnburst.in_process):
    try:
        with open_service(devices=["nnburst-noop"]) as service, service.session(model) as session:
            session.run(None, {{"x": numpy.ones((1, 4), "f")}})
            print("runs")
    except nnburst.BadState as error:
        print(error)
"""


@pytest.mark.skipif(importlib.util.find_spec("gevent") is None, reason="gevent is not installed")
@pytest.mark.parametrize(("patch", "said"), [("patch_all", "gevent has patched threading"), ("patch_socket", "runs")])
def test_program_of_gevent(patch: str, said: str) -> None:
    code = GREENLETS.format(patch=patch)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    lines = done.stdout.splitlines()
    assert len(lines) == 2, done.stderr
    assert all(said in line for line in lines)
