"""ONNX Runtime's Python interface over sessions, beside ONNX Runtime itself."""

from __future__ import annotations

import os
import queue
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import nnburst
import nnburst.compat.onnxruntime as compat
from nnburst import DeadObject, GeneralFailure, InvalidArgument
from nnburst.devices.onnxruntime import importer, library
from nnburst.runtime import pickled
from support.onnx_models import FLOAT, RNG, classifier, graph, mlp, node, ort, save
from support.processes import run_python, stop
from support.services import shared_service
from support.waiting import Background, until

X = RNG.normal(size=(3, 16)).astype(np.float32)
MODEL = mlp(16, 2, "rows")
MODEL.producer_name, MODEL.doc_string, MODEL.graph.doc_string = "tests", "two layers", "a graph"
MODEL.metadata_props.add(key="labels", value="cat,dog")
DATA = MODEL.SerializeToString()


@pytest.fixture(scope="module")
def session() -> Iterator[compat.InferenceSession]:
    session = compat.InferenceSession(DATA)
    yield session
    session._session.close()


@pytest.fixture(scope="module")
def expected() -> np.ndarray:
    (y,) = ort.InferenceSession(DATA).run(None, {"x": X})
    return np.asarray(y)


def test_session_tells_what_onnxruntime_tells(session: compat.InferenceSession) -> None:
    theirs = ort.InferenceSession(DATA)
    for mine, other in (
        (session.get_inputs(), theirs.get_inputs()),
        (session.get_outputs(), theirs.get_outputs()),
        (session.get_overridable_initializers(), theirs.get_overridable_initializers()),
    ):
        assert [(n.name, n.type, n.shape) for n in mine] == [(n.name, n.type, n.shape) for n in other]
    mine, other = session.get_modelmeta(), theirs.get_modelmeta()
    for name in mine.__struct_fields__:
        assert getattr(mine, name) == getattr(other, name), name
    assert session.get_providers() == theirs.get_providers() == compat.get_available_providers()
    assert session.get_provider_options() == theirs.get_provider_options()
    assert compat.get_device() == ort.get_device()
    assert compat.__version__ == ort.__version__


def test_session_takes_and_tells_what_packages_use(tmp_path: Path, expected: np.ndarray) -> None:
    def opened(module: Any, source: bytes | Path) -> Any:
        module.preload_dlls(directory="")
        options = module.SessionOptions()
        options.use_deterministic_compute, options.intra_op_num_threads = False, -1
        session = module.InferenceSession(source, options)
        session.disable_fallback()
        options.intra_op_num_threads = 2
        assert session.get_session_options().intra_op_num_threads == -1
        return session

    for source in (DATA, Path(save(MODEL, tmp_path / "without_a_suffix"))):
        mine, other = opened(compat, source), opened(ort, source)
        assert np.array_equal(mine.run(None, {"x": X})[0], expected)
        for name in ("_providers", "_provider_options", "_model_path"):
            assert getattr(mine, name) == getattr(other, name)
    with pytest.warns(UserWarning, match="without CUDAExecutionProvider"):
        mine.set_providers(["CUDAExecutionProvider"])


def test_run_gives_the_bits_of_onnxruntime(session: compat.InferenceSession, expected: np.ndarray) -> None:
    for names in (None, [], ["y"]):
        (y,) = session.run(names, {"x": X}, compat.RunOptions())
        assert y.tobytes() == expected.tobytes()


def test_labels_and_scores_are_what_onnxruntime_gives() -> None:
    data, inputs = classifier().SerializeToString(), {"x": X[:, :2].copy()}
    mine, other = compat.InferenceSession(data), ort.InferenceSession(data)
    (labels, scores), (their_labels, their_scores) = mine.run(None, inputs), other.run(None, inputs)
    assert (labels.dtype, labels.tolist(), scores) == (their_labels.dtype, their_labels.tolist(), their_scores)
    kinds = [(n.name, n.type, n.shape) for n in other.get_outputs()]
    assert [(n.name, n.type, n.shape) for n in mine.get_outputs()] == kinds


