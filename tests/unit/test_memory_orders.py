"""The memory orders of the C core: where they are spelled, and that each is checked."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

SPELLS_AN_ATOMIC = re.compile(r"\b(__atomic_\w+|__sync_\w+|_Atomic|atomic_\w+|memory_order\w*|stdatomic)\b")


def test_one_header_owns_every_atomic() -> None:
    sources = [*(ROOT / "csrc").iterdir(), *(ROOT / "nnburst" / "_core").iterdir()]
    texts = {path.name: path.read_text(encoding="utf-8") for path in sources if path.suffix in (".c", ".h", ".py")}
    texts.pop("_nnburst.c", None)  # what cffi generates
    assert {name for name, text in texts.items() if SPELLS_AN_ATOMIC.search(text)} == {"nnb_atomic.h"}
