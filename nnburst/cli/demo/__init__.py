"""`nnburst demo`: the main job on real input, side by side with `multiprocessing.Pipe`."""

from __future__ import annotations

from .command import demo

__all__ = ["demo"]