def gelu() -> bytes:
    """A chain of nodes that optimisation replaces by one, whose last bits differ."""
    nodes = [
        node("Div", ["x", "root"], ["a"]),
        node("Erf", ["a"], ["b"]),
        node("Add", ["b", "one"], ["c"]),
        node("Mul", ["x", "c"], ["d"]),
        node("Mul", ["d", "half"], ["y"]),
    ]
    weights = {name: np.float32(value) for name, value in (("root", 2**0.5), ("one", 1), ("half", 0.5))}
    rows = ("rows", 16)
    data: bytes = graph(nodes, [("x", FLOAT, rows)], [("y", FLOAT, rows)], weights).SerializeToString()
    return data


def test_options_reach_the_model() -> None:
    def run(module: Any, level: str) -> np.ndarray:
        options = module.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 4
        options.graph_optimization_level = getattr(module.GraphOptimizationLevel, level)
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        session = module.InferenceSession(gelu(), sess_options=options, providers=["CPUExecutionProvider"])
        assert session.get_session_options().intra_op_num_threads == 1
        return np.asarray(session.run(None, {"x": X})[0])

    levels = ("ORT_DISABLE_ALL", "ORT_ENABLE_ALL")
    plain, fused = (run(compat, level) for level in levels)
    assert [plain.tobytes(), fused.tobytes()] == [run(ort, level).tobytes() for level in levels]
    assert plain.tobytes() != fused.tobytes(), "the levels give the same bits: this model tells nothing"


@pytest.mark.parametrize(
    ("use", "error", "says"),
    [
        (lambda: setattr(compat.SessionOptions(), "enable_profiling", True), InvalidArgument, "nnburst trace"),
        (lambda: setattr(compat.SessionOptions(), "use_deterministic_compute", True), InvalidArgument, "leave it out"),
        (lambda: setattr(compat.RunOptions(), "training_mode", True), InvalidArgument, "RunOptions.training_mode"),
        (lambda: compat.SessionOptions().register_custom_ops_library("x.so"), AttributeError, "serve a function"),
        (
            lambda: compat.SessionOptions().add_session_config_entry("session.set_denormal_as_zero", "1"),
            InvalidArgument,
            "set_denormal_as_zero",
        ),
        (lambda: compat.SessionOptions().get_session_config_entry("none"), GeneralFailure, "no entry 'none'"),
        (lambda: compat.InferenceSession(DATA, disabled_optimizers=["a"]), InvalidArgument, "disabled_optimizers"),
        (lambda: compat.InferenceSession(DATA, ort.SessionOptions()), TypeError, "compat.onnxruntime.SessionOptions"),
        (lambda: compat.InferenceSession("/nowhere/model"), compat.NoSuchFile, "/nowhere/model"),
        (lambda: compat.InferenceSession(b"nothing"), compat.InvalidProtobuf, "no ONNX model"),
        (lambda: compat.set_seed(1), AttributeError, "set_seed"),
        (lambda: compat.OrtValue.ortvalue_from_numpy(X, "cuda"), InvalidArgument, "'cuda'"),
    ],
)
def test_what_cannot_be_had_is_refused_by_its_name(
    use: Callable[[], object], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        use()


def test_run_that_is_to_terminate_does_not_begin(session: compat.InferenceSession) -> None:
    options = compat.RunOptions()
    options.terminate = True
    before = session._session.stats.sent
    with pytest.raises(GeneralFailure, match="terminate"):
        session.run(None, {"x": X}, options)
    assert session._session.stats.sent == before


def test_providers_that_are_not_there_and_files_that_are_not_written_are_named(tmp_path: Path) -> None:
    options = compat.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "m.onnx")
    with pytest.warns(UserWarning, match="optimized_model_filepath: no file is written"):
        compat.InferenceSession(DATA, options)
    with pytest.warns(UserWarning, match="without CUDAExecutionProvider: models run on the CPU"):
        compat.InferenceSession(DATA, providers=[("CUDAExecutionProvider", {}), "CPUExecutionProvider"])


