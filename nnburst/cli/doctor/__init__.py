"""`nnburst doctor`: what this machine offers a burst, and what to do about what it lacks."""

from __future__ import annotations

from ._checks import CHECKS, EXTRAS, Finding, Level, all_checks
from ._command import doctor

__all__ = ["CHECKS", "EXTRAS", "Finding", "Level", "all_checks", "doctor"]
