"""Torch modules as models: exported to ONNX, or run by torch in the service; tensors go in and out without a copy."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest

import nnburst
from nnburst import InvalidArgument

torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript")
pytest.importorskip("cloudpickle")
pytestmark = [pytest.mark.check, pytest.mark.filterwarnings("ignore"), pytest.mark.leaks("torch's own threads")]
ONNX, FUNCTION = "nnburst-onnxruntime", "nnburst-function"
X = torch.linspace(-1, 1, 12).reshape(3, 4)


class Net(torch.nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.first, self.dropout = torch.nn.ReLU(inplace=True), torch.nn.Dropout()
        self.linear = torch.nn.Linear(4, 2)

    def forward(self, x: Any, y: Any = None) -> Any:
        z = self.dropout(self.linear(self.first(x)))
        return z if y is None else (z + y, x)


class Sorted(torch.nn.Module):  # type: ignore[misc, name-defined]
    """A module that depends on values, which no export takes."""

    def forward(self, x: Any) -> Any:
        return {"sorted": x.new_tensor(sorted(x.flatten().tolist())), "n": torch.tensor(x.numel())}


@pytest.mark.parametrize("device", [None, ONNX, FUNCTION])
@pytest.mark.parametrize("examples", [X, (X,), [X, torch.ones(3, 2)], {"x": X, "y": torch.ones(3, 2)}])
def test_module_gives_what_it_gives_here(device: Any, examples: Any) -> None:
    module = Net()
    given = examples if isinstance(examples, dict) else {"x": X, "y": torch.ones(3, 2)}
    with nnburst.Session(module, examples, device=device) as session:
        names = [each.name for each in session.get_inputs()]
        found = session.run(None, {name: given[name] for name in names})
        assert session.device.name == (device or ONNX)
    assert module.training
    assert module.dropout.training
    wanted = module.eval()(*(given[name].clone() for name in names))
    for mine, theirs in zip(found, wanted if len(names) == 2 else (wanted,), strict=True):
        np.testing.assert_allclose(mine, theirs.detach().numpy(), rtol=1e-6, atol=1e-6)


def test_module_that_cannot_be_exported_runs_in_torch_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "nnburst.torch"), nnburst.Session(Sorted(), X) as session:
        assert session.device.name == FUNCTION
        values, n = session.run(None, {"x": X.flip(0)})
    assert (values.tolist(), n) == (X.flatten().tolist(), 12)
    said = [record.getMessage() for record in caplog.records if record.name == "nnburst.torch"]
    assert len(said) == 1
    assert said[0].startswith("torch itself runs Sorted in the service, as torch.onnx.export() fails: ")
    with pytest.raises(InvalidArgument, match=r"^torch\.onnx\.export\(\) fails for Sorted: "):
        nnburst.Session(Sorted(), X, device=ONNX)


def test_module_on_another_service_is_data_or_refused() -> None:
    with nnburst.in_process() as service:
        with service.session(torch.nn.Linear(4, 2), X) as session:
            assert session.device.name == ONNX
        with pytest.raises(InvalidArgument, match="'Sorted' is code"):
            service.session(Sorted(), X)


@pytest.mark.parametrize(
    ("module", "examples", "says"),
    [
        (Net(), None, r"Session\(module, tensor\)"),
        (Net(), torch.ones(5, 5), "the module fails with these examples: RuntimeError: mat1"),
        (torch.nn.LSTM(4, 2), X, "the module returns.*'tuple'.*have it return tensors"),
    ],
)
def test_module_without_fitting_examples_or_outputs_is_refused(module: Any, examples: Any, says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        nnburst.Session(module, examples)


def test_module_that_cannot_be_sent_says_what_to_give() -> None:
    with pytest.raises(InvalidArgument, match="a ScriptModule; give the module that it was made from"):
        nnburst.Session(torch.jit.trace(torch.nn.Linear(4, 2), X), X)
    with pytest.raises(InvalidArgument, match="example 'y' is 3; give a tensor"):
        nnburst.Session(Net(), (X, 3), device=FUNCTION)


def test_bits_of_types_that_numpy_lacks_go_in() -> None:
    class Sum(torch.nn.Module):  # type: ignore[misc, name-defined]
        def forward(self, x: Any) -> Any:
            return x.float().sum()

    x = X.to(torch.bfloat16)
    with nnburst.in_process() as service, service.session(Sum(), x) as session:
        assert session.run(None, {"x": x})[0] == x.float().sum().item()
    with pytest.raises(InvalidArgument, match="'x' has dtype 'bfloat16'"):
        nnburst.Session(Sum(), x, device=FUNCTION)


def relu() -> Any:
    b = nnburst.ModelBuilder()
    b.output("y", b.relu(b.input("x", "float32", (3, 4))))
    return b.build()


def test_tensors_of_torch_lie_in_shared_memory() -> None:
    with nnburst.in_process() as service, service.session(relu()) as session, nnburst.Memory.ashmem(48) as memory:
        with session.bind() as execution:
            x, y = torch.from_dlpack(execution.inputs["x"]), torch.from_dlpack(execution.outputs["y"])
            torch.sin(X, out=x)
            execution.run()
            assert torch.equal(y, torch.sin(X).relu())
            del x, y
        x = torch.from_dlpack(memory.array(np.float32, (3, 4)))
        with session.bind(memory={"x": x}) as execution:
            x.copy_(X)
            execution.run()
            assert execution.outputs["y"].tolist() == X.relu().tolist()
        del x
        assert torch.from_dlpack(session.run(None, {"x": X})[0]).equal(X.relu())
        with pytest.raises(InvalidArgument, match=r"'x' cannot be made an array: .*detach"):
            session.run(None, {"x": X.clone().requires_grad_()})


def test_arrays_of_jax_go_in_and_come_out() -> None:
    jax = pytest.importorskip("jax")
    with nnburst.in_process() as service, service.session(relu()) as session:
        (y,) = session.run(None, {"x": jax.numpy.asarray(X.numpy())})
        assert np.array_equal(jax.numpy.from_dlpack(y), X.relu().numpy())
        with session.bind() as execution:
            execution.inputs["x"][:] = jax.numpy.asarray(X.numpy())
            execution.run()
            there = jax.numpy.from_dlpack(execution.outputs["y"])
            assert there.unsafe_buffer_pointer() == execution.outputs["y"].ctypes.data
            del there