def test_binding_reads_and_writes_arrays_of_the_caller(session: compat.InferenceSession, expected: np.ndarray) -> None:
    x, y = X.copy(), np.zeros_like(expected)
    binding = session.io_binding()
    binding.bind_cpu_input("x", x)
    binding.bind_output("y")
    session.run_with_iobinding(binding)
    assert np.array_equal(binding.copy_outputs_to_cpu()[0], expected)
    binding.bind_input("x", "cpu", 0, np.float32, x.shape, x.ctypes.data)
    binding.bind_output("y", "cpu", 0, np.float32, y.shape, y.ctypes.data)
    x[:] = 2 * X
    session.run_with_iobinding(binding)
    assert np.array_equal(y, session.run(None, {"x": 2 * X})[0])
    binding.clear_binding_outputs()
    with pytest.raises(GeneralFailure, match="no output is bound"):
        session.run_with_iobinding(binding)


def test_binding_of_values_in_shared_memory_copies_nothing(
    session: compat.InferenceSession, expected: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = (compat.OrtValue.ortvalue_from_shape_and_type(shape, np.float32) for shape in (X.shape, expected.shape))
    binding = session.io_binding()
    binding.bind_ortvalue_input("x", x)
    binding.bind_ortvalue_output("y", y)
    monkeypatch.setattr(session._session, "run", None)  # which would copy
    for factor in (1, -1):
        x.update_inplace(factor * X)
        session.run_with_iobinding(binding)
        (made,) = binding.get_outputs()
        assert made is y
    monkeypatch.undo()
    assert np.array_equal(y.numpy(), session.run(None, {"x": -X})[0])
    assert (y.data_type(), y.shape(), y.device_name()) == ("tensor(float)", [3, 16], "cpu")
    with pytest.raises(InvalidArgument, match="does not fit"):
        y.update_inplace(X[:1])
    with pytest.raises(InvalidArgument, match="another session"):
        compat.InferenceSession(DATA).run_with_iobinding(binding)


def test_asynchronous_run_calls_back(session: compat.InferenceSession, expected: np.ndarray) -> None:
    answers: queue.Queue[tuple[list[Any], Any, str]] = queue.Queue()
    for feed in ({"x": X}, {"wrong": X}):
        session.run_async(["y"], feed, lambda *answer: answers.put(answer), "mine")
        outputs, mine, error = answers.get(timeout=60)
        assert mine == "mine"
        assert bool(outputs) != bool(error)
        if outputs:
            assert np.array_equal(outputs[0], expected)
    assert "no inputs" in error or "missing" in error


def test_crash_of_the_model_is_an_exception_and_the_next_run_works(expected: np.ndarray) -> None:
    session = compat.InferenceSession(DATA)
    session.run(None, {"x": X})
    sent = session._session.stats.sent
    stop(session._session.service.pid)
    under_way = Background(lambda: session.run(None, {"x": X}))
    until(lambda: session._session.stats.sent > sent, "the run does not begin")
    session._session.service.kill()
    assert isinstance(under_way.result(), DeadObject)
    assert np.array_equal(session.run(None, {"x": X})[0], expected)


def test_process_ends_with_the_last_reference() -> None:
    session = compat.InferenceSession(DATA)
    pid = session._session.service.pid
    del session
    until(lambda: not os.path.exists(f"/proc/{pid}"), "the process of the model is still there")


def test_run_of_a_finaliser_at_the_end_of_the_interpreter_is_an_error(tmp_path: Path) -> None:
    program = """
import sys
import numpy as np
import nnburst.compat.onnxruntime as compat
class Last:
    def __del__(self):
        session.run(None, {"x": np.ones((1, 16), np.float32)})
session, last = compat.InferenceSession(sys.argv[1]), Last()
"""
    done = run_python("-c", program, save(MODEL, tmp_path / "m.onnx"))
    assert "ResourceExhausted: a service that starts again needs a thread" in done.stderr


def test_metadata_that_is_too_long_is_missing_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importer, "_MOST_METADATA", 10)
    with nnburst.in_process(devices=["nnburst-onnxruntime"]) as service, service.session(DATA) as session:
        with pytest.raises(GeneralFailure, match="no metadata here"):
            _ = session.compilation.metadata


