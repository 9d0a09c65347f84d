"""Names of a room whose modules are read when a name is first used (PEP 562).

A client needs a part of most rooms: the sessions of `nnburst.runtime` name the devices' interface, and none of the
kernels behind it. So a room's `__init__` says the same twice: in imports, which type checkers read, and in a table,
which runs. A test holds that they agree.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module

__all__ = ["attach"]


def attach(room: str, modules: Mapping[str, str]) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of the package `room`.

    Args:
        room: Its `__name__`.
        modules: For each module, relative to the room, the names that the room takes from it, in one string. The
            names of "." are modules themselves.
    """
    owners = {name: module for module, names in modules.items() for name in names.split()}

    def __getattr__(name: str) -> object:
        if name not in owners:
            raise AttributeError(f"module {room!r} has no attribute {name!r}")
        if owners[name] == ".":
            return import_module("." + name, room)
        folder = owners[name].rpartition(".")[0]
        if folder.strip("."):  # a folder comes before what is in it, or two threads may wait for each other
            import_module(folder, room)
        value = getattr(import_module(owners[name], room), name)
        setattr(sys.modules[room], name, value)
        return value

    def __dir__() -> list[str]:
        return sorted({*vars(sys.modules[room]), *owners})

    return __getattr__, __dir__
