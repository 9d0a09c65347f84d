"""The version of this package. The build reads it from here, as pyproject.toml says."""

VERSION = "0.1.0"