# ---- a service for all -----------------------------------------------------------------------------------------------


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with shared_service(tmp_path, "--device", "nnburst-onnxruntime:threads=1") as shared:
        monkeypatch.setenv("NNBURST_SERVICE", shared.address)
        yield
        for _, _, known in pickled._known:
            if isinstance(thing := known(), nnburst.Service):
                thing.close()
        pickled._known.clear()


def test_variable_names_one_service_for_all_sessions(shared: None, expected: np.ndarray) -> None:
    first, second = compat.InferenceSession(DATA), compat.InferenceSession(gelu())
    assert first._session.service is second._session.service
    assert np.array_equal(first.run(None, {"x": X})[0], expected)
    options = compat.SessionOptions()
    options.graph_optimization_level = compat.GraphOptimizationLevel.ORT_DISABLE_ALL
    with pytest.raises(InvalidArgument, match="NNBURST_SERVICE"):
        compat.InferenceSession(DATA, options)


# ---- in the place of onnxruntime -------------------------------------------------------------------------------------

PROGRAM = """
import importlib.util, sys
import numpy as np
import nnburst
from nnburst.compat import onnxruntime as compat

compat.install()
compat.install()
import onnxruntime as ort
from onnxruntime import InferenceSession
from onnxruntime.capi import _pybind_state as C
from onnxruntime.capi.onnxruntime_pybind11_state import Fail, NoSuchFile
import onnxruntime.capi.onnxruntime_inference_collection as collection

assert InferenceSession is compat.InferenceSession is collection.InferenceSession
assert C.get_available_providers() == ["CPUExecutionProvider"] and Fail is nnburst.GeneralFailure
import onnxruntime.datasets
assert importlib.util.find_spec("onnxruntime").origin.endswith("onnxruntime/__init__.py")
assert not hasattr(ort, "set_seed")
x = np.ones((1, 16), np.float32)
session = ort.InferenceSession(sys.argv[1])
(y,) = session.run(None, {"x": x})
with nnburst.in_process(devices=["nnburst-onnxruntime"]) as service, service.session(sys.argv[1]) as real:
    assert np.array_equal(real.run(None, {"x": x})[0], y)
assert "onnxruntime.capi.onnxruntime_validation" not in sys.modules  # a module of the real one
compat.uninstall()
compat.uninstall()
assert not [name for name in sys.modules if name.startswith("onnxruntime")]
import onnxruntime
assert onnxruntime.InferenceSession is not InferenceSession and onnxruntime.set_seed
assert np.array_equal(onnxruntime.InferenceSession(sys.argv[1]).run(None, {"x": x})[0], y)
print("done", ort.__version__ == onnxruntime.__version__)
"""


def test_packages_import_it_in_the_place_of_onnxruntime(tmp_path: Path) -> None:
    done = run_python("-W", "error", "-c", PROGRAM, save(MODEL, tmp_path / "m.onnx"))
    assert (done.stdout, done.returncode) == ("done True\n", 0), done.stderr


def test_package_that_has_imported_onnxruntime_before_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    library.python_module.cache_clear()
    early = ModuleType("early")
    vars(early).update(array=np.zeros(2), runtime=ort)
    monkeypatch.setitem(sys.modules, "early", early)
    monkeypatch.setitem(sys.modules, "none", None)
    with pytest.warns(UserWarning, match=r"before install\(\), and stays in .*'early'"):
        compat.install()
    try:
        assert sys.modules["onnxruntime"].InferenceSession is compat.InferenceSession
        with pytest.raises(nnburst.DeviceUnavailable, match="uninstall"):
            nnburst.in_process(devices=["nnburst-onnxruntime:providers=cuda"])
    finally:
        compat.uninstall()
    assert sys.modules["onnxruntime"] is ort
