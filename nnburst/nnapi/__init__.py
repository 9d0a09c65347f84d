"""NNAPI step by step: compilations, executions with arguments set one by one, events, memory domains."""

from .._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
