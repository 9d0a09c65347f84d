"""Nothing that ONNX Runtime did not write is handed out, whatever dimension is 0."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx_support import FLOAT, TensorProto, graph, node
from onnx_zero_sized import compare

import nnburst
from nnburst.devices.onnxruntime._graph import parse
from nnburst.devices.onnxruntime._unwritten import write_all

NOT_WRITTEN = (
    "plain,in_if,in_loop,in_function,added,new_axis,matmulinteger,qlinearmatmul,concat_2d,convinteger,lstm_,gru_,"
    "scan,attention_local_window_with_past"
)
"""Cases of operators that ONNX Runtime does not write all results of."""


@pytest.mark.timeout(600)
def test_results_of_sizes_of_zero_do_not_depend_on_what_memory_held(tmp_path: Path) -> None:
    ran, different = compare(tmp_path, NOT_WRITTEN, 0)
    assert not different
    assert ran >= 200


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_results_of_no_operator_with_sizes_of_zero_depend_on_what_memory_held(tmp_path: Path) -> None:
    ran, different = compare(tmp_path, "", 200)
    print(f"{ran} cases ran")
    assert not different
    assert ran >= 8000
