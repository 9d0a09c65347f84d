"""`nnburst doctor`: check whether this machine suits bursts, and recommend remedies."""

from __future__ import annotations

from .checks import CHECKS, EXTRAS, Finding, Level, all_checks
from .command import doctor

__all__ = ["CHECKS", "EXTRAS", "Finding", "Level", "all_checks", "doctor"]
