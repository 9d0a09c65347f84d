"""The `nnburst` command, as `python -P -m nnburst`. Without ``-P``, Python searches the working directory first."""

from .cli import main

main(prog_name="nnburst")
