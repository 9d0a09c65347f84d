"""The networks that ship inside the `onnx` package, bit for bit as in process; weights exist once."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import numpy as np
import pytest

import nnburst
from support.onnx_models import RNG, graph, in_process, node, onnx, ort, save

LIGHT = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
SMALL = ("densenet121", "inception_v1", "inception_v2", "resnet50", "shufflenet", "squeezenet")
LARGE = ("bvlc_alexnet", "vgg19", "zfnet512")  # hundreds of megabytes of weights each


@pytest.mark.check
@pytest.mark.parametrize("name", [*SMALL, *(pytest.param(name, marks=pytest.mark.soak) for name in LARGE)])
def test_network_answers_bit_for_bit_as_in_process(name: str) -> None:
    path = str(LIGHT / f"light_{name}.onnx")
    with nnburst.launch(devices=["nnburst-onnxruntime:threads=1"]) as service, service.session(path) as session:
        (argument,) = session.get_inputs()
        assert all(isinstance(size, int) for size in argument.shape or ())
        x = RNG.random(argument.shape, np.float32)
        (expected,) = in_process(path, {argument.name: x})
        (y,) = session.run(None, {argument.name: x})
        assert np.array_equal(y, expected)
        with session.bind() as bound:
            bound.inputs[argument.name][:] = x
            for _ in range(2):
                bound.outputs[session.get_outputs()[0].name][:] = 0
                bound.run()
                assert np.array_equal(bound.outputs[session.get_outputs()[0].name], expected)
        assert session.stats.fallbacks == 0


def resident(pid: int) -> int:
    """Bytes of a process that are its own: what files share with others does not count."""
    with open(f"/proc/{pid}/smaps_rollup") as file:
        rows = dict(line.split(":", 1) for line in file if ":" in line and "-" not in line.split(":")[0])
    return sum(int(rows[key].split()[0]) * 1024 for key in ("Private_Dirty", "Private_Clean"))


@pytest.mark.check
def test_weights_exist_once_for_all_sessions_and_bursts(tmp_path: Path) -> None:
    size = 4096
    weights = RNG.normal(size=(size, size)).astype(np.float32)
    model = graph(
        [node("MatMul", ["x", "w"], ["y"])],
        [("x", onnx.TensorProto.FLOAT, (1, size))],
        [("y", onnx.TensorProto.FLOAT, (1, size))],
        {"w": weights},
    )
    path = save(model, tmp_path / "m.onnx")
    x = {"x": np.ones((1, size), np.float32)}
    with nnburst.launch(devices=["nnburst-onnxruntime:threads=1"]) as service:
        sessions = [service.session(path)]
        sessions[0].run(None, x)
        sessions.append(service.session(path))  # what a second one costs once: the allocator's arenas
        sessions[1].run(None, x)
        before = resident(service.pid)
        assert before > weights.nbytes  # or the weights are not where they are looked for
        for _ in range(6):
            sessions.append(service.session(path))
            sessions[-1].run(None, x)
        grown = resident(service.pid) - before
        assert grown / 6 < 0.05 * weights.nbytes
        for session in sessions:
            session.close()


def test_same_contents_under_other_names_are_shared_and_other_contents_are_not(tmp_path: Path) -> None:
    def constant(value: float) -> bytes:
        made = graph(
            [node("Add", ["x", "c"], ["y"])],
            [("x", onnx.TensorProto.FLOAT, (1,))],
            [("y", onnx.TensorProto.FLOAT, (1,))],
            {"c": np.float32([value])},
        )
        data: bytes = made.SerializeToString()
        return data

    (tmp_path / "a.onnx").write_bytes(constant(1))
    (tmp_path / "b.onnx").write_bytes(constant(1))
    x = {"x": np.float32([1])}
    with nnburst.in_process(devices=["nnburst-onnxruntime"]) as service:
        with service.session(tmp_path / "a.onnx") as a, service.session(tmp_path / "b.onnx") as b:
            (tmp_path / "a.onnx").write_bytes(constant(5))  # written over in place, same length
            with service.session(tmp_path / "a.onnx") as c:
                assert [s.run(None, x)[0].tolist() for s in (a, b, c)] == [[2], [2], [6]]
            graphs = [o for o in gc.get_objects() if isinstance(o, ort.InferenceSession)]
            assert len(graphs) <= 2


@pytest.mark.check
def test_file_that_changes_after_the_session_opened_changes_nothing(tmp_path: Path) -> None:
    made = graph(
        [node("MatMul", ["x", "w"], ["y"])],
        [("x", onnx.TensorProto.FLOAT, (1, 64))],
        [("y", onnx.TensorProto.FLOAT, (1, 64))],
        {"w": np.eye(64, dtype=np.float32)},
    )
    onnx.save(made, tmp_path / "m.onnx", save_as_external_data=True, location="w.bin", size_threshold=0)
    x = RNG.normal(size=(1, 64)).astype(np.float32)
    with nnburst.Session(tmp_path / "m.onnx") as session:
        assert np.array_equal(session.run(None, {"x": x})[0], x)
        (tmp_path / "w.bin").write_bytes(bytes(os.path.getsize(tmp_path / "w.bin")))
        os.truncate(tmp_path / "m.onnx", 0)
        assert np.array_equal(session.run(None, {"x": x})[0], x)
