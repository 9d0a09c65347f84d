"""Sessions of a shared service in other processes: a pickle names an address, a model and options, and never code."""

from __future__ import annotations

import copy
import io
import multiprocessing
import os
import pickle
import pickletools
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nnburst
from nnburst.runtime import pickled
from support.services import Shared, shared_service

FILTERS = """
from nnburst.devices.function import Tensor, declare

@declare(inputs=[Tensor("x", "float32", (None,))], outputs=[Tensor("y", "float32", (None,))])
def double(x):
    return 2 * x
"""
X = np.arange(3, dtype=np.float32)
Seen = tuple[int, int, int, list[float]]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    folder = tmp_path_factory.mktemp("shared")
    (folder / "filters.py").write_text(FILTERS)
    with shared_service(folder, f"{folder}/filters.py:double") as shared:
        yield shared


@pytest.fixture
def session(shared: Shared) -> Iterator[nnburst.Session]:
    with nnburst.connect(shared.address) as service, service.session("double", timeout=60) as session:
        yield session
    pickled._known.clear()


def weighted(n: int) -> nnburst.Model:
    """A model whose weights lie in a pool."""
    b = nnburst.ModelBuilder()
    x = b.input("x", nnburst.OperandType.TENSOR_FLOAT32, (1, 3))
    b.output("y", b.fully_connected(x, np.eye(n, 3, dtype=np.float32), np.zeros(n, np.float32)))
    return b.build()


def use(session: nnburst.Session, x: Any) -> Seen:
    """Run it; return the process, which connection and which session that has, and the outputs."""
    return os.getpid(), id(session.service), id(session), session.run(None, {"x": np.asarray(x)})[0].ravel().tolist()


