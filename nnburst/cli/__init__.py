"""The `nnburst` command. Each subcommand is imported only when it runs."""

from __future__ import annotations

from ._main import main

__all__ = ["main"]
