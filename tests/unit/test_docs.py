"""The examples of the documentation run as they are written; its lines are short and its links and paths exist."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from click.testing import CliRunner

import nnburst
from nnburst.cli import main
from nnburst.devices.reference.call import KernelCall
from nnburst.devices.reference.kernels import KERNELS
from nnburst.model.rows import ROWS, activation
from support import ROOT
from support.operations import FLOATS, Case, O, rng

PAGES = [
    *sorted(ROOT.glob("*.md")),
    *(path for part in ("docs", "examples", "nnburst", "tests") for path in sorted((ROOT / part).rglob("*.md"))),
]
WIDTH = 120
LINK = re.compile(r"\]\(([^)#]+)(?:#[^)]*)?\)")


def test_example_of_the_readme_runs_as_written() -> None:
    code = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert code is not None
    assert len([line for line in code.group(1).splitlines() if line.strip()]) <= 15
    done = subprocess.run(
        [sys.executable, "-c", code.group(1)], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("[[") == 2, done.stdout  # the answer of run() and that of the bound execution


GIVEN = """
import contextlib, subprocess, sys
import numpy as np, nnburst

builder = nnburst.ModelBuilder()
x = builder.input("x", nnburst.OperandType.TENSOR_FLOAT32, (1, 8))
builder.output("y", builder.relu(x))
model = model_a = model_b = builder.build()
frame = image = np.zeros((1, 8), np.float32)
"""
"""What a page takes for granted: models and arrays. ``detector.onnx`` and the service ``vision`` are there, too."""


def blocks(page: Path) -> list[tuple[str, str]]:
    """Return (language, text) of what is between the fences of a page."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def commands(page: Path) -> list[list[str]]:
    """Return the commands of a page, word by word."""
    found = blocks(page)
    texts = [text for language, text in found if language == "sh"]
    texts += [line for language, text in found if language == "yaml" for line in re.findall(r"command: (.*)", text)]
    return [words for text in texts for line in text.splitlines() if (words := shlex.split(line, comments=True))]


GATEWAY = next(words for words in commands(ROOT / "docs" / "gateway.md") if "--oip" in words)
"""The command that starts the service ``vision``; what other pages start is part of it."""
ADDRESS = GATEWAY[GATEWAY.index("--oip") + 1]


def program(page: Path) -> str:
    """Return the Python of a page as one program; a block that begins with a file's name is that file."""
    parts = [GIVEN]
    for language, text in blocks(page):
        if language != "python":
            continue
        name = re.match(r"# (\w+\.py)\n", text)
        parts.append(f"open({name.group(1)!r}, 'w').write({text!r})" if name else text)
    return "\n".join(parts)


