"""The version of this package; pyproject.toml reads it from here, too."""

VERSION = "0.1.0"
