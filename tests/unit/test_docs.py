"""The examples of the documentation run as they are written; its lines are short and its links and paths exist."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
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


@pytest.mark.leaks("onnxruntime keeps files open once it was imported; so does the trust store of a process")
@pytest.mark.parametrize("page", ["caching.md", "memory.md", "onnx.md"])
def test_examples_of_a_page_run_as_written(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NNBURST_STATE_DIR", str(tmp_path / "state"))
    if page == "onnx.md":
        pytest.importorskip("onnxruntime", reason="needs the extra nnburst[onnx]")
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    for code in blocks:
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
        )
        assert done.returncode == 0, done.stderr


def prose(page: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of a page and their numbers, without tables and what is between fences."""
    fenced = False
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced and not line.startswith("|"):
            yield number, line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_lines_of_prose_end_before_the_margin(page: Path) -> None:
    assert [number for number, line in prose(page) if len(line) > WIDTH] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_paths_of_a_page_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target in LINK.findall(text):
        assert "://" in target or (page.parent / target).exists(), target
    for path in re.findall(r"`((?:\w+/)+\w+\.(?:py|c|h|md))`", text):
        assert any((base / path).exists() for base in (ROOT, ROOT / "nnburst")), path


def test_sources_cite_pages_that_exist() -> None:
    names = {path.name for path in PAGES}
    sources = [*(ROOT / "csrc").glob("*.[ch]"), *(ROOT / "benchmarks").rglob("*.py")]
    sources += [path for room in ("nnburst", "tests") for path in (ROOT / room).rglob("*.py")]
    for path in sources:
        text = path.read_text(encoding="utf-8")
        cited = set(re.findall(r"\b\w[\w-]*\.md\b", text)) - {"table.md", "bench.md"}  # files that a command writes
        assert cited <= names, f"{path.relative_to(ROOT)} cites {cited - names}"
        assert not re.search("§ ?[0-9]", text), f"{path.relative_to(ROOT)} cites a numbered section; no page has them"
