"""The rooms import only downwards, without cycles, and what is installed; what `__all__` promises is there."""

from __future__ import annotations

import ast
import graphlib
import importlib
import importlib.util
import pkgutil
import pydoc
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import nnburst
from support import ROOT, usable_devices

PACKAGE = ROOT / "nnburst"

ROOMS = (  # lowest first; "" is nnburst/__init__.py, which re-exports what users call
    "_lazy",
    "_version",
    "errors",
    "_options",
    "_core",
    "watch",
    "fmq",
    "model",
    "memory",
    "cache",
    "blobs",
    "burst",
    "devices",
    "service",
    "runtime",
    "nnapi",
    "",
    "compat",
    "gateway",
    "scale",
    "testing",
    "cli",
    "__main__",
)
EXTRAS = {
    "nnburst.gateway.grpc": {"google", "grpc", "grpc_health", "grpc_reflection"},
    "nnburst.gateway.listen": {"aiohttp"},
    "nnburst.gateway.metrics": {"aiohttp"},
    "nnburst.gateway.rest": {"aiohttp"},
    "nnburst.scale.ray": {"ray"},
    "nnburst.testing.pytest_plugin": {"pytest"},
}
"""Modules that subclass or decorate what an extra brings, imported by those who use it."""
CORE_DEPENDENCIES = {"cffi", "numpy", "posix_ipc", "cryptography", "msgspec", "click", "rich"}


def imports_in(body: list[ast.stmt], *, lazy: bool) -> Iterator[ast.Import | ast.ImportFrom]:
    """Yield the imports that run, with or without those inside functions."""
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from imports_in(node.orelse, lazy=lazy)
        elif lazy or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for field in ("body", "orelse", "finalbody"):
                yield from imports_in(getattr(node, field, []), lazy=lazy)
            for handler in getattr(node, "handlers", []):
                yield from imports_in(handler.body, lazy=lazy)


class Module:
    """A source file and the absolute names that it imports."""

    def __init__(self, path: Path) -> None:
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        self.is_package = parts[-1] == "__init__"
        self.name = ".".join(parts[:-1] if self.is_package else parts)
        text = path.read_text(encoding="utf-8")
        self.tree = ast.parse(text, str(path))
        stub = path.with_suffix(".pyi")
        self.names = ast.parse(stub.read_text(encoding="utf-8") if self.is_package and stub.exists() else "").body
        """The imports of a room's public names, which run when a name is used."""

    @property
    def room(self) -> str:
        return [*self.name.split("."), ""][1]

    def imported(self, modules: set[str], *, lazy: bool) -> set[str]:
        """Return imported names; a name of this package is the module or package that is executed."""
        found: set[str] = set()
        for node in imports_in(self.tree.body + self.names * lazy, lazy=lazy):
            if isinstance(node, ast.Import):
                found.update(alias.name for alias in node.names)
                continue
            base = node.module or ""
            if node.level:
                package = self.name if self.is_package else self.name.rpartition(".")[0]
                base = importlib.util.resolve_name("." * node.level + base, package)
            for alias in node.names:
                submodule = f"{base}.{alias.name}"
                found.add(submodule if submodule in modules else base)
        return found


@pytest.fixture(scope="module")
def modules() -> dict[str, Module]:
    return {module.name: module for module in map(Module, sorted(PACKAGE.rglob("*.py")))}


def inside(names: set[str]) -> set[str]:
    return {name for name in names if name.split(".")[0] == "nnburst"}


def test_modules_import_only_from_their_own_room_and_those_below(modules: dict[str, Module]) -> None:
    assert {module.room for module in modules.values()} == set(ROOMS), "ROOMS has each room of the design at its place"
    for name, module in modules.items():
        rank = ROOMS.index(module.room)
        for target in inside(module.imported(set(modules), lazy=True)) - {"nnburst._core._nnburst"}:
            assert target in modules, f"{name} imports {target}, which does not exist"
            assert ROOMS.index(modules[target].room) <= rank, f"{name} imports {target}: from a room above its own"


def test_modules_import_each_other_without_circles(modules: dict[str, Module]) -> None:
    names = set(modules)
    edges = {name: (inside(module.imported(names, lazy=False)) & names) - {name} for name, module in modules.items()}
    graphlib.TopologicalSorter(edges).prepare()  # raises CycleError, which names the circle


def test_modules_need_only_core_dependencies_when_imported(modules: dict[str, Module]) -> None:
    for name, module in modules.items():
        tops = {target.split(".")[0] for target in module.imported(set(modules), lazy=False)}
        allowed = CORE_DEPENDENCIES | set(sys.stdlib_module_names) | {"nnburst"} | EXTRAS.get(name, set())
        assert tops <= allowed, f"{name} imports {sorted(tops - allowed)} when it is imported, not when used"


def test_modules_import_names_from_the_modules_that_define_them(modules: dict[str, Module]) -> None:
    """A room's public names are for programs; only they are looked up in its stub."""
    rooms = {name for name, module in modules.items() if module.names}
    modules = {name: module for name, module in modules.items() if name != "nnburst"}
    taken = {name: module.imported(set(modules), lazy=True) & rooms for name, module in modules.items()}
    assert {name: found for name, found in taken.items() if found} == {}


# ---- public names --------------------------------------------------------------------------------------------------


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
