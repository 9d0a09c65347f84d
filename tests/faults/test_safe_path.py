"""A directory full of files named like modules: nothing in it runs, whatever the way to start a program there."""

from __future__ import annotations

import ast
import json
import os
import sys
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from nnburst.service.process.command import safe_command
from nnburst.service.process.launch import start_child
from support import ROOT
from support.processes import run_python

pytestmark = pytest.mark.check

# Without `open`: a module that stands for `encodings` is imported before there is one.
EVIL = """
import posix
fd = posix.open(posix.environ[b"NNBURST_TEST_WITNESS"], posix.O_WRONLY | posix.O_CREAT | posix.O_APPEND)
posix.write(fd, __name__.encode() + b"\\n")
posix.close(fd)
"""
LAUNCH = """
import os, sys
import numpy as np
import nnburst
os.environ["PYTHONPATH"] = {pythonpath!r}
b = nnburst.ModelBuilder()
x = b.input("x", nnburst.OperandType.TENSOR_FLOAT32, (1, 4))
b.output("y", b.softmax(x))
with nnburst.launch() as service, service.session(b.build()) as session:
    assert np.allclose(session.run(None, {{"x": np.zeros((1, 4), np.float32)}}), 0.25)
    if len(service.devices) > 1:
        try:
            service.session(b"no model", device=service.devices[1].name)
        except nnburst.NNBurstError:  # the library was loaded to find that out
            pass
        else:
            raise AssertionError("these bytes are no model")
"""
SCRIPT = "import sys\nfrom nnburst.cli import main\nsys.exit(main())\n"


def imported_names() -> Iterator[str]:
    """Yield every name that this package mentions in an import."""
    for path in (ROOT / "nnburst").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                yield node.module


@pytest.fixture(scope="module")
def libraries() -> set[str]:
    names = {name.split(".")[0] for name in (*packages_distributions(), *imported_names())}
    return names - {"_distutils_hack"}  # setuptools imports it before any program runs


@pytest.fixture
def hostile(tmp_path: Path, libraries: set[str]) -> Path:
    """A directory of modules of all names that a service or the command could import."""
    directory = tmp_path / "downloads"
    directory.mkdir()
    for name in libraries | {*sys.stdlib_module_names, "nnburst", "sitecustomize", "usercustomize"}:
        (directory / f"{name}.py").write_text(EVIL)
    return directory


def run(hostile: Path, *command: str, env: dict[str, str] | None = None) -> set[str]:
    """Run Python in the hostile directory; return the names of the modules that it took from there."""
    witness = hostile.parent / "witness"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"NNBURST_TEST_WITNESS": str(witness)} | (env or {})
    done = run_python(*command, cwd=hostile, env=environment, input="")
    executed = set(witness.read_text().split()) if witness.exists() else set()
    assert executed or done.returncode == 0, done.stderr
    return executed


def test_the_directory_is_hostile(hostile: Path) -> None:
    assert run(hostile, "-c", "import json")  # from CPython 3.13 on it meets others of these modules before json
    assert run(hostile, "-c", "pass", env={"PYTHONPATH": ":/nowhere"})


@pytest.mark.parametrize("pythonpath", ["", ":", "/nowhere:", ".", "../downloads"])
def test_service_runs_nothing_of_the_working_directory(hostile: Path, pythonpath: str) -> None:
    program = hostile.parent / "program.py"
    program.write_text(LAUNCH.format(pythonpath=pythonpath))
    assert run(hostile, str(program)) == set()


FUNCTIONS = """
import sys
import numpy as np
from nnburst.devices.function import Tensor, declare

@declare(inputs=[], outputs=[Tensor("n", "int64", ())])
def places():
    return np.int64(sum(path.endswith("service/process") for path in sys.path))
"""
PROGRAM = """
import nnburst
with nnburst.launch(devices=["nnburst-function:call=mine:places"]) as service:
    with service.session("places") as session:
        assert session.run(None, {}) == [0]
"""


def test_module_of_a_function_is_found_beside_the_program_and_not_in_the_working_directory(hostile: Path) -> None:
    program = hostile.parent / "program.py"
    (hostile.parent / "mine.py").write_text(FUNCTIONS)
    (hostile / "mine.py").write_text(EVIL)
    program.write_text(PROGRAM)
    assert run(hostile, str(program)) == set()


def test_other_devices_do_not_get_the_path_of_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [f"/nowhere/{n:04000}" for n in range(40)]  # more than one argument may have
    monkeypatch.setattr(sys, "path", [*sys.path, *entries])
    for device, given in (("nnburst-noop", False), ("nnburst-function:call=", True)):
        with start_child([device]) as service:
            command = Path(f"/proc/{service.pid}/cmdline").read_text()
        assert command.endswith("\0".join(("", *entries, ""))) is given


def test_directory_that_is_gone_harms_no_program_and_no_service(tmp_path: Path) -> None:
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    program = tmp_path / "program.py"
    program.write_text(
        "import os, subprocess, sys\n"
        "import nnburst\n"
        "os.mkdir('gone')\n"
        "os.chdir('gone')\n"
        "os.rmdir('../gone')\n"
        "sys.path.append('')\n"
        "with nnburst.launch(devices=['nnburst-function:call=functions:places']) as service:\n"
        "    assert service.alive\n"
        "sys.exit(subprocess.call([sys.executable, '-P', '-m', 'nnburst', 'ls'], stdout=subprocess.DEVNULL))\n"
    )
    assert run(tmp_path, str(program)) == set()


def test_gateway_runs_nothing_of_the_working_directory(hostile: Path) -> None:
    pytest.importorskip("grpc", reason="needs the extra nnburst[oip]")
    options = {"address": "unix:/nowhere", "shared_memory": False, "control": False}
    options |= {"drain": 0, "unloaded": [], "token_file": None}
    options |= dict.fromkeys(("grpc", "rest"), "127.0.0.1:0")
    command = [*safe_command("nnburst.gateway.run"), json.dumps(options)]
    assert run(hostile, *command[1:]) == set()


COMMAND = ("cache", "--dir", "..", "ls", "--json")  # loads the devices


@pytest.mark.representative
def test_script_runs_nothing_of_the_working_directory(hostile: Path) -> None:
    script = hostile.parent / "nnburst"
    script.write_text(SCRIPT)  # as pip writes it
    assert run(hostile, str(script), *COMMAND) == set()


def test_module_runs_nothing_of_the_working_directory_under_P(hostile: Path) -> None:
    assert run(hostile, "-P", "-m", "nnburst", *COMMAND) == set()
