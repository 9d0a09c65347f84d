"""Sessions on many machines, by way of engines that do that for a living."""

from __future__ import annotations

__all__: list[str] = []
