"""The commands for shared services: ``nnburst serve``, ``nnburst ls``, ``nnburst kick``, ``nnburst stop``."""
