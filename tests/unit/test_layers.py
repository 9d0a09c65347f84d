"""The rooms import only downwards, without cycles, and only what is installed with the package."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support import ROOT

PACKAGE = ROOT / "nnburst"

ROOMS = (  # lowest first; "" is nnburst/__init__.py, which re-exports what users call
    "_lazy",
    "_version",
    "errors",
    "options",
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
    "",
    "onnx_backend",
    "gateway",
    "scale",
    "testing",
    "cli",
    "__main__",
)
EXTRAS = {
    "nnburst.gateway.grpc": {"google", "grpc", "grpc_health", "grpc_reflection", "tritonclient"},
    "nnburst.gateway.rest": {"aiohttp"},
    "nnburst.scale.ray": {"ray"},
    "nnburst.testing.pytest_plugin": {"pytest"},
}
"""Modules that subclass or decorate what an extra brings, imported by those who use it."""
CORE_DEPENDENCIES = {"cffi", "numpy", "posix_ipc", "cryptography", "msgspec", "click", "rich"}


def is_type_checking(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def imports_in(body: list[ast.stmt], *, lazy: bool, typing: bool = False) -> Iterator[ast.Import | ast.ImportFrom]:
    """Yield the imports that run, with or without those inside functions and those for type checkers alone."""
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif is_type_checking(node) and not typing:
            assert isinstance(node, ast.If)
            yield from imports_in(node.orelse, lazy=lazy)
        elif lazy or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for field in ("body", "orelse", "finalbody"):
                yield from imports_in(getattr(node, field, []), lazy=lazy, typing=typing)
            for handler in getattr(node, "handlers", []):
                yield from imports_in(handler.body, lazy=lazy, typing=typing)


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

    def imported(self, modules: set[str], *, lazy: bool, typing: bool = False) -> set[str]:
        """Return imported names; a name of this package is the module or package that is executed."""
        found: set[str] = set()
        for node in imports_in(self.tree.body + self.names * lazy, lazy=lazy, typing=typing):
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


MODULES = {module.name: module for module in map(Module, sorted(PACKAGE.rglob("*.py")))}


def inside(names: set[str]) -> set[str]:
    return {name for name in names if name.split(".")[0] == "nnburst"}


@pytest.mark.parametrize("name", MODULES)
def test_module_imports_only_from_its_own_room_and_those_below(name: str) -> None:
    module = MODULES[name]
    assert module.room in ROOMS, f"{module.room} is no room of the design: add it to ROOMS at its place"
    rank = ROOMS.index(module.room)
    for target in inside(module.imported(set(MODULES), lazy=True, typing=True)):
        assert target in MODULES or target == "nnburst._core._nnburst", f"{name} imports {target}, which does not exist"
        room = [*target.split("."), ""][1]
        assert ROOMS.index(room) <= rank, f"{name} imports {target}: from a room above its own"


KNOWN_CIRCLES: dict[str, int] = {}
"""Modules in circles, for each room that still has some. No number grows, and a room without circles has no line."""


def circles(*, lazy: bool, typing: bool) -> dict[str, set[str]]:
    """Return the modules that import themselves by way of others, by room."""
    names = set(MODULES)
    edges = {
        name: (inside(module.imported(names, lazy=lazy, typing=typing)) & names) - {name}
        for name, module in MODULES.items()
    }
    found: dict[str, set[str]] = {}
    for name in names:
        reached: set[str] = set()
        ahead = [*edges[name]]
        while ahead:
            if (target := ahead.pop()) not in reached:
                reached.add(target)
                ahead += edges[target]
        if name in reached:
            found.setdefault(MODULES[name].room, set()).add(name)
    return found


def test_modules_import_each_other_without_circles() -> None:
    assert circles(lazy=False, typing=False) == {}


def test_what_only_types_or_functions_import_makes_no_circle_either() -> None:
    """Modules of a circle are read all at once or not at all, whatever breaks it at run time."""
    found = circles(lazy=True, typing=True)
    grown = {room: sorted(names) for room, names in found.items() if len(names) > KNOWN_CIRCLES.get(room, 0)}
    assert not grown, "these modules import each other"
    assert KNOWN_CIRCLES.keys() <= found.keys(), "take the room's line out of KNOWN_CIRCLES"


@pytest.mark.parametrize("name", MODULES)
def test_module_needs_only_core_dependencies_when_imported(name: str) -> None:
    tops = {target.split(".")[0] for target in MODULES[name].imported(set(MODULES), lazy=False)}
    allowed = CORE_DEPENDENCIES | set(sys.stdlib_module_names) | {"nnburst"} | EXTRAS.get(name, set())
    assert tops <= allowed, f"{name} imports {sorted(tops - allowed)} at import time: extras are imported where used"


def test_import_nnburst_leaves_the_command_line_libraries_alone() -> None:
    code = "import nnburst, sys; print(sorted({'click', 'rich', 'matplotlib', 'pytest'} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60, cwd=ROOT
    )
    assert done.stdout.strip() == "[]"
