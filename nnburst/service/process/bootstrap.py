"""The file that a process of this package runs first. It sets the module search path before it imports anything.

Its first argument names the module whose `main` is called. It is run by its path, under ``python -P``, so that no
module comes from the working directory, which may contain any file beside a downloaded model.
"""

from __future__ import annotations

import sys


def _start() -> int:
    import gc
    import os
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    gc.disable()  # imports make hardly any garbage
    # Use the client's package, even if another is installed. Libraries are searched as usual, and last
    # beside the package, where `pip install --target` puts them.
    root = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", "..", ".."))
    sys.path.append(root)
    spec = PathFinder.find_spec("nnburst", [root])
    assert spec is not None
    assert spec.loader is not None
    sys.modules["nnburst"] = module_from_spec(spec)
    spec.loader.exec_module(sys.modules["nnburst"])

    from importlib import import_module

    main = import_module(sys.argv.pop(1)).main
    gc.freeze()  # imported objects stay: later collections skip them
    gc.enable()
    status: int = main()
    return status


if __name__ == "__main__":
    sys.exit(_start())
