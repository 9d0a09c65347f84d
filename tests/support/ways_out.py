"""The table of ways out of a sandbox (`tests/faults/ways_out.c`), compiled as a library that a device loads."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from nnburst._core._nnburst import lib
from support import ROOT

SOURCE = ROOT / "tests" / "faults" / "ways_out.c"
COMPILER = shutil.which("cc") or shutil.which("gcc")
WALLS = lib.nnb_landlock_version() >= 6 and os.uname().machine in ("x86_64", "aarch64")
REFUSALS = {errno.EPERM, errno.EACCES, errno.ENOSYS}

needs_walls = pytest.mark.skipif(not WALLS, reason="this kernel has not all walls")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C compiler")

NATIVE = """
import ctypes, errno, os
from pathlib import Path
import numpy as np
from nnburst.devices.function import Tensor, declare

here = Path(__file__).parent.parent
library = ctypes.CDLL(str(here / "code" / "ways_out.so"))
library.begin(str(here).encode(), int((here / "client").read_text()))
ONE = dict(inputs=[Tensor("x", "float32", (1,))], outputs=[Tensor("y", "int32", (1,))])

@declare(**ONE)
def attempt(x):
    return np.array([library.try_way(int(x[0]))], np.int32)

@declare(**ONE)
def deadly(x):
    return np.array([library.try_deadly(int(x[0]))], np.int32)
"""


def names() -> list[str]:
    """Return the names of the table's rows, read from the source, so that test ids need no compiler."""
    return [line.split("(")[1].split(",")[0] for line in SOURCE.read_text().splitlines() if line.startswith("    X(")]


def build(place: Path) -> Path:
    """Make the files that the table uses: a private folder with a secret, and a code folder with the library."""
    (place / "private").mkdir(parents=True)
    (place / "private" / "secret").write_text("secret")
    (place / "private" / "removed").write_text("")
    (place / "code").mkdir()
    (place / "code" / "module.py").write_text("x = 1\n")
    (place / "code" / "module.py.link").symlink_to(place / "private" / "secret")
    (place / "code" / "native.py").write_text(NATIVE)
    (place / "client").write_text(str(os.getpid()))
    assert COMPILER is not None
    subprocess.run(
        [COMPILER, "-shared", "-fPIC", "-w", "-o", str(place / "code" / "ways_out.so"), str(SOURCE)], check=True
    )
    return place
