"""Every name of the API page says what it takes, and shows an example, which runs.

Each parameter has its line in `Args:`, or in that of the function that the docstring refers to. An example is one of a
function, or of a class for all its methods.
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
from nnburst._options import SessionKeywords
from nnburst.model.operation_methods import OperationMethods
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
SECTION = re.compile(r"^(?:Args|Attributes):\n((?: {4}.*\n|\n)+)", re.MULTILINE)
ITEM = re.compile(r"^ {4}([\w*]+(?:, [\w*]+)*):", re.MULTILINE)
AS = re.compile(r"(?:\A(?:\w+ )*?As|[Aa]rguments (?:are those of|as for)|\A.*; as) `([\w.]+)`")
"""Whose docstring is that of another function, or class, which it names, where it does not say it itself."""


def functions(thing: Any) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield a function, or the public methods and properties of a class."""
    if not isinstance(thing, type):
        yield "", thing
        return
    for name in dir(thing):
        owner = next(each for each in thing.__mro__ if name in vars(each))
        if name.startswith("_") or not owner.__module__.startswith("nnburst") or owner is OperationMethods:
            continue  # methods of operations are made from the table, and so is what they say
        value = vars(owner)[name]
        function = getattr(value, "__func__", None) or getattr(value, "fget", None) or value
        if inspect.isfunction(function):
            yield name, function


def taken_by(signature: inspect.Signature) -> set[str]:
    """Return the names of the public parameters; of a session's options each one's."""
    options = {"Unpack[SessionKeywords]": SessionKeywords.__annotations__}
    names = {n for name, each in signature.parameters.items() for n in options.get(each.annotation, [name])}
    return {name for name in names - {"self", "cls"} if name[0] != "_"}


def told(text: str, owner: Any) -> set[str]:
    """Return the arguments that a docstring describes, in a section of its own or in those that it refers to."""
    items = [item for section in SECTION.findall(text + "\n") for item in ITEM.findall(section)]
    names = {name.lstrip("*") for item in items for name in item.split(", ")}
    for name in AS.findall(text):
        other = attrgetter(name)(owner if hasattr(owner, name) else nnburst)
        names |= told(inspect.getdoc(other) or "", owner)
    return names


@pytest.mark.parametrize("name", API)
def test_public_name_says_what_it_takes(name: str) -> None:
    thing = API[name]
    assert inspect.getdoc(thing)
    if isinstance(thing, type) and issubclass(thing, SPEAKS_FOR_ITSELF):
        return
    wanting = {}
    for method, function in functions(thing):
        text = inspect.getdoc(function) or ""
        wanting[method] = taken_by(inspect.signature(function)) - told(text, thing) if text else "a docstring"
    assert {method: what for method, what in wanting.items() if what} == {}


@pytest.mark.parametrize("name", [name for name, thing in API.items() if isinstance(thing, type)])
def test_class_says_what_it_is_made_of(name: str) -> None:
    thing = API[name]
    if issubclass(thing, SPEAKS_FOR_ITSELF) or (thing.__init__.__doc__ or "").startswith("Use `"):
        return
    text = inspect.getdoc(thing) or ""
    assert taken_by(inspect.signature(thing)) - told(text, thing) == set()


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
