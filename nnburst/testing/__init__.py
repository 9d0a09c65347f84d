"""For tests of programs that use nnburst: faults on order, time that passes at once, and leaks.

``nnburst.testing.pytest_plugin`` makes fixtures of them; pytest loads it by itself.
"""

from __future__ import annotations

from ._inject import Fault, inject
from .clock import FakeClock
from .leaks import Snapshot, assert_nothing_left

__all__ = ["FakeClock", "Fault", "Snapshot", "assert_nothing_left", "inject"]
