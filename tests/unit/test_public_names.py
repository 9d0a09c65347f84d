"""What `__all__` promises is there, and what the packaging names is there."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import pydoc
from pathlib import Path
from types import ModuleType

import pytest

import nnburst
from support import ROOT, usable_devices


def module_names() -> list[str]:
    walked = pkgutil.walk_packages(nnburst.__path__, "nnburst.", onerror=pytest.fail)
    left_out = ("__main__", ".scale.ray")  # the second needs Ray, which these tests do without
    return ["nnburst", *(found.name for found in walked if not found.name.endswith(left_out))]


MODULES = module_names()


def imported(name: str) -> ModuleType:
    return importlib.import_module(name)


PACKAGES = [name for name in MODULES if hasattr(imported(name), "__path__")]


@pytest.mark.parametrize("name", PACKAGES)
def test_package_has_public_names_only_in_its_stub(name: str) -> None:
    """All other packages sort modules for the inside, and say what they are for."""
    module = imported(name)
    assert module.__doc__
    assert hasattr(module, "__all__") == Path(module.__path__[0], "__init__.pyi").exists()


def test_dir_shows_public_names_and_no_helpers() -> None:
    rooms = {"burst", "devices", "errors", "fmq", "memory", "model", "nnapi", "runtime", "watch"}
    assert {*dir(nnburst)} == {*nnburst.__all__, *rooms}


@pytest.mark.parametrize("name", [name for name in PACKAGES if hasattr(imported(name), "__all__")])
def test_help_can_show_what_a_class_takes(name: str) -> None:
    """Names in the annotations of a value exist at run time, where `help` looks them up."""
    for entry in imported(name).__all__:
        if isinstance(getattr(imported(name), entry), type):
            pydoc.render_doc(getattr(imported(name), entry))


def test_no_two_classes_share_a_name() -> None:
    """One noun, one name: a reader need not ask which of two is meant. Some rooms are read on their own."""
    places: dict[str, list[str]] = {}
    for path in (ROOT / "nnburst").rglob("*.py"):
        if not {"cli", "compat", "nnapi"} & {*path.parts}:
            for name in {
                node.name for node in ast.parse(path.read_text("utf-8")).body if isinstance(node, ast.ClassDef)
            }:
                places.setdefault(name, []).append(str(path.relative_to(ROOT)))
    assert {name: found for name, found in places.items() if len(found) > 1 and not name.startswith("_")} == {}


def pyproject() -> dict[str, dict[str, dict[str, dict[str, str]]]]:
    tomllib = pytest.importorskip("tomllib", reason="CPython >= 3.11 reads TOML")
    with open(ROOT / "pyproject.toml", "rb") as file:
        return tomllib.load(file)


def test_entry_points_of_pyproject_resolve() -> None:
    project = pyproject()["project"]
    for target in (*project["scripts"].values(), *project["entry-points"]["nnburst.devices"].values()):
        module, _, attribute = target.partition(":")
        assert callable(getattr(importlib.import_module(module), attribute)), target


def test_device_entry_points_carry_the_names_of_their_devices() -> None:
    targets = pyproject()["project"]["entry-points"]["nnburst.devices"]
    for name in usable_devices():
        module, _, attribute = targets[name].partition(":")
        device = getattr(importlib.import_module(module), attribute)()
        try:
            assert device.name == name
        finally:
            device.close()


def test_package_is_marked_as_typed() -> None:
    assert Path(nnburst.__path__[0], "py.typed").exists()
