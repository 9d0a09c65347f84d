"""Programs that have Python in them and are no interpreter, and programs whose threads are greenlets."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import nnburst
from nnburst.cli import main
from nnburst.errors import DeviceUnavailable
from nnburst.service import safe_command

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
