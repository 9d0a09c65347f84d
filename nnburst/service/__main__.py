"""``python -m nnburst.service``: see `_child`."""

from __future__ import annotations

import sys

from ._child import main

if __name__ == "__main__":
    sys.exit(main())
