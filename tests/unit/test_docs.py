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
from importlib import import_module
from importlib.metadata import metadata
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from click.testing import CliRunner

import nnburst
from nnburst.cli import main
from nnburst.cli._main import COMMANDS
from nnburst.devices.reference.call import KernelCall
from nnburst.devices.reference.kernels import KERNELS
from nnburst.model.rows import OPERATIONS, activation
from support import ROOT
from support.operations import FLOATS, Case, O, rng

PAGES = [
    *sorted(ROOT.glob("*.md")),
    *(path for part in ("docs", "examples", "nnburst", "tests") for path in sorted((ROOT / part).rglob("*.md"))),
]
WIDTH = 120
LINK = re.compile(r"\]\(([^)#]*)(?:#([^)]*))?\)")


GIVEN = """
import contextlib, subprocess, sys
import numpy as np, nnburst

builder = nnburst.ModelBuilder()
x = builder.input("x", nnburst.OperandType.TENSOR_FLOAT32, (1, 8))
builder.output("y", builder.relu(x))
model = model_a = model_b = builder.build()
image = np.zeros((1, 8), np.float32)
frame = np.load("detector.npy")
"""
"""What a page takes for granted: models and arrays. The service ``vision`` is there, and what `nnburst demo` saves."""
SAVED = ("detector.onnx", "detector.npy", "digits.onnx", "digits.npy")


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
"""The command that starts the service ``vision``; what other pages serve over the network is part of it."""
ENVIRONMENT = "python3 -m venv"
"""The command that makes an environment; the tests run in one."""
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


def programs(page: Path) -> list[str]:
    """Return the Python of a page as it runs: a recipe stands alone, and the README takes nothing for granted."""
    if page.name == "recipes.md":
        return [text for language, text in blocks(page) if language == "python"]
    return [program(page).removeprefix(GIVEN if page.name == "README.md" else "")]


