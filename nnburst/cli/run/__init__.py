"""`nnburst run`: run a model file once, in a service process."""

from __future__ import annotations

from .command import run

__all__ = ["run"]
