"""The file that a process of this package runs: it decides where modules come from, before it imports any.

Its first argument names the module whose `main` is called. It runs by its own path, under ``python -P``: no module
comes from the working directory. That directory belongs to whatever the client works on, and may hold any file beside
a downloaded model.
"""

from __future__ import annotations

import sys


def _start() -> int:
    import gc
    import os
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    gc.disable()  # imports leave next to nothing to collect
    # The package that the client uses, even if another is installed; its libraries are looked for as usual, and last
    # beside it, where `pip install --target` puts them.
    root = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", "..", ".."))
    sys.path.append(root)
    spec = PathFinder.find_spec("nnburst", [root])
    assert spec is not None
    assert spec.loader is not None
    sys.modules["nnburst"] = module_from_spec(spec)
    spec.loader.exec_module(sys.modules["nnburst"])

    from importlib import import_module

    main = import_module(sys.argv.pop(1)).main
    gc.freeze()  # imports stay: no later collection looks at them
    gc.enable()
    status: int = main()
    return status


if __name__ == "__main__":
    sys.exit(_start())
