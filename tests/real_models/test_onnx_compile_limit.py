"""A model that takes too long to compile ends its process, which is that of its user alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import nnburst
from nnburst.errors import DeadObject, InvalidArgument
from support.models import relu
from support.services import shared_service

pytest.importorskip("onnxruntime", reason="needs the extra nnburst[onnx]")
from onnx import TensorProto, helper, numpy_helper

from support.onnx_models import save

pytestmark = pytest.mark.leaks("onnxruntime keeps files open once it was imported")
SIZE, STEPS = 3000, 400
"""A product of constants takes a good second; together they take many minutes."""


def endless() -> object:
    """A small file whose constants ONNX Runtime folds for a very long time."""
    shape = numpy_helper.from_array(np.array([SIZE, SIZE]), "shape")
    nodes = [helper.make_node("ConstantOfShape", ["shape"], ["c0"], value=helper.make_tensor("v", 1, [1], [1e-3]))]
    nodes += [helper.make_node("MatMul", [f"c{i}", "c0"], [f"c{i + 1}"]) for i in range(STEPS)]
    nodes += [
        helper.make_node("ReduceMax", [f"c{STEPS}"], ["m"], keepdims=0),
        helper.make_node("Add", ["x", "m"], ["y"]),
    ]
    ends = [[helper.make_tensor_value_info(name, TensorProto.FLOAT, [4])] for name in "xy"]
    graph = helper.make_graph(nodes, "endless", *ends, [shape])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.fixture
def model(tmp_path: Path) -> str:
    return save(endless(), tmp_path / "endless.onnx")


def test_child_that_compiles_too_long_ends_and_says_why(model: str) -> None:
    assert Path(model).stat().st_size < 50_000
    with nnburst.launch(max_compile=0.5) as service:
        with pytest.raises(DeadObject, match=r"longer than 0.5 s to compile.*--max-compile"):
            service.session(model, open_timeout=None)
        assert not service.alive


@pytest.mark.check
def test_user_whose_model_compiles_too_long_disturbs_no_named_model(model: str, tmp_path: Path) -> None:
    (tmp_path / "functions.py").write_text(
        "from nnburst.devices.function import Tensor, declare\n"
        "@declare(inputs=[Tensor('x', 'float32', (4,))], outputs=[Tensor('y', 'float32', (4,))])\n"
        "def same(x): return x\n"
    )
    options = ("--device", "nnburst-onnxruntime", "--device", "nnburst-reference", f"{tmp_path}/functions.py:same")
    with shared_service(tmp_path, *options, "--max-compile", "3") as shared:
        with nnburst.connect(shared.address) as service, service.session("same") as named:
            with pytest.raises(DeadObject, match="longer than 3 s to compile"):
                service.session(model)
            assert named.run(None, {"x": np.ones(4, np.float32)})[0].tolist() == [1] * 4
            with service.session(relu((1, 4)), device="nnburst-reference") as again:
                again.run(None, {"x": np.ones((1, 4), np.float32)})
    assert "longer than 3 s to compile" in shared.log.read_text()


def test_limit_that_is_none_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="max_compile=0"):
        nnburst.launch(max_compile=0)
