"""The `nnburst` command for `python -P -m nnburst`, which works without an installed script.

Without ``-P``, Python searches the working directory for modules first.
"""

from .cli import main

main(prog_name="nnburst")
