"""The process boundary: a service that hosts devices, and clients that see them as if they were local.

`start_child` is what most programs need. The protocol: docs/internals/protocol.md.
"""

from __future__ import annotations

from .._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
