"""Entry point of `python -P -m nnburst`. Without ``-P``, Python searches the working directory for modules first."""

from .cli import main

main(prog_name="nnburst")
