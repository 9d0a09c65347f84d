"""The commands around shared services: ``nnburst serve``, ``nnburst ls``, ``nnburst kick``, ``nnburst stop``."""

from __future__ import annotations

from .command import serve
from .control import kick, ls, stop

__all__ = ["kick", "ls", "serve", "stop"]
