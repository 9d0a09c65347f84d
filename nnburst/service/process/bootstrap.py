"""The first file that a process of this package runs. It sets the module search path, and calls a module's `main`.

The first argument names the module. ``python -P`` runs this file by its path, so that no module comes from the working
directory.
"""

from __future__ import annotations

import sys


def _start() -> int:
    import gc
    import os
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    gc.disable()  # imports make hardly any garbage
    # Use the client's package, even if another is installed. Search libraries as usual, and at last beside the
    # package, where `pip install --target` puts them.
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
