"""`python -P -m nnburst` is the `nnburst` command, also where no script is installed.

Without ``-P``, Python takes modules from the working directory first, as for any program.
"""

from .cli import main

main(prog_name="nnburst")