class Watched(pickle.Unpickler):
    """Notes what a pickle asks for, and calls none of it."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self.found: list[str] = []
        self.load()

    def find_class(self, module: str, name: str) -> Any:
        self.found.append(f"{module}.{name}")
        return lambda *_: None


def test_pickle_names_an_address_a_model_and_options(session: nnburst.Session, shared: Shared) -> None:
    data = pickle.dumps(session)
    assert Watched(data).found == ["nnburst.runtime.pickled.read", "nnburst.runtime.pickled.open_session"]
    assert {shared.address, "double", "timeout"} < {a for _, a, _ in pickletools.genops(data) if isinstance(a, str)}
    assert Watched(pickle.dumps(session.service)).found[1:] == ["nnburst.runtime.pickled.connected"]


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda thing: pickle.loads(pickle.dumps(thing))])
def test_process_that_has_it_open_gets_that(session: nnburst.Session, again: Callable[[Any], Any]) -> None:
    assert again(session) is session
    assert again(session.service) is session.service


def test_closed_one_is_opened_anew_and_once(session: nnburst.Session) -> None:
    data = pickle.dumps(session)
    session.close()
    session.service.close()
    with pickle.loads(data) as another, another.service:
        assert another is not session
        assert another is pickle.loads(data)
        assert pickle.loads(pickle.dumps(another.service)) is another.service
        assert another.timeout == 60
        assert use(another, X)[3] == [0, 2, 4]


def test_use_of_one_whose_service_is_gone_raises_and_a_copy_opens_it(session: nnburst.Session) -> None:
    shared = session.service.shared
    session.service.shared = ("unix:/nowhere", 1.0, ())
    data = pickle.dumps(session)
    session.service.shared = shared
    pickled._known.clear()
    gone = pickle.loads(data)
    uses: list[Callable[[], Any]] = [lambda: gone.run(None, {"x": X}), gone.__enter__, lambda: copy.copy(gone).closed]
    for each in uses:
        with pytest.raises(nnburst.DeviceUnavailable, match="no service runs at '/nowhere': start one with"):
            each()
    assert pickle.dumps(gone) == data
    with multiprocessing.get_context("fork").Pool(1) as pool, pytest.raises(nnburst.DeviceUnavailable, match="nowhere"):
        pool.apply_async(use, (gone, X)).get(60)


@pytest.mark.check
def test_model_with_its_weights_and_all_options_arrives(session: nnburst.Session, tmp_path: Path) -> None:
    options: Any = {"priority": "high", "preference": "low_power", "on_death": "restart", "cache_dir": str(tmp_path)}
    with session.service.session(weighted(500), **options) as weighs:
        data = pickle.dumps(weighs)
        before = use(weighs, X[None])[3]
        weighs.close()
        with pickle.loads(data) as another:
            assert another._options == weighs._options
            assert use(another, X[None])[3] == before
    assert {name.rpartition(".")[0] for name in Watched(data).found} == {
        "nnburst.runtime.pickled", "nnburst.model.types", "nnburst.model.operand_types", "nnburst.model.operation_types"
    }  # fmt: skip


def test_file_of_a_model_and_a_socket_are_found_from_another_directory(
    session: nnburst.Session, shared: Shared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(shared.path.parent)
    session._model = "net.onnx"
    assert str(shared.path.parent / "net.onnx") in pickled.reduce_session(session)[1][1]
    with nnburst.connect(f"unix:{shared.path.name}") as relative:
        assert relative.shared is not None
        assert relative.shared[0] == shared.address


@pytest.mark.check
def test_session_that_a_forked_child_inherits_becomes_its_own_by_a_copy(session: nnburst.Session) -> None:
    def child(pipe: Any) -> None:
        try:
            session.run(None, {"x": X})
        except nnburst.BadState as error:
            pipe.send((str(error), use(copy.copy(session), X)[3], copy.copy(session) is copy.copy(session)))

    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=child, args=(there,))
    process.start()
    there.close()
    said, outputs, is_one = here.recv()
    process.join()
    assert "inherited through fork()" in said
    assert (outputs, is_one) == ([0, 2, 4], True)
    assert use(session, X)[3] == [0, 2, 4]


def by_process_pool(method: str, session: nnburst.Session) -> Iterable[Seen]:
    with ProcessPoolExecutor(2, multiprocessing.get_context(method)) as pool:
        return [*pool.map(use, [session, copy.copy(session)] * 4, [X] * 8)]


def by_joblib(session: nnburst.Session) -> Iterable[Seen]:
    joblib = pytest.importorskip("joblib")
    with joblib.parallel_config(backend="loky", n_jobs=2):
        found: list[Seen] = joblib.Parallel()(joblib.delayed(use)(session, X) for _ in range(8))
    pytest.importorskip("joblib.externals.loky").get_reusable_executor().shutdown(wait=True)
    return found


class Rows:
    """A data set that computes its rows."""

    def __init__(self, session: nnburst.Session) -> None:
        self.session = session

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Seen:
        return use(copy.copy(self.session), X)


def by_data_loader(method: str, session: nnburst.Session) -> Iterable[Seen]:
    data = pytest.importorskip("torch.utils.data")
    loader = data.DataLoader(Rows(session), num_workers=2, batch_size=None, multiprocessing_context=method)
    return [(int(pid), service, own, outputs) for pid, service, own, outputs in loader]


def by_dask(session: nnburst.Session) -> Iterable[Seen]:
    distributed = pytest.importorskip("distributed")
    with distributed.Client(n_workers=2, threads_per_worker=1, dashboard_address=None) as client:
        found: list[Seen] = client.gather(client.map(use, [session] * 8, [X + 0 * i for i in range(8)], pure=False))
        return found


def by_ray(session: nnburst.Session) -> Iterable[Seen]:
    ray = pytest.importorskip("ray")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
        task = ray.remote(use)
        found: list[Seen] = ray.get([task.remote(session, X) for _ in range(8)])
        return found
    finally:
        ray.shutdown()


WAYS = {
    **{f"ProcessPoolExecutor {how}": (by_process_pool, how) for how in ("spawn", "fork", "forkserver")},
    **{f"DataLoader {how}": (by_data_loader, how) for how in ("spawn", "fork", "forkserver")},
    "joblib": (by_joblib,),
    "Dask": (by_dask,),
    "Ray": (by_ray,),
}


@pytest.mark.check
@pytest.mark.filterwarnings("default")  # those of other libraries
@pytest.mark.leaks("processes of Ray, and joblib's resource tracker")
@pytest.mark.parametrize("way", [pytest.param(way, marks=[pytest.mark.soak] * (way == "Ray")) for way in WAYS])
def test_each_process_opens_one_connection_and_one_session(session: nnburst.Session, way: str) -> None:
    run, *how = WAYS[way]
    found = list(run(*how, session))  # type: ignore[operator]
    assert [outputs for *_, outputs in found] == [[0, 2, 4]] * 8
    assert os.getpid() not in {pid for pid, *_ in found}
    assert len({pid for pid, *_ in found}) == len({seen[:3] for seen in found})
