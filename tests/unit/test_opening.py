"""What importing the package reads, and that names which are read late are the same for everyone."""

from __future__ import annotations

import ast
import importlib
import pickle
import shutil
import sys
from pathlib import Path

import pytest

import nnburst
from support.processes import run_python

PACKAGE = Path(nnburst.__file__).parent
LATER = {
    "asyncio",
    "concurrent.futures",
    "click",
    "cryptography",
    "dataclasses",
    "difflib",
    "hashlib",
    "html",
    "json",
    "logging",
    "matplotlib",
    "nnburst.burst",
    "nnburst.cache",
    "nnburst.devices",
    "nnburst.memory",
    "nnburst.model.builder",
    "nnburst.model.operations",
    "nnburst.model.rows",
    "nnburst.runtime.run",
    "nnburst.service",
    "numpy.typing",
    "onnx",
    "onnxruntime",
    "pathlib",
    "pytest",
    "rich",
    "signal",
    "socket",
    "sqlite3",
    "ssl",
    "subprocess",
    "tempfile",
}
"""What `nnburst.Session` needs when it is used, or never. What NumPy and the other libraries read does not count."""


def read_by(statement: str) -> set[str]:
    """Return the modules that a statement reads in a fresh interpreter, without those that the libraries read."""
    code = (
        f"import sys; sys.path[:] = {[str(PACKAGE.parent), *sys.path]}\n"
        f"import numpy, msgspec, _cffi_backend; before = set(sys.modules)\n{statement}\n"
        "print(*set(sys.modules) - before)"
    )
    # -S: what `site` reads for an editable installation would hide what the package reads
    return set(run_python("-S", "-c", code, check=True).stdout.split())


def test_session_reads_only_what_a_client_needs_before_it_opens_one() -> None:
    read = read_by("import nnburst; nnburst.Session")
    assert {"nnburst._core.leaving", "nnburst.runtime.session"} <= read
    assert read & LATER == set()


def test_process_is_started_before_its_client_reads_what_it_needs_itself() -> None:
    read = read_by(
        "import nnburst, subprocess, os\n"
        "class Started(BaseException): pass\n"
        "def popen(*arguments, **options): raise Started\n"
        "subprocess.Popen = popen\n"
        "try: nnburst.Session('digits.onnx')\n"
        "except Started: pass"
    )
    assert "nnburst.service.process.forked" in read
    rooms = ("burst", "cache", "devices", "fmq", "memory", "runtime.run", "service.client", "service.wire")
    assert not {name for name in read if name.startswith(tuple(f"nnburst.{room}" for room in rooms))}


def test_message_queue_reads_no_room_above_its_own() -> None:
    read = read_by("import nnburst.fmq; nnburst.fmq.MessageQueue")
    rooms = {name.split(".")[1] for name in read if name.startswith("nnburst.")}
    assert rooms == {"_core", "_lazy", "_options", "_version", "errors", "fmq", "model"}
    assert {name for name in read if name.startswith("nnburst.model.")} == {"nnburst.model.pools"}
    assert read & LATER == set()


def test_builder_finds_the_memory_of_its_constants_without_a_room_above_it_being_asked_for() -> None:
    read = read_by(
        "from nnburst import ModelBuilder, OperandType\n"
        "assert 'nnburst.memory' not in sys.modules\n"
        "builder = ModelBuilder()\n"
        "x = builder.input('x', OperandType.TENSOR_FLOAT32, (1000,))\n"
        "builder.output('y', builder.add(x, numpy.zeros(1000, numpy.float32)))\n"
        "assert builder.build().pools[0].size >= 4000"
    )
    assert "nnburst.memory.memory" in read


ROOMS = {".".join(path.relative_to(PACKAGE.parent).parent.parts): path for path in PACKAGE.rglob("__init__.pyi")}


