"""The `nnburst` command as `python -P -m nnburst`, also where no script is installed.

Without ``-P``, Python takes modules from the working directory first, as for any program.
"""

from .cli import main

main(prog_name="nnburst")
