"""`nnburst bench`: round trips of this package and of its peers, side by side in one run (docs/benchmarks.md)."""

from __future__ import annotations

from .command import bench

__all__ = ["bench"]
