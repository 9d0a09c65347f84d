"""`python -m nnburst` is the `nnburst` command, also where no script is installed."""

from .cli import main

main(prog_name="nnburst")
