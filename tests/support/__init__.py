"""What tests of many files share. A helper of one file stays there."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
"""The tree."""
