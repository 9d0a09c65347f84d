"""`nnburst doctor`: what this machine offers a burst, and what to do about what it lacks."""

from __future__ import annotations

from ._checks import CHECKS, Finding, Level
from ._command import doctor

__all__ = ["CHECKS", "Finding", "Level", "doctor"]
