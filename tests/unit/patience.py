"""How long tests wait for what must come. It ends a hang and judges no speed, so a slow machine may have more."""

from __future__ import annotations

import os

PATIENCE = float(os.environ.get("NNBURST_TEST_PATIENCE", "30"))
"""Seconds. `make test-aarch64` sets the variable, since an emulator is slow and may be stopped for minutes. The C tests
know it, too (`tests/c/check.h`)."""
