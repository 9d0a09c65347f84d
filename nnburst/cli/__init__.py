"""The `nnburst` command. Each subcommand is imported only when it runs."""

from ._main import main as main
