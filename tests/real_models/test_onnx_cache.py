"""ONNX models from the compilation cache: the same answers in every bit, whatever lies in the files."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

import nnburst
from nnburst import Memory
from nnburst.cache.names import model_fingerprint
from nnburst.cache.reasons import CacheReason, CacheRejected
from nnburst.devices.interfaces import CacheFiles, CompileJob
from nnburst.devices.onnxruntime import device as _device
from nnburst.devices.onnxruntime import packed
from nnburst.devices.registry import create_device
from nnburst.errors import GeneralFailure
from support.onnx_models import FLOAT, RNG, graph, in_process, mlp, node, onnx, run_graph

LIGHT = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
DEVICE = "nnburst-onnxruntime:threads=1"
TOKEN = bytes(range(32))
DENSENET = str(LIGHT / "light_densenet121.onnx")


@pytest.fixture(scope="module", autouse=True)
def state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NNBURST_STATE_DIR", str(tmp_path_factory.mktemp("state") / "nnburst"))
        yield


@pytest.fixture
def service() -> Iterator[nnburst.Service]:
    with nnburst.launch(devices=[DEVICE]) as service:
        yield service


def picture() -> np.ndarray:
    return RNG.random((1, 3, 224, 224), np.float32)


@pytest.mark.check
def test_network_is_saved_once_and_then_loaded_in_every_service(service: nnburst.Service, tmp_path: Path) -> None:
    x = picture()
    (expected,) = in_process(DENSENET, {"data_0": x})
    with service.session(DENSENET, cache_dir=tmp_path / "cache") as session:
        assert session.cache_report.outcome == "SAVED", session.cache_report
        assert np.array_equal(session.run(None, {"data_0": x})[0], expected)
    with service.session(DENSENET, cache_dir=tmp_path / "cache") as session:
        assert session.cache_report.outcome == "HIT", session.cache_report
        assert np.array_equal(session.run(None, {"data_0": x})[0], expected)
    with nnburst.Session(DENSENET, device=DEVICE, cache_dir=tmp_path / "cache") as session:
        assert session.cache_report.outcome == "HIT"
        assert session.get_inputs()[0].shape == (1, 3, 224, 224)
        assert np.array_equal(session.run(None, {"data_0": x})[0], expected)


@pytest.mark.check
def test_session_that_restarts_takes_the_model_from_the_cache(tmp_path: Path) -> None:
    x = picture()
    with nnburst.Session(DENSENET, device=DEVICE, cache_dir=tmp_path / "cache", on_death="restart") as session:
        assert session.cache_report.outcome == "SAVED"
        (expected,) = session.run(None, {"data_0": x})
        session.service.kill()
        assert np.array_equal(session.run(None, {"data_0": x})[0], expected)
        assert session.cache_report.outcome == "HIT"
        assert [restart.cache for restart in session.restarts] == ["HIT"]


@pytest.mark.check
def test_files_that_were_changed_are_not_used(tmp_path: Path) -> None:
    x = picture()
    (expected,) = in_process(DENSENET, {"data_0": x})
    with nnburst.launch(devices=[DEVICE]) as service:
        service.session(DENSENET, cache_dir=tmp_path / "cache").close()
        files = [path for path in (tmp_path / "cache").rglob("*") if path.stat().st_size > 100_000 and path.is_file()]
        assert files
        for path in files:
            with open(path, "r+b") as file:
                file.seek(path.stat().st_size // 2)
                byte = file.read(1)
                file.seek(-1, os.SEEK_CUR)
                file.write(bytes([byte[0] ^ 1]))
        with service.session(DENSENET, cache_dir=tmp_path / "cache") as session:
            assert session.cache_report.outcome != "HIT", session.cache_report
            assert session.cache_report.rejected is not None
            assert np.array_equal(session.run(None, {"data_0": x})[0], expected)


class Files:
    """A model file and a data file."""

    def __init__(self, directory: Path) -> None:
        self.fds = [os.open(directory / name, os.O_RDWR | os.O_CREAT, 0o600) for name in ("model", "data")]

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *_: object) -> None:
        for fd in self.fds:
            os.close(fd)

    @property
    def as_given(self) -> CacheFiles:
        return self.under(TOKEN)

    def under(self, token: bytes) -> CacheFiles:
        return CacheFiles((self.fds[0],), (self.fds[1],), token)


def test_device_saves_and_restores_dynamic_models_and_shares_their_weights(tmp_path: Path) -> None:
    device = create_device(DEVICE)
    data = mlp(64, 2, "n").SerializeToString()
    with Memory.ashmem(len(data)) as pool, Files(tmp_path) as files:
        pool.buffer[:] = data
        model = replace(device.import_model("onnx", [pool]).model, pools=(pool,))
        assert device.get_number_of_cache_files_needed() == (1, 1)
        compiled = device.prepare_model(model, CompileJob(cache=files.as_given))
        assert compiled.cache_result is not None
        assert compiled.cache_result.saved, compiled.cache_result
        shared = device.prepare_model_from_cache(files.as_given)
        assert shared.graph is compiled.graph  # type: ignore[attr-defined]
        assert shared.model.main == model.main  # type: ignore[attr-defined]
        compiled.close()
        shared.close()
        loaded = device.prepare_model_from_cache(files.as_given)
        again = device.prepare_model_from_cache(files.as_given)
        assert loaded.graph is again.graph  # type: ignore[attr-defined]
        x = RNG.normal(size=(5, 64)).astype(np.float32)
        (y,) = run_graph(loaded.graph, {"x": x})  # type: ignore[attr-defined]
        assert np.array_equal(y, in_process(data, {"x": x})[0])
        with pytest.raises(CacheRejected):
            device.prepare_model_from_cache(files.under(TOKEN[::-1]))
        loaded.close()
        again.close()
    device.close()


def test_weights_that_were_given_back_are_read_again(tmp_path: Path) -> None:
    data, token = mlp(256, 2).SerializeToString(), TOKEN[6:] + TOKEN[:6]
    x = RNG.normal(size=(1, 256)).astype(np.float32)
    (expected,) = in_process(data, {"x": x})
    with closing(create_device(DEVICE)) as device, Memory.ashmem(len(data)) as pool, Files(tmp_path) as files:
        pool.buffer[:] = data
        model = replace(device.import_model("onnx", [pool]).model, pools=(pool,))
        with closing(device.prepare_model(model, CompileJob(cache=files.under(token)))) as compiled:
            assert compiled.cache_result is not None
            assert compiled.cache_result.saved

        def run() -> Any:
            prepared: Any = device.prepare_model_from_cache(files.under(token))
            assert np.array_equal(run_graph(prepared.graph, {"x": x})[0], expected)
            return prepared

        with closing(run()) as first, closing(run()) as second:
            assert first.graph is second.graph
            held = device._cache.load(files.under(token))  # type: ignore[attr-defined]
            assert held.data[0].obj.is_claimed  # the same memory, without another copy
        with pytest.raises(CacheRejected) as caught:  # as long as it is there
            run()
        assert caught.value.reason is CacheReason.BUSY
        del held, caught  # whose frames hold it, too
        run().close()


def relu(device: Any, files: CacheFiles) -> Any:
    """Compile a small model into cache files; what became of them."""
    data = graph([node("Relu", ["x"], ["y"])], [("x", FLOAT, (4,))], [("y", FLOAT, (4,))]).SerializeToString()
    with Memory.ashmem(len(data)) as pool:
        pool.buffer[:] = data
        model = replace(device.import_model("onnx", [pool]).model, pools=(pool,))
        if files.fingerprint == b"its own":
            files = replace(files, fingerprint=model_fingerprint(model))
        with closing(device.prepare_model(model, CompileJob(cache=files))) as prepared:
            return prepared.cache_result


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(28, "no space for temporary files"), CacheReason.IO_ERROR),
        (GeneralFailure("not to be written"), CacheReason.DECLINED),
    ],
)
def test_model_that_cannot_be_kept_is_compiled_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, reason: CacheReason
) -> None:
    def broken(*_: object) -> None:
        raise error

    monkeypatch.setattr(_device, "pack", broken)
    with closing(create_device(DEVICE)) as device, Files(tmp_path) as files:
        assert relu(device, files.under(TOKEN[1:] + TOKEN[:1])).reason is reason


def test_what_was_compiled_is_compared_with_what_was_asked_for(tmp_path: Path) -> None:
    with closing(create_device(DEVICE)) as device, Files(tmp_path) as files:
        given = files.under(TOKEN[2:] + TOKEN[:2])
        assert relu(device, replace(given, fingerprint=bytes(31) + b"x")).reason is CacheReason.CHANGED
        assert relu(device, replace(given, fingerprint=b"its own")).reason is CacheReason.SAVED


@pytest.mark.check
@pytest.mark.parametrize("sandbox", ["on", "off"])
def test_encrypted_entry_of_a_service_is_saved_and_found(tmp_path: Path, sandbox: str) -> None:
    x, options = picture(), {"cache_dir": tmp_path / "cache", "cache_encrypt": True}
    (expected,) = in_process(DENSENET, {"data_0": x})
    for outcome in ("SAVED", "HIT"):
        with nnburst.Session(DENSENET, device=DEVICE, sandbox=sandbox, **options) as session:
            assert session.cache_report.outcome == outcome, session.cache_report
            assert np.array_equal(session.run(None, {"data_0": x})[0], expected)


def test_encrypted_entry_leaves_nothing_on_a_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []
    real = tempfile.TemporaryDirectory.cleanup

    def cleanup(directory: tempfile.TemporaryDirectory[str]) -> None:
        written.extend(path.stat().st_blocks for path in Path(directory.name).iterdir())
        real(directory)

    monkeypatch.setattr(tempfile.TemporaryDirectory, "cleanup", cleanup)
    token = TOKEN[5:] + TOKEN[:5]
    with closing(create_device(DEVICE)) as device, Files(tmp_path) as files:
        given = replace(files.under(token), encrypt=True)
        assert relu(device, given).reason is CacheReason.SAVED
        with pytest.raises(CacheRejected) as caught:
            device.prepare_model_from_cache(replace(given, encrypt=False))
        assert caught.value.reason is CacheReason.OTHER_CIPHER
        device.prepare_model_from_cache(given).close()
    assert written
    assert not any(written)  # a file of holes, each time


def test_without_memory_nothing_is_kept_and_it_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    token = TOKEN[4:] + TOKEN[:4]
    with closing(create_device(DEVICE)) as device, Files(tmp_path) as files:
        with monkeypatch.context() as patch:
            patch.setattr(packed, "_memory_left", lambda: 1 << 20)
            assert relu(device, files.under(token)).reason is CacheReason.IO_ERROR
        assert relu(device, files.under(token)).reason is CacheReason.SAVED
        device.prepare_model_from_cache(files.under(token)).close()
        monkeypatch.setattr(packed, "default_state_directory", lambda: tmp_path / "none")
        with pytest.raises(CacheRejected, match="no file of holes") as caught:
            device.prepare_model_from_cache(files.under(token))
        assert caught.value.reason is CacheReason.IO_ERROR


def test_epoch_depends_on_the_runtime_but_not_on_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    with nnburst.launch(devices=[DEVICE]) as service:
        there = service.devices[0].cache_epoch
    here = create_device(DEVICE)
    assert len(there) == 32
    assert here.cache_epoch == there
    monkeypatch.setattr(_device, "_version", lambda: "0.1.0+onnxruntime0.0.1")
    assert here.cache_epoch != there
