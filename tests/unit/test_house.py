"""How large things may be: what is larger no reader has in mind at once."""

from __future__ import annotations

import ast

from support import ROOT

CLASS, FILE_OF_C, PRIVATE = 400, 600, 21
"""Lines of a class but for what it says of itself, lines of a file of csrc, and modules whose name begins with an
underscore: folders sort, and `__all__` says what is public."""
LARGER_CLASSES: set[str] = set()
"""To be cut; one that is no larger any more has no line here."""
LARGER_FILES = {
    "burst_endpoint.c",  # both ends of the data plane, whose orders of memory are proved as one
    "nnburst.h",  # the header of the core, half of it comments
}

MODULES = sorted((ROOT / "nnburst").rglob("*.py"))


def test_a_class_has_at_most_so_many_lines() -> None:
    larger = set()
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ClassDef):
                said = (ast.get_docstring(node) or "").count("\n")
                if (node.end_lineno or 0) - node.lineno - said >= CLASS:
                    larger.add(node.name)
    assert larger == LARGER_CLASSES


def test_a_file_of_c_has_at_most_so_many_lines() -> None:
    lines = {path.name: len(path.read_text("utf-8").splitlines()) for path in (ROOT / "csrc").glob("*.[ch]")}
    assert {name for name, count in lines.items() if count > FILE_OF_C} == LARGER_FILES


def test_few_modules_have_names_with_an_underscore() -> None:
    private = [path.name for path in MODULES if path.name.startswith("_") and not path.name.startswith("__")]
    assert len(private) <= PRIVATE, private
