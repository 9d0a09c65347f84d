"""Lazy imports: a package's public names are imported at their first use (PEP 562).

A package's stub, `__init__.pyi`, imports the package's public names. Type checkers and `attach` read the stub.
Modules of nnburst import a name from the module that defines the name.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from importlib import import_module

_LINE = re.compile(r"^from (\S+) import (\w+) as \2$", re.MULTILINE)


def attach(room: str) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` for the package `room`. `__all__` contains no modules."""
    package = sys.modules[room]
    path = os.path.join(package.__path__[0], "__init__.pyi")
    try:
        with open(path, encoding="utf-8") as stub:
            owners = {name: module for module, name in _LINE.findall(stub.read())}
    except OSError as error:
        raise ImportError(f"{path} cannot be read; have what packs nnburst take its *.pyi files along") from error

    def __getattr__(name: str) -> object:
        if name not in owners:
            raise AttributeError(f"module {room!r} has no attribute {name!r}")
        if owners[name] == ".":
            return import_module("." + name, room)
        folder = owners[name].rpartition(".")[0]
        if folder.strip("."):  # Without this import, two threads could deadlock.
            import_module(folder, room)
        value = getattr(import_module(owners[name], room), name)
        setattr(package, name, value)
        return value

    def __dir__() -> list[str]:
        return sorted({*owners, *package.__all__})

    return __getattr__, __dir__, sorted(name for name, module in owners.items() if module != ".")
