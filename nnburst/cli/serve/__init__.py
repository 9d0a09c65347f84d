"""The commands around shared services: ``nnburst serve``, ``nnburst ls``, ``nnburst kick``, ``nnburst stop``."""
