"""Help for tests of programs that use nnburst: faults on order, time that passes at once, leaks.

``nnburst.testing.pytest_plugin`` makes fixtures of them; pytest loads it by itself.
"""

from __future__ import annotations

from .._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