@pytest.fixture(scope="module")
def vision(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The service of the examples; what a program needs in its environment to find it."""
    pytest.importorskip("onnx", reason="needs the extra nnburst[onnx]")
    folder = tmp_path_factory.mktemp("vision")
    for name in SAVED[::2]:
        done = CliRunner().invoke(main, ["demo", "--save", str(folder / name)])
        assert done.exit_code == 0, done.output
    (folder / "run").mkdir(mode=0o700)
    command = [re.sub(r"^(127\.0\.0\.1):\d+$", r"\1:0", word) for word in GATEWAY[1:]]
    if find_spec("grpc") is None or find_spec("aiohttp") is None:
        command = command[: command.index("--oip")]
    environment = os.environ | {
        "XDG_RUNTIME_DIR": str(folder / "run"),
        "NNBURST_STATE_DIR": str(folder / "state"),
        "SAVED": str(folder),
    }
    command = [sys.executable, "-m", "nnburst", *command]
    with subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True) as service:
        assert service.stdout is not None
        ready = service.stdout.readline()
        assert ready
        ports = dict(re.findall(r"(grpc|rest) at port (\d+)", ready))
        yield environment | {"ADDRESS": f"127.0.0.1:{ports.get('grpc')}"}
        service.terminate()


@pytest.mark.check
@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page.parent == ROOT / "docs" and any(block[0] == "python" for block in blocks(page))]
    + [ROOT / "README.md"],
    ids=lambda page: page.name,
)
def test_python_of_a_page_runs_as_written(page: Path, vision: dict[str, str], tmp_path: Path) -> None:
    for name in SAVED:
        shutil.copy(Path(vision["SAVED"], name), tmp_path)
    stdout = ""
    for text in programs(page):
        for module in ("nudenet", "pyopen_wakeword", "ray", "tritonclient", "torch"):
            if re.search(rf"^(?:from|import) {module}\b", text, re.MULTILINE):
                pytest.importorskip(module)
        (tmp_path / "page.py").write_text(text.replace(ADDRESS, vision["ADDRESS"]), encoding="utf-8")
        command = [sys.executable, "page.py"]
        done = subprocess.run(command, cwd=tmp_path, env=vision, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, f"{text}\n{done.stderr}"
        stdout += done.stdout
    assert_prints(page, stdout)
    if page.name == "tutorial.md":
        typed = "".join(f"{text}\n" for language, text in blocks(page) if language == "python")
        command = [sys.executable, "-iq"]
        done = subprocess.run(
            command, input=typed, cwd=tmp_path, env=vision, capture_output=True, text=True, timeout=100
        )
        assert "Error" not in done.stderr
        assert_prints(page, done.stdout)


def assert_prints(page: Path, stdout: str) -> None:
    """Fail unless a program printed what its page says."""
    at, printed = 0, " ".join(stdout.split())
    for line, several in re.findall(
        r"[Tt]his prints[^`]*(?:`([^`]+)`|```text\n(.*?)```)", page.read_text("utf-8"), re.DOTALL
    ):
        said = " ".join((line or several).split())
        assert said in printed[at:], f"{said!r} is not in {printed[at:]!r}"
        at = printed.index(said, at) + len(said)


@pytest.mark.check
@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "coming").glob("*.md")), ids=lambda page: page.name)
def test_both_sides_of_a_comparison_run_and_print_the_same(page: Path, vision: dict[str, str], tmp_path: Path) -> None:
    for module in ("tritonclient", "onnxruntime"):
        if f"import {module}" in page.read_text("utf-8"):
            pytest.importorskip(module)
    for name in SAVED:
        shutil.copy(Path(vision["SAVED"], name), tmp_path)
    said = []
    for language, text in blocks(page):
        name = re.match(r"# (\w+\.py)\n", text)
        (tmp_path / (name.group(1) if name else "side.py")).write_text(text.replace(ADDRESS, vision["ADDRESS"]))
        if language == "python" and not name:
            done = subprocess.run(
                [sys.executable, "side.py"], cwd=tmp_path, env=vision, capture_output=True, text=True, timeout=100
            )
            assert done.returncode == 0, f"{text}\n{done.stderr}"
            said.append(done.stdout)
    assert said[::2] == said[1::2]
    assert len(said) >= 6
    assert all(said)


def test_an_operation_is_added_as_the_page_says(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "docs" / "internals" / "operations.md").read_text(encoding="utf-8")
    row, kernel = map(textwrap.dedent, re.findall(r"^   ```python\n(.*?)^   ```$", text, re.DOTALL | re.MULTILINE))
    assert eval(f"{{{row}}}", vars(activation).copy()) == {O.EXP: OPERATIONS[O.EXP]}
    names: dict[str, Any] = {"np": np, "KernelCall": KernelCall}
    exec(kernel, names)
    calls = Mock(side_effect=names["exponential"])
    monkeypatch.setitem(KERNELS, O.EXP, calls)
    Case(O.EXP, rng(1).uniform(-2, 2, (2, 3, 4))).check(np.exp, FLOATS)
    assert calls.called


AS_WRITTEN = (["run"], ["demo"], ["ls"], ["trace"], ["doctor"], *(["cache", verb] for verb in ("ls", "prune", "path")))
"""Commands that run beside the services and benchmarks below; of others click looks at names and options."""


def each(verb: str) -> list[list[str]]:
    """All commands of all pages that begin with `nnburst VERB`."""
    found = {shlex.join(words): words for page in PAGES for words in commands(page)}
    return [words for words in found.values() if words[:2] == ["nnburst", verb] and "--help" not in words]


def done(*words: str) -> str:
    """Run a command of `nnburst` that succeeds; return what it says."""
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.check
@pytest.mark.parametrize("words", [words for words in each("serve") if "--oip" not in words], ids=shlex.join)
def test_service_of_a_page_is_listed_watched_and_stopped(
    words: list[str], vision: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("NNBURST_STATE_DIR", str(tmp_path / "state"))
    tmp_path.chmod(0o700)
    command = [re.sub(r"(^|=)/.*/", r"\1", word) for word in words]
    for name in re.findall(r"=(\S+\.onnx)", shlex.join(command)):
        shutil.copy(Path(vision["SAVED"], "detector.onnx"), name)
    page = ROOT / "docs" / "functions.md"
    Path("filters.py").write_text(next(text for _, text in blocks(page) if "declare(" in text))
    address = f"unix:{command[command.index('--socket') + 1]}" if "--socket" in command else "vision"
    with subprocess.Popen([sys.executable, "-m", *command], stdout=subprocess.PIPE, text=True) as service:
        try:
            assert service.stdout is not None
            assert service.stdout.readline()  # it is ready
            assert ("vision" in done("ls")) is (address == "vision")
            with nnburst.connect(address) as client:
                assert str(os.getpid()) in done("top", "--once", address)
                kick = [sys.executable, "-m", "nnburst", "kick", address, str(os.getpid())]  # which would kick itself
                subprocess.run(kick, check=True, capture_output=True, timeout=60)
                with pytest.raises(nnburst.DeadObject, match="kick"):
                    client.device("nnburst-reference").status  # noqa: B018 (it asks the service)
            done("stop", address)
            assert service.wait(60) == 0
        finally:
            service.kill()


@pytest.mark.check
@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=lambda page: page.name)
def test_commands_of_a_page_run_as_written(
    page: Path, vision: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in SAVED:
        shutil.copy(Path(vision["SAVED"], name), tmp_path)
    for name in ("frames", "images", "cache"):
        (tmp_path / name).mkdir()
    for name in ("0.npy", "1.npy"):
        shutil.copy(tmp_path / "detector.npy", tmp_path / "frames" / name)
        shutil.copy(tmp_path / "digits.npy", tmp_path / "images" / name)
    (tmp_path / "program.py").write_text(f"{GIVEN}\nwith nnburst.Session(model) as s:\n  s.run(None, {{'x': image}})\n")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NNBURST_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("NNBURST_CACHE_DIR", str(tmp_path / "cache"))
    for words in commands(page):
        program, *arguments = words
        for file, function in re.findall(r"(\w+\.py):(\w+)", shlex.join(arguments)):
            assert any(
                re.search(rf"^# {file}\n[^`]*^def {function}\(", each.read_text("utf-8"), re.MULTILINE)
                for each in (page, ROOT / "docs" / "functions.md")
            )
            arguments = [*arguments, "--help"]
        if program == "nnburst" and arguments[0] == "serve" and not {"--socket", "--help"} & set(arguments):
            assert words == GATEWAY[: len(words)], "the page starts another service than the one that runs here"
        elif program == "nnburst":
            run = any(arguments[: len(known)] == known for known in AS_WRITTEN)
            done = CliRunner().invoke(main, arguments if run else [*arguments, "--help"])
            assert done.exit_code == 0, f"{shlex.join(words)}\n{done.output}"
        elif program == "pip":
            install, package, *_ = [word for word in arguments if word != "--editable"]
            (what,) = re.findall(r"^(?:\.|nnburst|\$\(ls nnburst-\*\.whl\))(?:\[([\w,]+)\])?$", package)
            assert install == "install"
            assert set(filter(None, what.split(","))) <= set(metadata("nnburst").get_all("Provides-Extra", []))
        elif program == "make":
            subprocess.run(["make", "--dry-run", *arguments], cwd=ROOT, check=True, capture_output=True)
        elif words[:2] == ["python", "-c"]:
            subprocess.run([sys.executable, *arguments], env=vision, check=True, capture_output=True)
        elif not shlex.join(words).startswith(ENVIRONMENT):
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
    assert [number for number, line in prose(page) if len(line) > WIDTH] == []


def places(page: Path) -> list[str]:
    """Return what links to headings of a page are called."""
    headings = [line.lstrip("# ") for _, line in prose(page) if line.startswith("#")]
    return [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_paths_of_a_page_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target, place in LINK.findall(text):
        if "://" not in target:
            assert (page.parent / target).exists(), target
            assert not place or place in places(page.parent / target if target else page), f"{target}#{place}"
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
    maintainers = docs / "internals" / "README.md"  # links to pages that are not in the sidebar
    linked = [maintainers.parent / target for target, _ in LINK.findall(maintainers.read_text("utf-8"))]
    listed += [str(path.resolve().relative_to(docs).with_suffix("")) for path in linked]
    built = (docs / "_build", docs / "commands")  # the second has its own, of all
    pages = [path.relative_to(docs) for path in docs.rglob("*.md") if not {*built} & {*path.parents}]
    assert sorted(listed) == sorted(str(page.with_suffix("")) for page in pages if page.name != "index.md")


def test_every_command_has_a_page_and_no_other_has(tables: Any) -> None:
    made = {name for name in tables.WHOLE if name.startswith("docs/commands/")}
    assert made == {str(path.relative_to(ROOT)) for path in (ROOT / "docs" / "commands").iterdir()}
    assert len(made) == len(COMMANDS)


def test_every_public_name_is_on_the_api_page() -> None:
    named, room = {f"nnburst.{name}" for name in nnburst.errors.__all__}, "nnburst"
    for kind, name in re.findall(
        r"^\.\. ([\w:]+):: ([\w.]+)$", (ROOT / "docs" / "api.md").read_text("utf-8"), re.MULTILINE
    ):
        if kind == "currentmodule":
            room = name
        elif kind == "automodule":
            named |= {f"{name}.{each}" for each in getattr(import_module(name), "__all__", ())}
        else:
            named.add(name if "." in name else f"{room}.{name}")
    stubs = [path.parent.relative_to(ROOT).parts for path in (ROOT / "nnburst").rglob("__init__.pyi")]
    public = {f"{room}.{name}" for room in map(".".join, stubs) for name in import_module(room).__all__}
    assert public - named == {"nnburst.__version__", "nnburst.errors"}


def test_every_environment_variable_is_on_its_page() -> None:
    page = (ROOT / "docs" / "platforms.md").read_text(encoding="utf-8")
    sources = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "nnburst").rglob("*.py"))
    used = set(re.findall(r'"(NNBURST_[A-Z_]+)"', sources))
    assert used == {name.rstrip("_") for name in re.findall(r"NNBURST_[A-Z_]+", page)}
    assert len(used) > 5


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
    assert set(re.findall(r"<!-- (?:figures:|made: run) (\S+) -->", text)) == tables.stored().keys()


def test_figures_of_no_run_are_found(tables: Any, tmp_path: Path) -> None:
    page = tmp_path / "scale.md"
    page.write_text("A run takes 1.23 ms under CPython 3.11.\n\n<!-- figures: max-run -->\nIt takes 1.5 µs or 4.59.\n")
    assert list(tables.quoted(page)) == [
        "no run is named beside ['1.23']: A run takes 1.23 ms under CPython 3.11.",
        "the run max-run has no ['4.59']",
    ]


def test_microseconds_of_no_run_are_found_on_any_page(tables: Any, tmp_path: Path) -> None:
    page = tmp_path / "faq.md"
    page.write_text(
        "It polls for 50 µs and takes a microsecond.\n\n| a call | 8 µs |\n\nA call takes 20 to 30 microseconds.\n\n"
        "<!-- figures: max-run -->\nIt costs 1.5 µs, or 7,100 and 8 µs.\n"
    )
    assert list(tables.quoted(page)) == [
        "no run is named beside ['20']: A call takes 20 to 30 microseconds.",
        "the run max-run has no ['7,100', '8']",
    ]
