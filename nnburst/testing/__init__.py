"""For tests of programs that use nnburst: faults on order, and a check that nothing is left behind.

``nnburst.testing.pytest_plugin`` makes fixtures of them; pytest loads it by itself.
"""

from __future__ import annotations

from ._inject import Fault, inject
from ._leaks import Snapshot, assert_nothing_left

__all__ = ["Fault", "Snapshot", "assert_nothing_left", "inject"]
