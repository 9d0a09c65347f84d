"""The commands around shared services: ``nnburst serve``, ``nnburst ls``, ``nnburst stop``."""

from __future__ import annotations

from ._command import serve
from ._control import ls, stop

__all__ = ["ls", "serve", "stop"]