@pytest.fixture(scope="module")
def vision(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The service of the examples; what a program needs in its environment to find it."""
    onnx = pytest.importorskip("onnx", reason="needs the extra nnburst[onnx]")
    folder = tmp_path_factory.mktemp("vision")
    value = [onnx.helper.make_tensor_value_info(name, 1, ["batch", 8]) for name in ("image", "boxes")]
    node = onnx.helper.make_node("Relu", ["image"], ["boxes"])
    graph = onnx.helper.make_graph([node], "detector", value[:1], value[1:])
    detector = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(detector, folder / "detector.onnx")
    (folder / "run").mkdir(mode=0o700)
    command = [re.sub(r"^(127\.0\.0\.1):\d+$", r"\1:0", word) for word in GATEWAY[1:]]
    if find_spec("grpc") is None or find_spec("aiohttp") is None:
        command = command[: command.index("--oip")]
    environment = os.environ | {
        "XDG_RUNTIME_DIR": str(folder / "run"),
        "NNBURST_STATE_DIR": str(folder / "state"),
        "DETECTOR": str(folder / "detector.onnx"),
    }
    command = [sys.executable, "-m", "nnburst", *command]
    with subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True) as service:
        assert service.stdout is not None
        ready = service.stdout.readline()
        assert ready
        ports = dict(re.findall(r"(grpc|rest) at port (\d+)", ready))
        yield environment | {"ADDRESS": f"127.0.0.1:{ports.get('grpc')}"}
        service.terminate()


@pytest.mark.leaks("onnxruntime keeps files open once it was imported; so does the trust store of a process")
@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page.parent == ROOT / "docs" and any(block[0] == "python" for block in blocks(page))]
    + [ROOT / "README.md"],
    ids=lambda page: page.name,
)
def test_python_of_a_page_runs_as_written(page: Path, vision: dict[str, str], tmp_path: Path) -> None:
    text = program(page)
    for module in ("ray", "tritonclient"):
        if re.search(rf"^(?:from|import) {module}\b", text, re.MULTILINE):
            pytest.importorskip(module)
    shutil.copy(vision["DETECTOR"], tmp_path)
    (tmp_path / "page.py").write_text(text.replace(ADDRESS, vision["ADDRESS"]), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "page.py"], cwd=tmp_path, env=vision, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr


def test_an_operation_is_added_as_the_page_says(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "docs" / "internals" / "operations.md").read_text(encoding="utf-8")
    row, kernel = map(textwrap.dedent, re.findall(r"^   ```python\n(.*?)^   ```$", text, re.DOTALL | re.MULTILINE))
    assert eval(f"{{{row}}}", vars(activation).copy()) == {O.EXP: ROWS[O.EXP]}
    names: dict[str, Any] = {"np": np, "KernelCall": KernelCall}
    exec(kernel, names)
    calls = Mock(side_effect=names["exponential"])
    monkeypatch.setitem(KERNELS, O.EXP, calls)
    Case(O.EXP, rng(1).uniform(-2, 2, (2, 3, 4))).check(np.exp, FLOATS)
    assert calls.called


AS_WRITTEN = (["run"], *(["cache", verb] for verb in ("ls", "verify", "prune", "stats", "path")))
"""Commands that are run; of others click looks at names and options. A benchmark takes minutes."""


@pytest.mark.leaks("the services of `nnburst run` keep the trust store of a process open")
@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=lambda page: page.name)
def test_commands_of_a_page_run_as_written(
    page: Path, vision: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(vision["DETECTOR"], tmp_path)
    for name in ("frames", "cache"):
        (tmp_path / name).mkdir()
    for name in ("frame.npy", "frames/0.npy", "frames/1.npy"):
        np.save(tmp_path / name, np.ones((1, 8), np.float32))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NNBURST_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("NNBURST_CACHE_DIR", str(tmp_path / "cache"))
    for words in commands(page):
        program, *arguments = words
        for file, function in re.findall(r"(\w+\.py):(\w+)", shlex.join(arguments)):
            assert re.search(rf"^# {file}\n[^`]*^def {function}\(", page.read_text(encoding="utf-8"), re.MULTILINE)
            arguments = [*arguments, "--help"]
        if program == "nnburst" and arguments[0] == "serve" and not {"--socket", "--help"} & set(arguments):
            assert words == GATEWAY[: len(words)], "the page starts another service than the one that runs here"
        elif program == "nnburst":
            run = any(arguments[: len(known)] == known for known in AS_WRITTEN)
            done = CliRunner().invoke(main, arguments if run else [*arguments, "--help"])
            assert done.exit_code == 0, f"{shlex.join(words)}\n{done.output}"
        elif program == "make":
            subprocess.run(["make", "--dry-run", *arguments], cwd=ROOT, check=True, capture_output=True)
        else:
            assert program in ("python", ".venv/bin/python"), words
            named = [word for word in arguments if "/" in word]
            assert named or arguments == ["program.py"], words
            assert all((ROOT / word).exists() for word in named if not word.startswith("/tmp")), words


def prose(page: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of a page and their numbers, without what is between fences."""
    fenced = False
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced:
            yield number, line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_lines_and_tables_end_before_the_margin(page: Path) -> None:
    made = page.name == "mutants.md"  # by `make prove-mutants`
    wide = [number for number, line in prose(page) if len(line) > WIDTH and not (made and line.startswith("|"))]
    assert wide == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_paths_of_a_page_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target in LINK.findall(text):
        assert "://" in target or (page.parent / target).exists(), target
    for path in re.findall(r"`((?:\w+/)+\w+\.(?:py|c|h|md))[`:]", text):
        assert any((base / path).exists() for base in (ROOT, ROOT / "nnburst", page.parent)), path


DEFINED = r"^\s*(?:(?:async )?def |class ){0}\b|^{0}(?:: .+)? = |^\w[\w *]*\b{0}\("
"""A function or a class of Python, a value of a module, a function of C."""


def test_functions_that_the_architecture_names_are_there() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    named = re.findall(r"`((?:\w+/)*\w+\.(?:py|c|h)):(\w+)`", text)
    assert len(named) > 20
    for path, name in named:
        (source,) = (base / path for base in (ROOT, ROOT / "nnburst") if (base / path).exists())
        assert re.search(DEFINED.format(name), source.read_text(encoding="utf-8"), re.MULTILINE), f"{path}:{name}"


def test_every_page_of_the_site_is_in_its_contents() -> None:
    docs = ROOT / "docs"
    contents = re.findall(r"^:::\{toctree\}\n(.*?)^:::$", (docs / "index.md").read_text(), re.DOTALL | re.MULTILINE)
    listed = [line for part in contents for line in part.splitlines() if line and not line.startswith(":")]
    built = docs / "_build"
    pages = [path.relative_to(docs) for path in docs.rglob("*.md") if built not in path.parents]
    assert sorted(listed) == sorted(str(page.with_suffix("")) for page in pages if page.name != "index.md")


def test_every_public_name_is_on_the_api_page() -> None:
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    named = {*re.findall(r"auto(?:class|exception|function):: (\w+)$", page, re.MULTILINE), *nnburst.errors.__all__}
    assert named >= set(nnburst.__all__) - {"__version__", "errors"}


def test_links_that_a_page_defines_by_accident_are_none() -> None:
    for page in PAGES:
        assert [line for _, line in prose(page) if re.match(r"\s*(?:[-*] +)?\[[^]]+\]: ", line)] == [], page


def test_sources_cite_pages_that_exist() -> None:
    names = {path.name for path in PAGES}
    sources = [*(ROOT / "csrc").glob("*.[ch]"), *(ROOT / "benchmarks").rglob("*.py")]
    sources += [path for room in ("nnburst", "tests") for path in (ROOT / room).rglob("*.py")]
    for path in sources:
        text = path.read_text(encoding="utf-8")
        cited = set(re.findall(r"\b\w[\w-]*\.md\b", text)) - {"table.md", "bench.md"}  # files that a command writes
        assert cited <= names, f"{path.relative_to(ROOT)} cites {cited - names}"
        assert not re.search("§ ?[0-9]", text), f"{path.relative_to(ROOT)} cites a numbered section; no page has them"


@pytest.fixture(scope="module")
def tables() -> Any:
    """The program that makes tables (docs/tables.py), as a module."""
    spec = spec_from_file_location("tables", ROOT / "docs" / "tables.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tables_are_those_that_sources_and_stored_runs_make(tables: Any) -> None:
    files = [*tables.pages(), *(ROOT / name for name in tables.WHOLE)]
    late = [path.name for path in files if tables.made(path) != path.read_text(encoding="utf-8")]
    assert late == [], "make tables"
    text = "\n".join(path.read_text(encoding="utf-8") for path in tables.pages())
    assert {maker for _, maker, _, _ in tables.MADE.findall(text)} == tables.MAKERS.keys()


def test_measured_figures_of_a_page_are_in_the_run_that_they_name(tables: Any) -> None:
    assert {path.name: wrong for path in tables.pages() if (wrong := list(tables.quoted(path)))} == {}


def test_a_stored_run_is_quoted_somewhere(tables: Any) -> None:
    text = "\n".join(path.read_text(encoding="utf-8") for path in tables.pages())
    assert set(re.findall(r"<!-- (?:figures:|made: (?:run|round-trips)) (\S+) -->", text)) == tables.stored().keys()


def test_figures_of_no_run_are_found(tables: Any, tmp_path: Path) -> None:
    page = tmp_path / "scale.md"
    page.write_text("A run takes 1.23 ms under CPython 3.11.\n\n<!-- figures: states -->\nIt takes 4.58 µs or 4.59.\n")
    assert list(tables.quoted(page)) == [
        "no run is named beside ['1.23']: A run takes 1.23 ms under CPython 3.11.",
        "the run states has no ['4.59']",
    ]


def test_markdown_of_a_run_is_stored_and_shown_as_it_was(tables: Any) -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    (shown,) = (match.group() for match in tables.MADE.finditer(page) if match.group(3) == "round-trips")
    run = tables.stored()["round-trips"]
    assert tables.parse(shown) == {"tables": run["tables"], "conditions": run["conditions"]}
