"""What users call: sessions, services, and the NNAPI life cycle below them."""

from __future__ import annotations

from .._lazy import attach
from .launch import launch  # noqa: F401 (at once: read later, the module would take the place of the function)

__getattr__, __dir__, __all__ = attach(__name__)
