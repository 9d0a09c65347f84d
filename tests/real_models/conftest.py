"""A service with ONNX Runtime alone, for each module that has none of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import nnburst


@pytest.fixture(scope="module")
def service() -> Iterator[nnburst.Service]:
    with nnburst.launch(devices=["nnburst-onnxruntime:threads=1"]) as service:
        yield service
