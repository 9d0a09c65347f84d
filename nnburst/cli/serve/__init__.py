"""The commands around shared services: ``nnburst serve``, ``nnburst ls``, ``nnburst kick``, ``nnburst stop``."""

from __future__ import annotations

from ._command import serve
from ._control import kick, ls, stop

__all__ = ["kick", "ls", "serve", "stop"]
