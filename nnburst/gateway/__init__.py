"""The Open Inference Protocol (version 2) in front of a shared service: gRPC and REST. Needs the extra ``oip``."""

from __future__ import annotations

from .._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
