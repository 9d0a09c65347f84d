"""What builds wheels, where no compiler is needed for it."""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any

import pytest
from wheels import unpack


def test_sdist_is_unpacked_also_by_a_python_without_filters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CPython 3.10.11, 3.11.3 and older: Debian 12 has 3.11.2."""
    usual = tarfile.TarFile.extractall

    def old(self: Any, path: Any = ".", members: Any = None, *, numeric_owner: bool = False) -> None:
        usual(self, path, members, numeric_owner=numeric_owner)

    monkeypatch.setattr(tarfile.TarFile, "extractall", old)
    tree = tmp_path / "nnburst-1.0"
    (tree / "csrc").mkdir(parents=True)
    (tree / "csrc" / "nnburst.h").write_text("text")
    sdist = tmp_path / "nnburst-1.0.tar.gz"
    with tarfile.open(sdist, "w:gz") as archive:
        archive.add(tree, tree.name)
    unpacked = unpack(sdist, tmp_path / "work")
    assert unpacked == tmp_path / "work" / "nnburst-1.0"
    assert (unpacked / "csrc" / "nnburst.h").read_text() == "text"