def names_for_type_checkers(room: str) -> dict[str, str]:
    """Return the names that a room's stub takes from elsewhere, each with that place."""
    lines = ast.parse(ROOMS[room].read_text("utf-8")).body
    imports = [line for line in lines if isinstance(line, ast.ImportFrom)]
    return {alias.name: "." * line.level + (line.module or "") for line in imports for alias in line.names}


@pytest.mark.parametrize("room", ROOMS)
def test_interpreter_reads_the_same_names_as_type_checkers(room: str) -> None:
    module, names = importlib.import_module(room), names_for_type_checkers(room)
    taken = {name: place for name, place in names.items() if place != "."}
    assert {*module.__all__} == {*taken, *({"__version__", "errors"} if room == "nnburst" else ())}
    for name, place in taken.items():
        assert getattr(module, name) is getattr(importlib.import_module(place, room), name)
    for name in names.keys() - taken.keys():
        assert getattr(module, name) is importlib.import_module(f".{name}", room)


@pytest.mark.parametrize("room", ROOMS)
def test_no_module_of_a_room_hides_a_name(room: str) -> None:
    """A module becomes an attribute of its package when it is read, unless the package reads it at once."""
    modules = {path.stem for path in ROOMS[room].parent.iterdir()}
    names = {name for name, place in names_for_type_checkers(room).items() if place != "."}
    assert not names & modules


@pytest.mark.parametrize("room", ROOMS)
def test_names_of_a_room_are_listed_found_and_pickled(room: str) -> None:
    module = importlib.import_module(room)
    for name in importlib.import_module(room).__all__:
        assert name in dir(module)
        value = getattr(module, name)
        assert value is getattr(module, name)
        if isinstance(value, type):
            assert pickle.loads(pickle.dumps(value)) is value
    with pytest.raises(AttributeError, match=f"module '{room}' has no attribute 'no_such_name'"):
        module.no_such_name  # noqa: B018


@pytest.mark.check
def test_modules_and_names_are_read_by_threads_at_once() -> None:
    """A module of a room waits for the room, which must not wait for its modules."""
    code = (
        "import importlib, sys, threading\n"
        "sys.setswitchinterval(1e-6)\n"
        "import nnburst\n"
        "start = threading.Barrier(2)\n"
        "def read(name):\n"
        "    start.wait()\n"
        "    importlib.import_module(name) if '.' in name else getattr(nnburst, name)\n"
        "def failed(failure): print(failure.exc_type, failure.exc_value)\n"
        "threading.excepthook = failed\n"
        "threads = [threading.Thread(target=read, args=(name,)) for name in sys.argv[1:]]\n"
        "[thread.start() for thread in threads]\n"
        "[thread.join() for thread in threads]\n"
    )
    pairs = [
        ("nnburst.runtime.session", "nnburst.runtime.compile"),
        ("nnburst.runtime.open_service", "Session"),
        ("nnburst.fmq.queue", "nnburst.fmq"),
        ("Session", "BurstExecutor"),
    ]
    for pair in pairs * 3:
        assert not run_python("-c", code, *pair, check=True).stdout, pair


def test_package_without_its_stubs_says_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "room").mkdir()
    (tmp_path / "room" / "__init__.py").write_text("from nnburst._lazy import attach\nattach(__name__)\n")
    done = run_python("-c", "import room", cwd=tmp_path)
    assert "ImportError" in done.stderr.splitlines()[-1]
    assert "have what packs nnburst take its *.pyi files along" in done.stderr


def test_source_tree_that_is_not_built_says_so_in_a_sentence(tmp_path: Path) -> None:
    """Without its dependencies (-S), too."""
    shutil.copytree(PACKAGE, tmp_path / "nnburst", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for command in (["-c", "import nnburst"], ["-m", "nnburst"], ["-S", "-c", "import nnburst"]):
        done = run_python(*command, cwd=tmp_path)
        assert done.returncode == 1
        assert done.stderr.splitlines()[-1] == (
            f"ImportError: the source tree {tmp_path} is not built for this Python: run pip install --editable . "
            "there, or start Python in another directory if nnburst is installed"
        )
