"""`python -m nnburst.cli` is the `nnburst` command, also where no script is installed."""

from . import main

main(prog_name="nnburst")
