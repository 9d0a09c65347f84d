"""The version of this package, for every file that needs it (pyproject.toml reads it from here, too)."""

VERSION = "0.1.0"
