"""The requirement pages and the tests say the same: every id is listed, and has the tests that its line names."""

from __future__ import annotations

import ast
import functools
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from support import ROOT

PAGES = sorted((ROOT / "docs" / "requirements").glob("*.md"))
BLOCK = re.compile(r"^(`[^\n]+`|No test:)\n\n```text\n(.+?)^```$", re.MULTILINE | re.DOTALL)
ROW = re.compile(r"^(REQ-[A-Z]+-\d{3}) +(.+)$", re.MULTILINE)
NAMED = re.compile(r"REQ_([A-Z]+)((?:_(?:to_)?\d{3})+)(?!\d)")


def ids_in(name: str) -> Iterator[str]:
    """Yield the ids that a name carries: REQ_FMQ_001_003_to_005 stands for 001, 003, 004 and 005."""
    for area, numbers in NAMED.findall(name):
        last = 0
        for to, digits in re.findall(r"(to_)?(\d{3})", numbers):
            for number in range(last + 1, int(digits) + 1) if to else (int(digits),):
                yield f"REQ-{area}-{number:03}"
            last = int(digits)


@functools.cache
def carried() -> dict[str, set[str]]:
    """Ids, and the files where a test function or one of its cases carries them; prose does not count."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        text = path.read_text()
        if path == Path(__file__) or "REQ_" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            name = ""
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                name = node.name
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"\w+", node.value):
                name = node.value
            for id_ in ids_in(name):
                found[id_].add(path.name)
    return found


def rows(page: Path) -> list[tuple[str, str, set[str]]]:
    """The lines of a page: id, sentence, and the files above their block."""
    blocks = [(set(re.findall(r"\w+\.py", files)), part) for files, part in BLOCK.findall(page.read_text())]
    return [(id_, said, files) for files, part in blocks for id_, said in ROW.findall(part)]


def listed() -> list[tuple[str, str, set[str]]]:
    """The lines of all pages."""
    return [row for page in PAGES for row in rows(page)]


def test_ids_in_names_are_read_with_their_ranges() -> None:
    assert list(ids_in("test_REQ_AB_001_003_to_005_REQ_C_010_what_1024_means")) == [
        "REQ-AB-001", "REQ-AB-003", "REQ-AB-004", "REQ-AB-005", "REQ-C-010",
    ]  # fmt: skip


def test_every_id_is_listed_once_and_every_row_is_read() -> None:
    ids = [id_ for id_, _, _ in listed()]
    assert len(set(ids)) == len(ids)
    assert len(ids) == sum(len(re.findall(r"^\W*REQ-[A-Z]+-\d+", page.read_text(), re.MULTILINE)) for page in PAGES)


def test_every_id_of_a_test_is_listed() -> None:
    assert carried().keys() <= {id_ for id_, _, _ in listed()}


def status(sentence: str) -> str:
    """met, deviates or absent, as a line says it."""
    said = re.match(r"(deviates|absent)\b", sentence)
    return said.group() if said else "met"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_requirement_is_met_or_deviates_with_its_tests_or_is_absent(page: Path) -> None:
    found = carried()
    for id_, sentence, files in rows(page):
        if status(sentence) == "absent":
            assert not files | found[id_], id_
        else:
            assert files, f"{id_} names no test"
            assert files <= found[id_], f"{id_}: {files - found[id_]} carry no test of that name"


def test_deviations_are_those_that_the_linked_pages_explain() -> None:
    explained = {
        (page.name, id_)
        for page in (*(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "internals").glob("*.md"))
        for id_ in re.findall(r"REQ-[A-Z]+-\d{3}", page.read_text())
    }
    linked = {
        (link, id_)
        for id_, sentence, _ in listed()
        if status(sentence) == "deviates"
        for link in re.findall(r"(\w+\.md)", sentence) or [""]
    }
    assert linked == explained
