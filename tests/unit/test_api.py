"""Every name of the API page says what it takes, gives and raises, and shows an example, which runs.

Each parameter has its line in `Args:`, or in that of the function that the docstring refers to. What comes back stands
in the summary or in `Returns:`; of a property the summary is enough. What it raises, itself or by a check, stands in
`Raises:`. An example is one of a function, or of a class for all its methods.
"""

from __future__ import annotations

import doctest
import enum
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nnburst
from nnburst.model.operation_methods import OperationMethods
from nnburst.options import SessionKeywords
from support import ROOT

PAGE = (ROOT / "docs" / "api.md").read_text("utf-8")
NAMES = {
    *(f"nnburst.{name}" for name in nnburst.__all__ if name not in ("__version__", "errors")),
    *re.findall(r"^\.\. auto(?:class|function):: (nnburst\..*)$", PAGE, re.MULTILINE),
    *(
        f"{room}.{name}"
        for room in re.findall(r"^\.\. automodule:: (.*)$", PAGE, re.MULTILINE)
        for name in getattr(importlib.import_module(room), "__all__", ())
    ),
}


def found(name: str) -> Any:
    room, _, last = name.rpartition(".")
    return getattr(importlib.import_module(room), last)


API = {name: found(name) for name in sorted(NAMES) if callable(found(name))}
"""Classes and functions. A class's example is for its methods, too."""
SPEAKS_FOR_ITSELF = (enum.Enum, BaseException)
"""Their members are their documentation; `nnburst.errors` has the example for errors."""
SECTION = re.compile(r"^(Args|Attributes|Returns|Yields|Raises):\n((?: {4}.*\n|\n)+)", re.MULTILINE)
ITEM = re.compile(r"^ {4}([\w*]+(?:, [\w*]+)*):", re.MULTILINE)
AS = re.compile(r"(?:\A(?:\w+ )*?As|[Aa]rguments (?:are those of|as for)|\A.*; as) `([\w.]+)`")
"""Whose docstring is that of another function, or class, which it names, where it does not say it itself."""
SUMMARY_GIVES = re.compile(r"\b(?:[Rr]eturn|[Yy]ield)s?\b")
"""A summary that says what comes back needs no section of its own: the rule of the style (Google's)."""

RAISES = re.compile(r"^ +raise [A-Z]|\b_?(?:check_|checked_|require_|refuse)\w*\(", re.MULTILINE)
"""Raises itself, or calls what does nothing else."""


def functions(thing: Any) -> Iterator[tuple[str, Callable[..., Any], bool]]:
    """Yield a function, or the public methods and properties of a class, and whether each is a property."""
    if not isinstance(thing, type):
        yield "", thing, False
        return
    for name in dir(thing):
        owner = next(each for each in thing.__mro__ if name in vars(each))
        if name.startswith("_") or not owner.__module__.startswith("nnburst") or owner is OperationMethods:
            continue  # methods of operations are made from the table, and so is what they say
        value = vars(owner)[name]
        function = getattr(value, "__func__", None) or getattr(value, "fget", None) or value
        if inspect.isfunction(function):
            yield name, function, isinstance(value, property)


def taken_by(signature: inspect.Signature) -> set[str]:
    """Return the names of the parameters; of a session's options each one's."""
    options = {"Unpack[SessionKeywords]": SessionKeywords.__annotations__}
    return {n for name, each in signature.parameters.items() for n in options.get(each.annotation, [name])}


def sections(text: str) -> dict[str, str]:
    return dict(SECTION.findall(text + "\n"))


def told(text: str, owner: Any) -> set[str]:
    """Return the arguments that a docstring describes, in a section of its own or in those that it refers to."""
    own = sections(text)
    names = {
        name.lstrip("*")
        for part in ("Args", "Attributes")
        for each in ITEM.findall(own.get(part, ""))
        for name in each.split(", ")
    }
    for other in referred(text, owner):
        names |= told(inspect.getdoc(other) or "", owner)
    return names


def referred(text: str, owner: Any) -> list[Any]:
    """Return the functions and classes whose docstrings a docstring refers to."""
    return [attrgetter(name)(owner if hasattr(owner, name) else nnburst) for name in AS.findall(text)]


def missing(function: Callable[..., Any], text: str, owner: Any, *, is_property: bool) -> Iterator[str]:
    """Yield what a docstring does not tell."""
    signature = inspect.signature(function)
    summary = text.partition("\n\n")[0]
    if not is_property:
        taken = {name for name in taken_by(signature) if name not in ("self", "cls") and name[0] != "_"}
        yield from sorted(taken - told(text, owner))
        gives = {"Returns", "Yields"} & {*sections(text)} or SUMMARY_GIVES.search(summary) or referred(summary, owner)
        if signature.return_annotation not in ("None", None) and not gives:
            yield f"Returns: {signature.return_annotation}"
    code = inspect.getsource(function).rpartition('"""')[2]
    says = "Raises" in sections(text) or re.search(r"[Rr]aises as `|is raised", text) or referred(summary, owner)
    if RAISES.search(code) and not says:
        yield "Raises"


@pytest.mark.parametrize("name", API)
def test_public_name_says_what_it_takes_gives_and_raises(name: str) -> None:
    thing = API[name]
    assert inspect.getdoc(thing)
    if isinstance(thing, type) and issubclass(thing, SPEAKS_FOR_ITSELF):
        return
    wanting = {}
    for method, function, is_property in functions(thing):
        text = inspect.getdoc(function) or ""
        wanting[method] = [*missing(function, text, thing, is_property=is_property)] if text else ["a docstring"]
    assert {method: what for method, what in wanting.items() if what} == {}


@pytest.mark.parametrize("name", [name for name, thing in API.items() if isinstance(thing, type)])
def test_class_says_what_it_is_made_of(name: str) -> None:
    thing = API[name]
    if issubclass(thing, SPEAKS_FOR_ITSELF) or (thing.__init__.__doc__ or "").startswith("Use `"):
        return
    text = inspect.getdoc(thing) or ""
    assert {name for name in taken_by(inspect.signature(thing)) if name[0] != "_"} - told(text, thing) == set()


@pytest.mark.parametrize("name", [*API, "nnburst.errors"])
def test_example_of_a_public_name_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    thing: Any = API.get(name, nnburst.errors)
    if isinstance(thing, type) and issubclass(thing, SPEAKS_FOR_ITSELF):
        return
    monkeypatch.setenv("NNBURST_STATE_DIR", str(tmp_path))
    given: dict[str, Any] = {"np": np, "nnburst": nnburst}
    exec(re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)[0], given)
    example = doctest.DocTestParser().get_doctest(inspect.getdoc(thing) or "", given, name, None, None)
    assert example.examples
    said: list[str] = []
    doctest.DocTestRunner(verbose=False).run(example, out=said.append)
    assert "".join(said) == ""
