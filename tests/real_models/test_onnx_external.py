"""Tensors in external files, wherever in a model they are: the files beside the model, and no others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nnburst
from nnburst import GeneralFailure, InvalidArgument
from nnburst.devices.onnxruntime.graph import SessionSettings, open_session
from support.onnx_models import FLOAT, TensorProto, graph, helper, node, numpy_helper, onnx, save

OURS = np.float32([7, 8, 9, 10])
THEIRS = np.float32([1000, 1001, 1002, 1003])


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[nnburst.Service]:
    """A service whose working directory has files that models name."""
    directory = tmp_path_factory.mktemp("service")
    (directory / "data").mkdir()
    (directory / "data" / "w.bin").write_bytes(THEIRS.tobytes())
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        started = nnburst.launch(devices=["nnburst-onnxruntime:threads=1"])
    with started as service:
        yield service


def external(name: str, location: str = "w.bin", dims: tuple[int, ...] = (4,)) -> Any:
    tensor = TensorProto(name=name, data_type=FLOAT, dims=dims, data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value=location)
    tensor.external_data.add(key="length", value="16")
    return tensor


def sparse(tensor: Any) -> Any:
    indices = numpy_helper.from_array(np.arange(4), "indices")
    return onnx.SparseTensorProto(values=tensor, indices=indices, dims=[4])


def add(*constants: Any) -> Any:
    """x + c, where nodes before it make c."""
    return graph([*constants, node("Add", ["x", "c"], ["y"])], [("x", FLOAT, (4,))], [("y", FLOAT, (4,))])


def in_initializer(tensor: Any) -> Any:
    model = add()
    model.graph.initializer.append(tensor)
    return model


def in_sparse_initializer(tensor: Any) -> Any:
    model = add()
    model.graph.sparse_initializer.append(sparse(tensor))
    return model


def constant(**value: Any) -> Any:
    made = node("Constant", [], ["c"])
    made.attribute.append(onnx.AttributeProto(**value))
    return made


def in_attribute(tensor: Any) -> Any:
    return add(constant(name="value", type=onnx.AttributeProto.TENSOR, t=tensor))


def in_sparse_attribute(tensor: Any) -> Any:
    return add(constant(name="sparse_value", type=onnx.AttributeProto.SPARSE_TENSOR, sparse_tensor=sparse(tensor)))


def in_inner_attribute(tensor: Any) -> Any:
    return inner(constant(name="value", type=onnx.AttributeProto.TENSOR, t=tensor))


def in_inner_sparse_attribute(tensor: Any) -> Any:
    return inner(constant(name="sparse_value", type=onnx.AttributeProto.SPARSE_TENSOR, sparse_tensor=sparse(tensor)))


def inner(value: Any) -> Any:
    branch = helper.make_graph([value], "branch", [], [helper.make_tensor_value_info("c", FLOAT, (4,))])
    choice = node("If", ["yes"], ["c"], then_branch=branch, else_branch=branch)
    model = add(choice)
    model.graph.initializer.append(numpy_helper.from_array(np.array(True), "yes"))
    return model


def in_function(tensor: Any) -> Any:
    value = constant(name="value", type=onnx.AttributeProto.TENSOR, t=tensor)
    body = [value, node("Add", ["a", "c"], ["b"])]
    function = helper.make_function("own", "F", ["a"], ["b"], body, [helper.make_opsetid("", 17)])
    call = helper.make_node("F", ["x"], ["y"], domain="own")
    model = graph([call], [("x", FLOAT, (4,))], [("y", FLOAT, (4,))])
    model.functions.append(function)
    model.opset_import.append(helper.make_opsetid("own", 1))
    return model


PLACES: tuple[Callable[[Any], Any], ...] = (
    in_initializer,
    in_sparse_initializer,
    in_attribute,
    in_sparse_attribute,
    in_inner_attribute,
    in_inner_sparse_attribute,
    in_function,
)


@pytest.mark.parametrize("place", PLACES)
def test_tensor_anywhere_in_a_model_comes_from_the_file_beside_it(
    service: nnburst.Service, tmp_path: Path, place: Callable[[Any], Any]
) -> None:
    model = place(external("c", "data/w.bin"))
    path = save(model, tmp_path / "m.onnx")
    with pytest.raises(InvalidArgument, match=r"'data/w\.bin'.*cannot be opened"):  # the service could open one
        service.session(path)
    with pytest.raises(InvalidArgument, match=r"\['data/w\.bin'\]; give its path"):
        service.session(model.SerializeToString())
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "w.bin").write_bytes(OURS.tobytes())
    with service.session(path) as session:
        assert np.array_equal(session.run(None, {"x": np.zeros(4, np.float32)})[0], OURS)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("location", ["../w.bin", "/etc/passwd", "a/../../w.bin", "..", ""])
def test_file_outside_of_the_directory_is_refused_wherever_it_is_named(
    service: nnburst.Service, tmp_path: Path, place: Callable[[Any], Any], location: str
) -> None:
    with pytest.raises(InvalidArgument, match="must be inside the model's directory"):
        service.session(save(place(external("c", location)), tmp_path / "m.onnx"))


def test_file_below_a_folder_that_leads_out_is_refused(service: nnburst.Service, tmp_path: Path) -> None:
    (tmp_path / "w.bin").write_bytes(OURS.tobytes())
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "sub").symlink_to("..")
    with pytest.raises(InvalidArgument, match="outside of that directory"):
        service.session(save(in_initializer(external("c", "sub/w.bin")), tmp_path / "models" / "m.onnx"))


def test_model_and_its_file_may_be_links_into_a_folder_of_blobs(service: nnburst.Service, tmp_path: Path) -> None:
    (blobs := tmp_path / "blobs").mkdir()
    (revision := tmp_path / "snapshots" / "revision").mkdir(parents=True)
    save(in_initializer(external("c")), blobs / "6f1c")
    (blobs / "9a0b").write_bytes(OURS.tobytes())
    for name, blob in (("m.onnx", "6f1c"), ("w.bin", "9a0b")):
        (revision / name).symlink_to(f"../../blobs/{blob}")
    (tmp_path / "current").symlink_to("snapshots/revision")
    with service.session(str(blobs / ".." / "current" / "m.onnx")) as session:
        assert np.array_equal(session.run(None, {"x": np.zeros(4, np.float32)})[0], OURS)


def test_information_about_training_is_looked_at_too(service: nnburst.Service) -> None:
    model = in_initializer(numpy_helper.from_array(OURS, "c"))
    model.training_info.add().algorithm.CopyFrom(in_attribute(external("c", "elsewhere.bin")).graph)
    with pytest.raises(InvalidArgument, match=r"\['elsewhere\.bin'\]"):
        service.session(model.SerializeToString())


@pytest.mark.parametrize("place", PLACES)
def test_onnxruntime_itself_opens_no_file_for_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: Callable[[Any], Any]
) -> None:
    (tmp_path / "w.bin").write_bytes(THEIRS.tobytes())
    monkeypatch.chdir(tmp_path)
    with pytest.raises(GeneralFailure, match=r"External data path does not exist|should be stored in /dev/null/w.bin"):
        open_session(place(external("c")).SerializeToString(), SessionSettings(1), SessionSettings(1).options())


@pytest.mark.parametrize(
    ("size", "shapes", "says"),
    [
        *((16, [dims], "tensor 'c'") for dims in [(-1, -4), (-4,), (2**62, 4, 4), (2**31, 2**31)]),
        (16, [(2**62,) * 300_000], r"tensor 'c': .*at most 64 axes"),  # said before sizes are multiplied
        (16, [(4,), (4,)], "two initializers with the name 'c'"),
        (15, [(4,)], r"'c' ends at byte 16 of 'w\.bin', which has 15"),
    ],
)
def test_external_tensors_that_cannot_be_are_named(
    service: nnburst.Service, tmp_path: Path, size: int, shapes: list[tuple[int, ...]], says: str
) -> None:
    (tmp_path / "w.bin").write_bytes(OURS.tobytes()[:size])
    model = add()
    model.graph.initializer.extend(external("c", dims=dims) for dims in shapes)
    with pytest.raises(InvalidArgument, match=says):
        service.session(save(model, tmp_path / "m.onnx"))


def test_what_fits_no_message_is_refused_and_other_sessions_go_on(service: nnburst.Service) -> None:
    deep = graph([node("Relu", ["x"], ["y"])], [("x", FLOAT, (1,) * 65)], [("y", FLOAT, (1,) * 65)])
    with service.session(in_initializer(numpy_helper.from_array(OURS, "c")).SerializeToString()) as other:
        with pytest.raises(InvalidArgument, match="external file has 5000 characters"):
            service.session(in_initializer(external("c", "n" * 5000)).SerializeToString())
        with pytest.raises(GeneralFailure, match="65 dimensions"):
            service.session(deep.SerializeToString())
        to = [("x", FLOAT, (1,)), ("to", TensorProto.INT64, ("rank",))]
        reshape = graph([node("Reshape", ["x", "to"], ["y"])], to, [("y", FLOAT, None)])
        with service.session(reshape.SerializeToString()) as session:
            for rank in (1, 8, 65):
                arguments = {"x": np.ones(1, np.float32), "to": np.ones(rank, np.int64)}
                if rank <= 64:
                    assert session.run(None, arguments)[0].ndim == rank
                    continue
                with pytest.raises(GeneralFailure):
                    session.run(None, arguments)
        assert np.array_equal(other.run(None, {"x": np.zeros(4, np.float32)})[0], OURS)
